"""Rules about other files: paths of a machine, scripts, the lock, the tests themselves."""

import ast
import os
import re
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath

import pytest
from packaging.requirements import Requirement

from tests.sources import ROOT, Complaints, imports


def text_files() -> Iterator[tuple[str, str]]:
    """Every file that git tracks or would track, and can be read as text."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        path = ROOT / name
        data = path.read_bytes() if path.is_file() else b""
        if b"\0" not in data:
            yield name, data.decode("utf-8")


MACHINE_PATH = re.compile(r"(?<![\w.~$}-])/(work|root|farm)/")


def test_no_paths_of_a_machine() -> None:
    found = [
        f"{name}:{number}: {line.strip()[:100]}"
        for name, text in text_files()
        for number, line in enumerate(text.splitlines(), 1)
        if MACHINE_PATH.search(line)
    ]
    assert not found, "\n".join(found)


def test_paths_of_a_machine_are_found() -> None:
    assert MACHINE_PATH.search('"' + "/root" + "/x")
    assert not MACHINE_PATH.search('"$root/train.py" and at/work/now')


def test_the_step_fits_on_a_page() -> None:
    for path in ROOT.glob("train.py"):
        lines = len(path.read_text(encoding="utf-8").splitlines())
        assert lines <= 220, (
            f"train.py has {lines} lines: the loop is one page, its parts live in r3/"
        )


@pytest.mark.parametrize(
    "name", ["launch/local.sh", "launch/slurm.sbatch", "tools/setup_env.sh", ".ci/run"]
)
def test_scripts_parse_and_may_be_run(name: str) -> None:
    assert os.access(ROOT / name, os.X_OK)
    subprocess.run(["bash", "-n", ROOT / name], check=True)


@pytest.mark.parametrize(("lock", "python"), [("cpu.txt", "3.11"), ("cpu-py312.txt", "3.12")])
def test_lock_is_complete_and_portable(lock: str, python: str) -> None:
    """Exact versions, no build of one place, nothing that needs CUDA; it holds what pyproject.toml
    asks for.
    """
    text = (ROOT / "requirements" / lock).read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line and not line.lstrip().startswith("#")]
    odd = [line for line in lines if not re.fullmatch(r"[a-z0-9-]+==[0-9a-z.]+", line)]
    assert not odd, odd
    locked = {line.partition("==")[0] for line in lines}
    unwanted = {
        name
        for name in locked
        if name.startswith(("nvidia-", "cuda-", "torchvision", "torchaudio", "triton"))
    }
    assert not unwanted

    aside = (ROOT / "requirements/triton.txt").read_text(encoding="utf-8")
    assert re.search(r"^triton==[0-9.]+ ", aside, re.MULTILINE) and "--hash=sha256:" in aside

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert f'__version__ = "{project["version"]}"' in (ROOT / "r3/__init__.py").read_text(
        encoding="utf-8"
    )
    extras = project["optional-dependencies"]
    asked = [Requirement(each) for each in extras["cpu"]]
    of_python = [
        each
        for each in asked
        if not each.marker or each.marker.evaluate({"python_version": python})
    ]
    assert {f"{each.name}{each.specifier}" for each in of_python} <= set(lines)
    specs = [
        *project["dependencies"],
        *extras["data"],
        *extras["math"],
        *extras["report"],
        *extras["dev"],
    ]
    wanted = [Requirement(spec).name.lower() for spec in specs]
    assert set(wanted) <= locked


# ------------------------------------------------------------------------------------------------
# The tests themselves

MAX_TEST_NAME = 70


def complaints_about_tests(file: PurePosixPath, tree: ast.Module) -> Complaints:
    """A test's name is short; no module imports a test module, or cases of another folder."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            if len(node.name) > MAX_TEST_NAME:
                yield node.lineno, f"{node.name} has {len(node.name)} characters"
    for line, name in imports(file, tree):
        other = re.match(r"tests\.(\w+)\.(test_|\w+_cases)", name)
        foreign = other and file.parts[0] == "tests" and file.parts[1] not in (other[1], "gpu")
        if other and (other[2] == "test_" or foreign):
            yield line, f"imports {name}: shared parts belong in tests/*.py"


