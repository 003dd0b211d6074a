"""The block that a person reads when a run ends with an error."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch

from r3.rewards.scorer import RewardError
from r3.rollout import DroppedError, EnvironmentFailed, NoSignalError
from r3.run import (
    FailureReport,
    RunDir,
    SaveError,
    StopRequest,
    UnsoundError,
    failure_text,
    resume_command,
)
from tests.errors import Capsys, Patch
from tests.tiny import ALONE

Run = Callable[[int, Callable[[], object]], CompletedProcess[str]]


@pytest.fixture
def run(tmp_path: Path, capfd: Capsys) -> Run:
    """Runs `body` under a report in a forked process, because the report ends its process."""

    def forked(rank: int, body: Callable[[], object]) -> CompletedProcess[str]:
        if not (pid := os.fork()):
            code = 0
            try:
                with FailureReport(tmp_path, rank=rank):
                    body()
                print("after the block", flush=True)
            except SystemExit as left:
                code = int(str(left.code))
            finally:
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        return CompletedProcess([], os.waitstatus_to_exitcode(status), *capfd.readouterr())

    return forked


def breaks(text: str) -> Callable[[], object]:
    def body() -> None:
        raise RuntimeError(text)

    return body


def interrupts() -> None:
    raise KeyboardInterrupt


def report_of(error: BaseException, folder: Path) -> str:
    """What is said of an error that was raised."""
    try:
        raise error
    except BaseException as caught:
        return failure_text(caught, rank=0, path=folder / "errors" / "rank_00000.txt")


@pytest.mark.parametrize(
    "error", [RewardError, EnvironmentFailed, UnsoundError, NoSignalError, DroppedError, SaveError]
)
def test_an_explained_error_has_no_frames(error: type[Exception], tmp_path: Path) -> None:
    text = report_of(error("reward f failed"), tmp_path)
    assert f"{error.__name__} on rank 0: reward f failed" in text
    assert f"{tmp_path}/errors/rank_00000.txt" in text and f"--from {tmp_path}" in text
    assert "test_failures.py" not in text


NO_MEMORY = "\nout of host memory on rank 0: "
UNEXPECTED: list[tuple[BaseException, str, str]] = [
    (KeyError("x"), "\nKeyError on rank 0", "test_failures.py"),
    (torch.OutOfMemoryError("CUDA out of memory"), "", "train.micro_batch_tokens"),
    (RuntimeError("could not create a primitive"), NO_MEMORY, "ulimit -v, cgroup"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: 8"), NO_MEMORY, "ulimit -v, cgroup"),
    (OSError(12, "Cannot allocate memory"), NO_MEMORY, "ulimit -v, cgroup"),
    (MemoryError(), NO_MEMORY, "ulimit -v, cgroup"),
    (
        RuntimeError("[unbound_buffer.cc:129] Timed out waiting 1000ms for send operation"),
        "\nanother rank did not come in time on rank 0: [unbound",
        "debug.collective_timeout_s",
    ),
    (OSError(24, "Too many open files", "/a"), "\ntoo many open files on rank 0: ", "(ulimit -n)"),
]


@pytest.mark.parametrize(("error", "begins", "says"), UNEXPECTED)
def test_an_unexpected_error_names_its_line_or_its_limit(
    error: BaseException, begins: str, says: str, tmp_path: Path
) -> None:
    text = report_of(error, tmp_path)
    assert text.startswith(begins) and says in text
    assert "ulimit" not in report_of(OSError(2, "No such file", "/tmp/a"), tmp_path)


def test_interruption_says_how_to_continue(tmp_path: Path) -> None:
    """A run without a checkpoint has nothing that continues."""
    command, error = resume_command(tmp_path), KeyboardInterrupt()
    text = report_of(error, tmp_path)
    assert text == f"\ninterrupted by SIGINT; start again with: {command}"
    (RunDir(tmp_path).checkpoints / ".step_000001.partial").mkdir(parents=True)
    assert report_of(error, tmp_path) == text
    RunDir(tmp_path).checkpoint(1).mkdir()
    assert report_of(error, tmp_path) == f"\ninterrupted by SIGINT; continue with: {command}"
    assert report_of(KeyError("x"), tmp_path).endswith(f"  continue with: {command}")


def test_a_message_that_names_a_rank_names_it_once(tmp_path: Path) -> None:
    for said in ("rank 1: /full: No space left", "no space"):
        text = report_of(SaveError(said), tmp_path)
        assert text.count("rank ") == 1 and said in text


@pytest.mark.parametrize(
    ("variable", "program", "command"),
    [
        ("", "train.py", "python train.py --from runs/a"),
        ("", "/site/r3/__main__.py", "python -m r3 --from runs/a"),
        ("LOCAL_WORLD_SIZE=4", "train.py", "torchrun --nproc_per_node 4 train.py --from runs/a"),
        ("R3_RESUME=launch/local.sh --from RUN_DIR", "-", "launch/local.sh --from runs/a"),
    ],
)
def test_the_resume_command_is_how_the_run_was_started(
    variable: str, program: str, command: str, monkeypatch: Patch
) -> None:
    for name in ("LOCAL_WORLD_SIZE", "R3_RESUME"):
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(*variable.split("="))
    monkeypatch.setattr(sys, "argv", [program])
    assert resume_command(Path("runs/a")) == command


def test_only_the_first_rank_speaks(run: Run, tmp_path: Path) -> None:
    first = run(1, breaks("this broke"))
    second = run(2, breaks("connection closed by peer"))
    assert (first.returncode, second.returncode) == (1, 1)
    assert "RuntimeError on rank 1: this broke" in first.stderr
    assert (tmp_path / "errors" / "rank_00001.txt").stat().st_mode & 0o077 == 0, "private"
    assert second.stderr == "" and second.stdout == ""
    assert "this broke" in (tmp_path / "errors" / "rank_00001.txt").read_text()
    assert "broke" in run(0, breaks("broke")).stderr, "the next run speaks again"
    assert "connection closed" in (tmp_path / "errors" / "rank_00002.txt").read_text()


def test_the_launchers_signal_adds_nothing_after_a_failure(run: Run, tmp_path: Path) -> None:
    def ended_by_launcher() -> None:
        with StopRequest(RunDir(tmp_path).first_failure):
            signal.raise_signal(signal.SIGTERM)

    assert "stopping after this step" in run(2, ended_by_launcher).stderr
    run(1, breaks("this broke"))
    assert run(2, ended_by_launcher).stderr == ""


def test_a_run_is_stopped_by_the_first_of_two_signals(run: Run, tmp_path: Path) -> None:
    def stops() -> None:
        with StopRequest(RunDir(tmp_path).first_failure) as stop:
            signal.raise_signal(signal.SIGUSR1)
            signal.raise_signal(signal.SIGTERM)  # as srun sends where another node ended first
            print(stop.agreed(ALONE))

    assert run(0, stops).stdout.startswith("SIGUSR1\n")


def test_a_closed_terminal_stops_after_the_step_and_nohup_does_not(
    run: Run, tmp_path: Path
) -> None:
    def hangs_up(handler: signal.Handlers) -> None:
        signal.signal(signal.SIGHUP, handler)
        with StopRequest(RunDir(tmp_path).first_failure):
            signal.raise_signal(signal.SIGHUP)

    # The default, also where nohup runs the tests.
    ended = run(0, lambda: hangs_up(signal.SIG_DFL))
    assert "SIGHUP: stopping after this step" in ended.stderr
    ended = run(0, lambda: hangs_up(signal.SIG_IGN))  # as nohup does
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_folder_that_cannot_be_written_loses_nothing_and_is_not_named(
    run: Run, tmp_path: Path
) -> None:
    """As on a full disk: the file of the traceback would be empty, or is not there."""
    (tmp_path / "errors").write_text("a file where the folder should be")
    done = run(1, breaks("broke"))
    assert done.returncode == 1 and "start again with: " in done.stderr
    assert "RuntimeError: broke" in done.stderr and "could not be written" in done.stderr
    assert "full traceback" not in done.stderr and "in breaks" not in done.stderr


def test_without_an_error_nothing_happens(run: Run) -> None:
    assert run(0, interrupts).returncode == 130
    assert run(0, lambda: sys.exit(2)).returncode == 2
    done = run(0, lambda: None)
    assert (done.returncode, done.stdout, done.stderr) == (0, "after the block\n", "")
