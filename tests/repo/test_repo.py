"""Rules about the repository itself, read from its sources: who imports whom, device words, wide
catches, pins, paths.

A rule is a function from a file's name and syntax tree to complaints. It runs over every file there
is, and over lines that break it, so that a rule which has gone blind is noticed.
"""

import ast
import re
import sys
from collections.abc import Callable, Collection, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path, PurePosixPath

import pytest

from tests.sources import ROOT, Complaints, imports

SOURCES = sorted([*ROOT.glob("train.py"), *ROOT.glob("r3/**/*.py"), *ROOT.glob("configs/**/*.py")])

# Extras: what a run can do without.
EXTRAS = (
    *("backends", "envs", "judges", "launch", "lora"),
    *("mixture", "objectives", "partial", "quantised", "tools"),
)
# Lowest layer first. A package imports from itself and from earlier packages, never from a later
# one.
PACKAGES = [
    *[
        "errors",
        "types",
        "models",
        "config",
        "assets",
        "configs",
        "algo",
        "runtime",
        "user_code",
        "data",
    ],
    *["metrics", "routing"],
    *["rewards", "checks", "cli", "engine", "layers", "policy", "rollout", "sync", "run"],
    *EXTRAS,
    *["report", "show", "watch", "rescore", "export", "doctor", "check_loss", "__main__"],
]
OWN = {"__version__", "names_of"}  # names of r3/__init__.py, which imports no package
MAX_LOOSE_MODULES = 10  # files directly in r3/, __init__.py aside
PURE = ("r3/algo/", "r3/metrics/reduce.py")
MAY_IMPORT = {
    "vllm": ("r3/engine/", "r3/envs/parsers.py", "r3/backends/cpu/"),
    "megatron": (
        "r3/layers/",
        "r3/backends/",
        "r3/lora/",
        "r3/objectives/",
        "r3/policy/",
        "r3/routing/replay.py",
        "r3/runtime/mesh.py",
        "r3/run/checkpoint.py",
        "r3/run/checkpointer.py",
    ),
    "triton": ("r3/backends/cuda/triton_kernels.py",),
}
HEAVY = {"torch", "vllm", "megatron", "transformers"}
DEVICE_FILES = {"r3/runtime/device.py", "r3/runtime/tensors.py", "r3/backends/cpu/megatron.py"}
# Call what users wrote, which may raise anything.
USERS_CODE = (
    *("r3/cli/base_config.py", "r3/rewards/", "r3/judges/", "r3/envs/"),
    *("r3/tools/own_algorithm.py", "r3/user_code/loading.py"),
    *("r3/user_code/calls.py", "r3/user_code/workers.py", "r3/tools/worker.py"),
)

Rule = Callable[[PurePosixPath, ast.Module], Complaints]


def package_of(name: str) -> str | None:
    """The package of an import such as r3.policy.build.wrap; None outside r3 and for r3
    itself.
    """
    parts = name.split(".")
    return parts[1] if parts[0] == "r3" and len(parts) > 1 and parts[1] not in OWN else None


def imports_go_one_way(file: PurePosixPath, tree: ast.Module) -> Complaints:
    """Packages import only from earlier packages, type-only imports included; presets know only
    settings.
    """
    if file.parts[0] == "configs":
        for line, name in imports(file, tree):
            if name.startswith("r3") and not name.startswith(
                ("r3.config.", "r3.configs.", "r3.assets")
            ):
                yield line, f"a preset imports {name}"
    if file.parts[0] != "r3" or file == PurePosixPath("r3/__init__.py"):
        return
    own = PurePosixPath(file.parts[1]).stem
    if own == "extras":  # where the core reaches extras: inside functions, so that none is loaded
        yield from (
            (node.lineno, "imports an extra outside of a function")
            for node in tree.body
            if isinstance(node, ast.ImportFrom) and package_of(node.module or "") in EXTRAS
        )
        return
    if own not in PACKAGES:
        yield 1, f"{own} is not in PACKAGES: add it there (tests/repo/test_repo.py)"
        return
    for line, name in imports(file, tree):
        other = package_of(name)
        if other is None or other in (own, "extras"):
            continue
        if own in EXTRAS and other in EXTRAS:
            yield line, f"{own} imports {other}: an extra imports the core, never another extra"
        if other not in PACKAGES or PACKAGES.index(other) > PACKAGES.index(own):
            yield line, f"{own} imports {other}, which comes later in the order of packages"
        if "engine" in {own, other} and {own, other} & {"layers", "policy"}:
            yield line, f"{own} imports {other}: engine and policy meet only in sync"


