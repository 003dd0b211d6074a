"""Ranks that tests fork behave as programs would; what the launcher itself promises."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from r3.tools.beside.watchdog import ENDS_RANK
from tests.errors import Capsys
from tests.forked_ranks import ForkedRank
from tests.rows import write
from tests.runs import program
from tests.warm import interpreter
from tests.world import ROOT

SCRIPT = """
import os, sys
(word,) = sys.argv[1:]
if (os.getsid(0), os.environ.get("HOME"), os.environ["RANK"]) != (os.getpid(), None, "3"):
    sys.exit("a rank has a session and an environment of its own")
elif open("/proc/self/comm").read() != "r3-rank-3\\n":
    sys.exit("and a name")
elif word == "raise":
    raise KeyError("what went wrong")
elif word == "interrupt":
    raise KeyboardInterrupt
elif word == "closed":
    class Closed:
        def flush(self):
            raise BrokenPipeError
    sys.stdout = Closed()
    sys.exit(3)
elif word == "leave":
    os._exit(75)
else:
    sys.exit({"two": 2, "none": None, "text": "a last word"}[word])
"""


@pytest.mark.parametrize(
    ("word", "code", "said"),
    [
        *(("two", 2, ""), ("none", 0, ""), ("text", 1, "a last word\n"), ("interrupt", 130, "")),
        *(("raise", 1, "KeyError: 'what went wrong'\n"), ("leave", 75, ""), ("closed", 3, "")),
    ],
)
def test_exit_codes_and_messages_are_those_of_a_program(
    word: str, code: int, said: str, tmp_path: Path, capfd: Capsys
) -> None:
    script = write(tmp_path, SCRIPT, name="script.py")
    # As torchrun does where it would start a program.
    rank = ForkedRank((sys.executable, "-u", str(script), word), {"RANK": "3"})
    assert rank.wait(30) == code
    assert capfd.readouterr().err.endswith(said)


# Forked from a process that has called `preload`, and has imported what runs need beside.
LOADED = """
import sys
from importlib.util import find_spec
from r3.backends.cpu.engine import UNUSED

print("megatron" in sys.modules, "torch._inductor.lowering" in sys.modules)
print(sorted(set(UNUSED) & set(sys.modules)), all(map(find_spec, UNUSED)))
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="GPUs compile")
def test_a_rank_on_cpu_imports_no_compiler_nor_what_vllm_leaves_unused(tmp_path: Path) -> None:
    done = program(interpreter(), write(tmp_path, LOADED, name="loaded.py"))
    # The second ones still can be imported.
    assert (done.returncode, done.stdout) == (0, "True False\n[] True\n"), done.stderr


@pytest.mark.parametrize("ranks", [["--nproc_per_node", "3"], ["--nproc-per-node=3"]])
def test_a_mistake_ends_the_launcher_before_there_are_ranks(
    ranks: list[str], tmp_path: Path
) -> None:
    words = ("tiny", "--train.stepss", "3", "--log.dir", str(tmp_path / "run"))
    flags = ("--check", "--standalone", *ranks, "train.py")
    done = program(sys.executable, "launch/ranks.py", *flags, *words)
    assert (done.returncode, done.stdout) == (2, ""), done.stdout + done.stderr
    assert done.stderr.count("did you mean train.steps?") == 1
    assert "must be a multiple of the 3 ranks" in done.stderr  # their number is read
    assert not (tmp_path / "run").exists()


_READS = """
import os, pathlib, sys
read = pathlib.Path(os.environ["R3_READ"], "rows")
if "--check" in sys.argv:
    read.write_text("by the check")
else:
    print(read.parent, "read", read.read_text())
"""


def test_ranks_find_what_the_check_has_read_and_nothing_stays(tmp_path: Path) -> None:
    script = write(tmp_path, _READS, name="reads.py")
    flags = ("--check", "--standalone", "--nproc_per_node", "1", str(script))
    said = program(sys.executable, "launch/ranks.py", *flags).stdout
    folder, _, read = said.splitlines()[-1].partition(" read ")
    assert read == "by the check" and not Path(folder).exists()


_HOLDS_THE_LOCK = """
import ctypes, os, threading
print("rank", os.getpid(), flush=True)
# The main thread gets the signals, and cannot run their handlers.
threading.Thread(target=ctypes.PyDLL(None).sleep, args=(600,)).start()
"""


@pytest.mark.large
def test_a_second_ctrl_c_ends_a_rank_that_sees_no_signal(tmp_path: Path) -> None:
    script = write(tmp_path, _HOLDS_THE_LOCK, name="holds.py")
    launcher = subprocess.Popen(
        [sys.executable, "launch/ranks.py", "--standalone", "--nproc_per_node", "1", str(script)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == "starting the ranks\n"
    rank = int(launcher.stdout.readline().split()[1])
    time.sleep(1)  # the thread starts
    launcher.send_signal(signal.SIGINT)
    time.sleep(0.3)
    launcher.send_signal(signal.SIGINT)
    _, said = launcher.communicate(timeout=60)
    assert launcher.returncode == 130
    assert said == "", "a line of torch would stand in the progress bar"
    with pytest.raises(ProcessLookupError):
        os.kill(rank, 0)


def test_the_signal_of_the_watchdog_is_known_to_the_launcher() -> None:
    """launch/ranks.py cannot import it: it imports nothing of R3 until ranks are started."""
    assert f"_ENDS_RANK = signal.{ENDS_RANK.name}" in (ROOT / "launch" / "ranks.py").read_text()
