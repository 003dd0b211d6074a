"""The block that a person reads when a run ends with an error."""

from __future__ import annotations

import errno
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from r3.rewards.scorer import RewardError
from r3.rollout import DroppedError, EnvironmentFailed, NoSignalError
from r3.run.checkpoint import UnsoundError
from r3.run.checkpointer import SaveError
from r3.run.ends import FailureReport, StopRequest, failure_text, resume_command
from r3.run.folder import RunDir

pytestmark = pytest.mark.unit


@dataclass(frozen=True)
class Ended:
    returncode: int
    stdout: str
    stderr: str


def run(folder: Path, rank: int, body: Callable[[], object]) -> Ended:
    """Run `body` under a report in a forked process, because the report ends its process."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        pid = os.fork()
        if pid == 0:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            sys.stdout, sys.stderr = open(1, "w"), open(2, "w")  # noqa: SIM115 (until the end)
            code = 0
            try:
                with FailureReport(folder, rank=rank):
                    body()
                print("after the block", flush=True)
            except SystemExit as left:
                code = int(str(left.code))
            finally:
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
    return Ended(os.waitstatus_to_exitcode(status), *texts)


def breaks(text: str) -> Callable[[], object]:
    def body() -> None:
        raise RuntimeError(text)

    return body


def interrupts() -> None:
    raise KeyboardInterrupt


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


@pytest.mark.parametrize(
    "error", [RewardError, EnvironmentFailed, UnsoundError, NoSignalError, DroppedError, SaveError]
)
def test_an_explained_error_has_no_frames(error: type[Exception], tmp_path: Path) -> None:
    path = tmp_path / "errors" / "rank_00000.txt"
    text = failure_text(raised(error("reward f failed")), rank=0, path=path)
    assert f"{error.__name__} on rank 0: reward f failed" in text
    assert str(path) in text and f"--from {tmp_path}" in text
    assert "test_failures.py" not in text


def test_an_unexpected_error_names_its_line(tmp_path: Path) -> None:
    text = failure_text(raised(KeyError("x")), rank=1, path=tmp_path / "errors" / "rank_00001.txt")
    assert "KeyError on rank 1" in text and "test_failures.py" in text


def test_out_of_memory_says_what_to_lower(tmp_path: Path) -> None:
    error = torch.OutOfMemoryError("CUDA out of memory")
    text = failure_text(raised(error), rank=0, path=tmp_path / "errors" / "rank_00000.txt")
    assert "train.micro_batch_tokens" in text


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("could not create a primitive"),
        RuntimeError(
            "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 8 bytes"
        ),
        OSError(12, "Cannot allocate memory"),
        MemoryError(),
    ],
)
def test_a_memory_limit_of_the_system_is_named(error: Exception, tmp_path: Path) -> None:
    text = failure_text(raised(error), rank=0, path=tmp_path / "errors" / "rank_00000.txt")
    assert text.startswith("\nout of host memory on rank 0: ") and "ulimit -v, cgroup" in text


def test_the_limit_of_open_files_is_named(tmp_path: Path) -> None:
    error = raised(OSError(errno.EMFILE, "Too many open files", "/tmp/a"))
    text = failure_text(error, rank=0, path=tmp_path / "errors" / "rank_00000.txt")
    assert text.startswith("\ntoo many open files on rank 0: ") and " (ulimit -n), and R3" in text
    error = raised(OSError(errno.ENOENT, "No such file", "/tmp/a"))
    assert "ulimit" not in failure_text(error, rank=0, path=tmp_path / "errors" / "a.txt")


def test_a_traceback_that_is_not_on_the_disk_is_not_named(tmp_path: Path) -> None:
    """A full disk: the file would be empty, or is not there."""
    (tmp_path / "errors").write_text("a file where the folder should be")
    done = run(tmp_path, 1, breaks("broke"))
    assert "full traceback" not in done.stderr and "in breaks" not in done.stderr
    assert "start again with: " in done.stderr


def test_interruption_says_how_to_continue(tmp_path: Path) -> None:
    """A run without a checkpoint has nothing that continues."""
    path, command = tmp_path / "errors" / "rank_00000.txt", resume_command(tmp_path)
    error = raised(KeyboardInterrupt())
    text = failure_text(error, rank=0, path=path)
    assert text == f"\ninterrupted by SIGINT; start again with: {command}"
    (RunDir(tmp_path).checkpoints / ".step_000001.partial").mkdir(parents=True)
    assert failure_text(error, rank=0, path=path) == text
    RunDir(tmp_path).checkpoint(1).mkdir()
    text = failure_text(error, rank=0, path=path)
    assert text == f"\ninterrupted by SIGINT; continue with: {command}"
    text = failure_text(raised(KeyError("x")), rank=0, path=path)
    assert text.endswith(f"  continue with: {command}")


def test_a_message_that_names_a_rank_names_it_once(tmp_path: Path) -> None:
    path = tmp_path / "errors" / "rank_00000.txt"
    for said in ("rank 1: /full: No space left", "no space"):
        text = failure_text(raised(SaveError(said)), rank=0, path=path)
        assert text.count("rank ") == 1 and said in text


@pytest.mark.parametrize(
    ("variables", "program", "command"),
    [
        ({}, "train.py", "python train.py --from runs/a"),
        ({}, "/site/r3/__main__.py", "python -m r3 --from runs/a"),
        (
            {"LOCAL_WORLD_SIZE": "4"},
            "train.py",
            "torchrun --nproc_per_node 4 train.py --from runs/a",
        ),
        (
            {"LOCAL_WORLD_SIZE": "4", "R3_RESUME": "NPROC=4 launch/local.sh --from RUN_DIR"},
            "train.py",
            "NPROC=4 launch/local.sh --from runs/a",
        ),
    ],
)
def test_the_resume_command_is_how_the_run_was_started(
    variables: dict[str, str], program: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOCAL_WORLD_SIZE", "R3_RESUME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", [program])
    assert resume_command(Path("runs/a")) == command


def test_only_the_first_rank_speaks(tmp_path: Path) -> None:
    first = run(tmp_path, 1, breaks("this broke"))
    second = run(tmp_path, 2, breaks("connection closed by peer"))
    assert (first.returncode, second.returncode) == (1, 1)
    assert "RuntimeError on rank 1: this broke" in first.stderr
    assert second.stderr == "" and second.stdout == ""
    assert "this broke" in (tmp_path / "errors" / "rank_00001.txt").read_text()
    assert "connection closed" in (tmp_path / "errors" / "rank_00002.txt").read_text()


def test_the_launchers_signal_adds_nothing_after_a_failure(tmp_path: Path) -> None:
    def ended_by_launcher() -> None:
        with StopRequest(RunDir(tmp_path).first_failure):
            signal.raise_signal(signal.SIGTERM)

    assert "stopping after this step" in run(tmp_path, 2, ended_by_launcher).stderr
    run(tmp_path, 1, breaks("this broke"))
    assert run(tmp_path, 2, ended_by_launcher).stderr == ""


def test_a_closed_terminal_stops_after_the_step_and_nohup_does_not(tmp_path: Path) -> None:
    def hangs_up() -> None:
        with StopRequest(RunDir(tmp_path).first_failure):
            signal.raise_signal(signal.SIGHUP)

    def heeds() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where nohup runs the tests
        hangs_up()

    def ignores() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
        hangs_up()

    assert "SIGHUP: stopping after this step" in run(tmp_path, 0, heeds).stderr
    ended = run(tmp_path, 0, ignores)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_the_next_run_speaks_again(tmp_path: Path) -> None:
    assert "broke" in run(tmp_path, 0, breaks("broke")).stderr
    assert "broke" in run(tmp_path, 0, breaks("broke")).stderr


def test_tracebacks_are_private(tmp_path: Path) -> None:
    run(tmp_path, 0, breaks("broke"))
    mode = os.stat(tmp_path / "errors" / "rank_00000.txt").st_mode
    assert mode & 0o077 == 0


def test_a_folder_that_cannot_be_written_loses_nothing(tmp_path: Path) -> None:
    (tmp_path / "errors").write_text("a file where the folder should be")
    done = run(tmp_path, 1, breaks("broke"))
    assert done.returncode == 1
    assert "RuntimeError: broke" in done.stderr and "could not be written" in done.stderr


def test_ctrl_c_has_its_own_exit_code(tmp_path: Path) -> None:
    assert run(tmp_path, 0, interrupts).returncode == 130


def test_without_an_error_nothing_happens(tmp_path: Path) -> None:
    done = run(tmp_path, 0, lambda: None)
    assert (done.returncode, done.stdout, done.stderr) == (0, "after the block\n", "")


def test_sys_exit_passes(tmp_path: Path) -> None:
    assert run(tmp_path, 0, lambda: sys.exit(2)).returncode == 2