def worlds_stay_inside(file: PurePosixPath, tree: ast.Module) -> Complaints:
    """vllm and megatron are imported only where they are at home."""
    for line, name in imports(file, tree):
        homes = MAY_IMPORT.get(name.split(".")[0])
        if homes is not None and not str(file).startswith(homes):
            yield line, f"imports {name}, which belongs in {', '.join(homes)}"
        if str(file) == "r3/types.py" and name.split(".")[0] in HEAVY - {"torch"}:
            yield line, f"the nouns import {name}"


def pure_row_is_pure(file: PurePosixPath, tree: ast.Module) -> Complaints:
    """Algorithms and reductions import torch, numpy, the standard library and the nouns."""
    for line, name in imports(file, tree):
        allowed = name.split(".")[0] in {"torch", "numpy", *sys.stdlib_module_names}
        if (
            str(file).startswith(PURE)
            and not allowed
            and not name.startswith(("r3.types.", "r3.algo.", "r3.metrics.reduce."))
        ):
            yield line, f"a pure module imports {name}"


def device_words_stay_inside(file: PurePosixPath, tree: ast.Module) -> Complaints:
    """Only device.py, tensors.py and the stand-ins on CPU say cuda or nccl."""
    if file.parts[0] == "configs" or str(file) in DEVICE_FILES:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("cuda", "nccl"):
            yield node.lineno, f"says {ast.unparse(node)}"
        if isinstance(node, ast.Constant) and re.fullmatch(r"(cuda|nccl)(:\d+)?", str(node.value)):
            yield node.lineno, f"says {node.value!r}"
    for line, name in imports(file, tree):
        if {"cuda", "nccl"} & set(name.removeprefix("r3.backends.cuda").split(".")):
            yield line, f"imports {name}"


def catches_are_narrow(file: PurePosixPath, tree: ast.Module) -> Complaints:
    """No `except:` and no `except Exception`, but around users' code, and there the error has to go
    somewhere.
    """

    def is_wide(kind: ast.expr | None) -> bool:
        if isinstance(kind, ast.Tuple):
            return any(map(is_wide, kind.elts))
        return kind is None or ast.unparse(kind).rpartition(".")[2] in (
            "Exception",
            "BaseException",
        )

    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "suppress":
            if any(map(is_wide, node.args)):
                yield node.lineno, "suppresses every exception"
        elif isinstance(node, ast.ExceptHandler) and is_wide(node.type):
            body = [inner for statement in node.body for inner in ast.walk(statement)]
            is_used = any(isinstance(inner, ast.Name) and inner.id == node.name for inner in body)
            if not (is_used and str(file).startswith(USERS_CODE)):
                yield node.lineno, "catches every exception"


def modules_say_what_they_are(file: PurePosixPath, tree: ast.Module) -> Complaints:
    """Each module starts with a docstring."""
    if not ast.get_docstring(tree):
        yield 1, "has no docstring"


RULES: list[Rule] = [
    imports_go_one_way,
    worlds_stay_inside,
    pure_row_is_pure,
    device_words_stay_inside,
    catches_are_narrow,
    modules_say_what_they_are,
]


