"""A run folder has one writer: real processes hold it, are killed, and stop beating."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from r3.config import ConfigError
from r3.run import hold, require_free
from r3.runtime.device import free_port
from tests.runs import program
from tests.world import ROOT

_HOLDER = (
    "import sys, time\nfrom pathlib import Path\nfrom r3.run.lock import hold\n"
    "hold(Path(sys.argv[1]))\nprint('held', flush=True)\ntime.sleep(60)\n"
)


Starts = Callable[[str], subprocess.Popen[str]]
PYTHON = (sys.executable, "-c")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Starts]:
    """Starts a Python program with the test's folder as argument and waits for its first line."""
    started: list[subprocess.Popen[str]] = []

    def run(text: str) -> subprocess.Popen[str]:
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        command = [*PYTHON, text, str(tmp_path)]
        process = subprocess.Popen(command, cwd=ROOT, text=True, **pipes)
        started.append(process)
        assert process.stdout is not None and process.stdout.readline()
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_second_start_names_the_holder_and_changes_nothing(start: Starts, tmp_path: Path) -> None:
    process = start(_HOLDER)
    before = contents(tmp_path)
    for attempt in (hold, require_free):
        with pytest.raises(ConfigError, match=f"another run writes.*process {process.pid} on "):
            attempt(tmp_path)
    assert contents(tmp_path) == before


def test_killed_holder_frees_the_folder_at_once(start: Starts, tmp_path: Path) -> None:
    process = start(_HOLDER)
    process.send_signal(signal.SIGKILL)
    process.wait()
    require_free(tmp_path)
    began = time.monotonic()
    hold(tmp_path).release()
    assert time.monotonic() - began < 5  # a dead holder of this machine is not waited for: 60 s


def test_released_folder_can_be_held_again(tmp_path: Path) -> None:
    lock = hold(tmp_path)
    lock.release()
    lock.release()
    hold(tmp_path).release()
    assert json.loads((tmp_path / "run.lock").read_text())["ended"]


@pytest.mark.parametrize("how", ["deleted", "moved", "replaced"])
def test_a_folder_that_is_gone_ends_its_holder(how: str, start: Starts, tmp_path: Path) -> None:
    process = start(_HOLDER.replace("sys.argv[1]", "sys.argv[1], 'run'"))
    (tmp_path / "run" / "metrics.jsonl").touch()
    if how == "deleted":
        shutil.rmtree(tmp_path / "run")
    else:
        (tmp_path / "run").rename(tmp_path / "other")
    if how == "replaced":
        shutil.copytree(tmp_path / "other", tmp_path / "run")
    assert process.wait(timeout=10) == 1
    _, error = process.communicate()
    assert f"{tmp_path / 'run'} was deleted or moved while the run wrote to it" in error


_SWAPS = """
import os, shutil, sys
from pathlib import Path
from r3.run.folder import RunDir
from r3.run.checkpointer import Checkpointer, Copy
from r3.run.lock import hold
mine, theirs = (RunDir(Path(sys.argv[1]) / name) for name in ("run", "theirs"))
lock = hold(mine.path)
theirs.checkpoint(1).mkdir(parents=True)
(theirs.checkpoint(1) / "r3.json").write_text("theirs")
mine.path.rename(mine.path.with_name("moved"))
theirs.path.rename(mine.path)
if sys.argv[2] == "row":
    from r3.run.session import Phases
    Phases(None, (), lock).enter("report")
    mine.append_metrics({"step": 1})
else:
    (mine.checkpoints / ".step_000001.partial").mkdir()
    copy = Copy(step=1, shards={}, files={}, private={}, facts={}, values={}, started=0.0)
    Checkpointer(mine.checkpoints, lock=lock).publish(copy, [])
print("written", flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("what", [pytest.param("row", marks=pytest.mark.large), "checkpoint"])
def test_nothing_is_written_into_a_run_that_took_the_place(what: str, tmp_path: Path) -> None:
    done = program(*PYTHON, _SWAPS, tmp_path, what)
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    assert f"{tmp_path / 'run'} was deleted or moved while the run wrote to it" in done.stderr
    assert (tmp_path / "run/checkpoints/step_000001/r3.json").read_text() == "theirs"
    assert not (tmp_path / "run/metrics.jsonl").exists()


def of_other_machine(folder: Path, *, beat: int, ended: bool = False) -> None:
    """What the lock file looks like if a run on another machine, whose flock is not seen here,
    wrote it.
    """
    # Machines that are copies of one image have one name.
    facts = {"host": socket.gethostname(), "boot": "another", "pid": 4, "started": "then"}
    facts |= {"beat": beat, "ended": ended}
    (folder / "run.lock").write_text(json.dumps(facts).ljust(511) + "\n")


def test_heartbeat_from_another_machine_keeps_the_folder(tmp_path: Path) -> None:
    of_other_machine(tmp_path, beat=1)
    beats = threading.Timer(0.5, of_other_machine, [tmp_path], {"beat": 2})
    beats.start()
    with pytest.raises(ConfigError, match=f"process 4 on {socket.gethostname()}"):
        hold(tmp_path, stale_s=5)
    beats.join()


def test_silent_other_machine_loses_the_folder(tmp_path: Path) -> None:
    of_other_machine(tmp_path, beat=1)
    hold(tmp_path, stale_s=0.5).release()
    of_other_machine(tmp_path, beat=9, ended=True)
    began = time.monotonic()
    hold(tmp_path).release()
    assert time.monotonic() - began < 5  # it said that it ended: nothing to wait for


@pytest.mark.parametrize("below", ["file/run", "x" * 300, "loop/run", "/proc/run"])
def test_folder_that_cannot_be_made_is_one_clear_error(below: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(ConfigError, match=r"log\.dir"):
        hold(tmp_path / below)


def ran_on_disk(options: str, text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a program with an own disk at its folder."""
    mount = f'mount -t tmpfs -o {options} tmpfs "$0" && exec "$@"'
    inside = ("unshare", "-Urm", "sh", "-c", mount, folder)
    if program(*inside, "true").returncode:
        pytest.skip("this system does not let a user mount a file system")
    return program(*inside, *PYTHON, text, folder)


