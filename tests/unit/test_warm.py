"""The stand-in for an interpreter starts programs as the interpreter would, only sooner."""

import os
import subprocess
from pathlib import Path

import psutil
import pytest

from r3.runtime.device import has_gpu
from tests.runs import soon
from tests.warm import write_stand_in

pytestmark = [pytest.mark.skipif(has_gpu(), reason="CUDA does not survive a fork")]

_PROGRAM = """
import os, sys
print(sys.argv[1:], os.getcwd(), os.environ["SAID"], sys.stdin.read(), "vllm" in sys.modules)
print(os.path.samefile(sys.path[0], os.path.dirname(__file__)), __name__)
if "wait" in sys.argv:
    open("waits", "w").write(str(os.getpid()))
    import time
    time.sleep(100)
sys.exit(3)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_stand_in(tmp_path / "python")
    (tmp_path / "programs").mkdir()
    (tmp_path / "programs" / "train.py").write_text(_PROGRAM)
    return tmp_path


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["./python", *words],
        cwd=folder,
        env=os.environ | {"SAID": "so"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(("flags", "imported"), [((), True), (("-S",), False)])
def test_words_folder_variables_streams_and_exit_code_are_the_same(
    folder: Path, flags: tuple[str, ...], imported: bool
) -> None:
    program = start(folder, *flags, "programs/train.py", "--a", "b")
    output, _ = program.communicate("read", timeout=60)
    assert output == f"['--a', 'b'] {folder} so read {imported}\nTrue __main__\n"
    assert program.returncode == 3


def test_the_program_ends_with_its_stand_in(folder: Path) -> None:
    program = start(folder, "programs/train.py", "wait")
    assert program.stdin is not None
    program.stdin.close()
    waits = folder / "waits"
    assert soon(lambda: waits.exists() and waits.read_text(), 60) and program.poll() is None
    program.kill()
    program.wait()
    pid = int(waits.read_text())
    assert soon(lambda: not psutil.pid_exists(pid), 60), "the program still runs"
