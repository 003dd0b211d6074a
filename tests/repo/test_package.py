"""The wheel: built, installed beside the stack, and started from a folder without a checkout."""

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.large]

ROOT = Path(__file__).resolve().parents[2]


def call(*command: str | Path, cwd: Path) -> str:
    """What a command prints; its output is the message if it fails."""
    # Neither this checkout nor a run around the test may leak in.
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "RANK", "WORLD_SIZE")}
    ended = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=clean,
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a copy of what git tracks: a build leaves files beside its sources."""
    folder = tmp_path_factory.mktemp("wheel")
    listed = call("git", "ls-files", "-z", cwd=ROOT)
    source = folder / "source"
    for name in filter(None, listed.split("\0")):
        old, new = ROOT / name, source / name
        if not (old.is_file() or old.is_symlink()):
            continue
        new.parent.mkdir(parents=True, exist_ok=True)
        if old.is_symlink():
            new.symlink_to(old.readlink())
        else:
            new.write_bytes(old.read_bytes())
    options = ("--no-deps", "--no-build-isolation", "--disable-pip-version-check", "-q")
    call(sys.executable, "-m", "pip", "wheel", *options, "-w", folder, source, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_has_presets_program_and_data_and_one_top_level_name(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert wheel.name.startswith("r3_rl-")
    assert {top for top in tops if not top.endswith(".dist-info")} == {"r3"}
    assert {
        "r3/__main__.py",
        "r3/launch/ranks.py",
        "r3/configs/tiny.py",
        "r3/assets/tiny-moe/model.safetensors",
        "r3/assets/data/word_problems_train.jsonl",
        "r3/metrics/glossary.txt",
        "r3/tools/usage.txt",
        "r3/tools/columns.txt",
        "r3/config/names_of_others.txt",
        "r3/tools/report/assets/report.html",
    } <= set(names)


@pytest.fixture(scope="module")
def home(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that has the wheel."""
    folder = tmp_path_factory.mktemp("installed")
    home = folder / "venv"
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    options = ("--no-deps", "--no-index", "--disable-pip-version-check", "-q")
    pip = (sys.executable, "-m", "pip", "--python", python)
    call(*pip, "install", *options, wheel, cwd=folder)
    # The stack of this environment. Its own .pth files, the editable install among them, are not
    # read: only folders on sys.path from the start have theirs read.
    (site,) = home.glob("lib/python3.*/site-packages")
    (site / "stack.pth").write_text(sysconfig.get_paths()["purelib"])
    return home


def test_the_installed_program_runs_from_another_folder(home: Path, tmp_path: Path) -> None:
    python = home / "bin" / "python"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    where = call(python, "-c", "import r3; print(r3.__file__)", cwd=elsewhere)
    assert Path(where.strip()).is_relative_to(home)
    printed = call(home / "bin" / "r3", "tiny", "--dry-run", "--train.lr", "1e-3", cwd=elsewhere)
    assert printed.startswith("tiny: dry run on 2 ranks")
    assert "train.lr = 0.001 (tiny: 0.0002)" in printed
    assert printed == call(
        python, "-m", "r3", "tiny", "--dry-run", "--train.lr", "1e-3", cwd=elsewhere
    )
    assert not list(elsewhere.iterdir())


def test_the_installed_program_trains(home: Path, tmp_path: Path) -> None:
    flags = "--parallel.ep 1 --train.steps 1 --rollout.prompts_per_step 4 --log.dir run"
    call(home / "bin" / "r3", "tiny", *flags.split(), "--eval.path", "", cwd=tmp_path)
    assert list((tmp_path / "run" / "hf" / "step_000001").glob("*.safetensors"))