def test_a_read_only_disk_is_found_by_check(tmp_path: Path) -> None:
    """A disk that no user may write to, root included."""
    text = (
        "import sys\nfrom pathlib import Path\nfrom r3.run.lock import require_free\n"
        "require_free(Path(sys.argv[1]) / 'new' / 'run')\n"
    )
    done = ran_on_disk("ro", text, tmp_path)
    assert f"the folder cannot be written: {tmp_path} is read-only" in done.stderr


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_folder_of_another_user_names_file_and_owner() -> None:
    from r3.run import RunState

    with tempfile.TemporaryDirectory() as above:
        folder = Path(above) / "run"
        hold(folder).release()
        RunState.new().write(folder)

        def refusal(act: Callable[[Path], object]) -> str:
            """What nobody is told who acts on root's folder."""
            reading, writing = os.pipe()
            if not (child := os.fork()):
                os.setuid(65534)
                try:
                    act(folder)
                except ConfigError as error:
                    os.write(writing, str(error).encode())
                finally:
                    os._exit(0)
            os.waitpid(child, 0)
            os.close(writing)
            with open(reading) as file:
                return file.read()

        Path(above).chmod(0o755)
        assert f"{folder / 'run.lock'} belongs to root and has mode 644" in refusal(hold)
        assert f"{folder} belongs to root and has mode 755" in refusal(require_free)
        (folder / "run.lock").chmod(0o666)  # as for a group, with umask 0
        folder.chmod(0o777)
        assert refusal(lambda path: hold(path).release()) == ""
        assert "can be read by root alone" in refusal(RunState.read)


def test_a_full_disk_at_the_start_is_one_message(tmp_path: Path) -> None:
    text = (
        "import sys\nfrom pathlib import Path\nfrom r3.run.folder import RunDir\n"
        "from r3.run.open import open_run\nfrom tests.tiny import tiny_config\n"
        "open_run(RunDir(Path(sys.argv[1]) / 'run'), tiny_config(), writes=True)\n"
    )
    # Room for the folder and its lock, not for config.yaml.
    done = ran_on_disk("size=8k", text, tmp_path)
    last = done.stderr.strip().rpartition("ConfigError: ")[2]
    assert "the folder cannot be written: No space left on device" in last, done.stderr
    assert f"log.dir = '{tmp_path / 'run'}'" in last


def test_rank_dies_with_its_launcher(start: Starts) -> None:
    rank = (
        "import os, time\nfrom r3.runtime.process import die_with_launcher\n"
        "die_with_launcher()\nprint(os.getpid(), flush=True)\ntime.sleep(60)\n"
    )
    launcher = (
        "import os, subprocess, sys\n"
        f"subprocess.run([sys.executable, '-c', {rank!r}], start_new_session=True,"
        " env=os.environ | {'TORCHELASTIC_RUN_ID': 'x'})\n"
    )
    process = start(launcher)
    (child,) = psutil.Process(process.pid).children()
    process.send_signal(signal.SIGKILL)
    assert psutil.wait_procs([child], timeout=10)[0] == [child]


def test_rank_that_still_imports_dies_with_its_launcher(tmp_path: Path) -> None:
    """Else it waits for the others, holds the folder, and the next start is refused."""
    launcher = (
        "import subprocess, sys\n"
        "command = [sys.executable, 'train.py', 'tiny-smoke', '--log.dir', sys.argv[1]]\n"
        "subprocess.run(command, start_new_session=True)\n"
    )
    rank = {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with subprocess.Popen(
        [sys.executable, "-c", launcher, str(tmp_path)],
        cwd=ROOT,
        env=os.environ | rank | address | {"LOCAL_WORLD_SIZE": "2"},
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read(9) == b"importing"
        (child,) = psutil.Process(process.pid).children()
        process.kill()
        assert psutil.wait_procs([child], timeout=30)[0] == [child]
        assert b"joining" not in process.stdout.read()