def test_tests_have_short_names_and_import_no_test() -> None:
    found = []
    for path in sorted([*ROOT.glob("tests/**/*.py"), *ROOT.glob("benchmarks/*.py")]):
        file = PurePosixPath(path.relative_to(ROOT).as_posix())
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found += [f"{file}:{line}: {text}" for line, text in complaints_about_tests(file, tree)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        f"def test_{'x' * 80}(): pass",
        "from tests.unit.test_loss import helper",
        "from tests.e2e.talk_cases import talks",
    ],
)
def test_a_long_name_and_an_imported_test_are_found(source: str) -> None:
    assert list(complaints_about_tests(PurePosixPath("tests/unit/test_x.py"), ast.parse(source)))


# ------------------------------------------------------------------------------------------------
# The map of the acceptance experiments


def missing_tests(text: str) -> list[str]:
    """Tests and files that a document names and that are not there."""
    sources = {
        str(path.relative_to(ROOT / "tests")): path.read_text()
        for path in ROOT.glob("tests/*/test_*.py")
    }
    defined = set(re.findall(r"^def (test_\w+)", "\n".join(sources.values()), re.MULTILINE))
    files = set(re.findall(r"\w+/test_\w+\.py", text))
    names = set(re.findall(r"\btest_\w+\b(?!\.py)", text))
    return sorted(files - sources.keys()) + sorted(names - defined)


def test_map_of_experiments_names_tests_that_exist() -> None:
    text = (ROOT / "tests" / "README.md").read_text()
    assert missing_tests(text) == []
    assert [f"**E{number}**" in text for number in range(1, 13)] == [True] * 12


def test_a_test_that_is_gone_is_missed() -> None:
    assert missing_tests("`unit/test_gone.py::test_of_nothing`") == [
        "unit/test_gone.py",
        "test_of_nothing",
    ]


def left_out(table: str, read: Callable[[str], str]) -> list[str]:
    """Name what a table of tests lists and `make test` leaves out; of a sweep it may keep some.

    Args:
        table: Markdown with `folder/test_file.py::test_name`, and `test_name` of the file before.
        read: the text of a file of tests.
    """
    found, file = [], ""
    for path, name in re.findall(r"`(?:(\w+/test_\w+\.py)(?:::)?)?(test_\w+)?`", table):
        file = path or file
        tree = ast.parse(read(file)) if file else ast.Module([], [])
        marks: list[ast.expr] = []
        for each in tree.body:
            if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == "pytestmark":
                marks += each.value.elts if isinstance(each.value, ast.List) else [each.value]
        functions = {each.name: each for each in tree.body if isinstance(each, ast.FunctionDef)}
        if name:
            assert name in functions, f"{file} has no {name}"
            marks += functions[name].decorator_list
        if "pytest.mark.large" in map(ast.unparse, marks):
            found.append(f"{file}::{name}".removesuffix("::"))
    return found


def test_make_test_has_every_experiment() -> None:
    table = (ROOT / "tests/README.md").read_text().partition("\nNot tested:")[0]
    assert left_out(table, lambda file: (ROOT / "tests" / file).read_text()) == []


def test_an_experiment_that_is_left_out_is_named() -> None:
    files = {
        "unit/test_a.py": "pytestmark = [pytest.mark.unit, pytest.mark.large]\ndef test_x(): ...",
        "unit/test_b.py": "@pytest.mark.large\ndef test_y(): ...\ndef test_z(): ...",
    }
    table = "| `unit/test_a.py` | `unit/test_b.py::test_z`, `test_y` |"
    assert left_out(table, files.__getitem__) == ["unit/test_a.py", "unit/test_b.py::test_y"]