@cache
def tree_of(path: Path) -> ast.Module:
    """The syntax tree of a file, which nobody changes."""
    return ast.parse(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_holds(rule: Rule) -> None:
    found = []
    for path in SOURCES:
        file = PurePosixPath(path.relative_to(ROOT).as_posix())
        tree = tree_of(path)
        found += [f"{file}:{line}: {text}" for line, text in rule(file, tree)]
    assert not found, f"{rule.__doc__}\n" + "\n".join(found)


TYPES_ONLY = "if TYPE_CHECKING:\n"
TRIES = "try:\n    f()\nexcept"
# Rule, file, source that breaks it.
BROKEN: list[tuple[Rule, str, str]] = [
    (imports_go_one_way, "r3/algo/loss.py", "from r3 import sync"),
    (imports_go_one_way, "r3/runtime/mesh.py", "def f():\n    from r3.policy.build import x"),
    (imports_go_one_way, "r3/engine/build.py", "from ..policy import Policy"),
    (imports_go_one_way, "r3/policy/build.py", "import r3.engine.engine"),
    (imports_go_one_way, "r3/homeless.py", "x = 1"),
    (imports_go_one_way, "r3/cli/parse.py", "def f():\n    from r3.tools import check"),
    (imports_go_one_way, "r3/extras.py", "from r3.tools import check"),
    (imports_go_one_way, "r3/engine/build.py", f"{TYPES_ONLY}    from r3.rollout.step import x"),
    (imports_go_one_way, "configs/tiny.py", "from r3.runtime.mesh import Mesh"),
    (worlds_stay_inside, "r3/sync/weights.py", "from vllm import LLM"),
    (worlds_stay_inside, "train.py", "import megatron.core as mc"),
    (worlds_stay_inside, "r3/engine/build.py", "importlib.import_module('megatron.core')"),
    (worlds_stay_inside, "r3/types.py", "def f():\n    import transformers"),
    (pure_row_is_pure, "r3/algo/loss.py", "from r3.config import Config"),
    (pure_row_is_pure, "r3/algo/packing.py", "import einops"),
    (device_words_stay_inside, "r3/sync/weights.py", "torch.cuda.synchronize()"),
    (device_words_stay_inside, "r3/sync/weights.py", "device = 'cuda:0'"),
    (device_words_stay_inside, "train.py", "init(backend='nccl')"),
    (device_words_stay_inside, "r3/runtime/mesh.py", "from torch import cuda"),
    (catches_are_narrow, "r3/sync/weights.py", "try:\n    f()\nexcept:\n    raise"),
    (catches_are_narrow, "r3/sync/weights.py", f"{TRIES} (OSError, Exception) as e:\n    print(e)"),
    (catches_are_narrow, "r3/rewards/math.py", f"{TRIES} Exception:\n    pass"),
    (catches_are_narrow, "train.py", "with contextlib.suppress(BaseException):\n    f()"),
    (modules_say_what_they_are, "r3/sync/weights.py", "x = 1"),
]
# The like that is no fault.
SOUND: list[tuple[Rule, str, str]] = [
    (imports_go_one_way, "r3/sync/weights.py", "from r3.engine import Engine\nimport r3.policy"),
    (worlds_stay_inside, "r3/engine/build.py", "import vllm"),
    (worlds_stay_inside, "r3/runtime/mesh.py", "from megatron.core import parallel_state"),
    (pure_row_is_pure, "r3/algo/packing.py", "import math\nfrom r3.types import Rollout"),
    (device_words_stay_inside, "r3/runtime/mesh.py", "'cuda or not.'\nif device.is_cuda: pass"),
    (catches_are_narrow, "r3/sync/weights.py", f"{TRIES} OSError:\n    pass"),
    (catches_are_narrow, "r3/rewards/math.py", f"{TRIES} Exception as error:\n    failed(error)"),
]


@pytest.mark.parametrize(("rule", "file", "source"), BROKEN)
def test_rule_catches(rule: Rule, file: str, source: str) -> None:
    assert list(rule(PurePosixPath(file), ast.parse(source)))


@pytest.mark.parametrize(("rule", "file", "source"), SOUND)
def test_rule_lets_pass(rule: Rule, file: str, source: str) -> None:
    assert not list(rule(PurePosixPath(file), ast.parse(source)))


def test_few_modules_stand_loose() -> None:
    loose = sorted(path.name for path in ROOT.glob("r3/*.py") if path.name[0] != "_")
    assert len(loose) <= MAX_LOOSE_MODULES, loose


def sources() -> dict[str, ast.Module]:
    """Our modules by name, as syntax trees.

    `r3` itself is left out: it offers `r3.launch.api` on request, and no module imports from it. So
    is `r3.extras`, whose functions import when they are called.
    """
    trees = {}
    for path in sorted(ROOT.glob("r3/**/*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if name not in ("r3", "r3.extras"):
            trees[name] = tree_of(path)
    return trees


def import_circle(trees: Mapping[str, ast.Module], packages: Collection[str]) -> list[str]:
    """Modules that import each other in a circle, type-only and late imports included.

    `packages` are the modules that are an `__init__`. `from r3.engine import build` counts as an
    import of r3.engine.build, `from r3.engine import Engine` as one of r3.engine.
    """
    graph: dict[str, set[str]] = {}
    for module, tree in trees.items():
        inside = "/__init__.py" if module in packages else ".py"
        graph[module] = set()
        for _, name in imports(PurePosixPath(module.replace(".", "/") + inside), tree):
            target = name
            while target and target not in trees:
                target = target.rpartition(".")[0]
            if target and target != module:
                graph[module].add(target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        circle: list[str] = error.args[1]
        return circle
    return []


def packages() -> list[str]:
    inits = ROOT.glob("r3/**/__init__.py")
    return [".".join(path.relative_to(ROOT).parent.parts) for path in inits]


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert import_circle(sources(), packages()) == []


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("r3.engine.build", "if TYPE_CHECKING:\n    from r3.engine.engine import Engine"),
        ("r3.engine.sampler", "def late():\n    from r3.engine import Engine"),
        ("r3.types", "from .rollout import task"),
    ],
    ids=["type-only", "late, through the package", "between packages"],
)
def test_an_import_circle_is_found(module: str, line: str) -> None:
    trees = sources()
    changed = [*trees[module].body, *ast.parse(line).body]
    trees[module] = ast.Module(changed, type_ignores=[])
    assert module in import_circle(trees, packages())
