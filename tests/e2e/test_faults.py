"""Faults made on purpose in runs of `torchrun train.py`: what the user sees, and what is left."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from r3.run.stop import REQUEUE
from r3.runtime.device import free_port
from tests.faults.attempts import finish as finish_run
from tests.faults.attempts import launch, newest_checkpoint, require_equal, rows_written
from tests.faults.disk import FullDisk, HeldDisk, own_disk
from tests.runs import finish, kill, rows_of, run, start
from tests.world import ROOT

# Several starts each, on machines that may be busy.
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


def wait_for_row(process: subprocess.Popen[str], folder: Path, rows: int = 1) -> None:
    """Wait until a run has written so many rows of metrics."""
    metrics, deadline = folder / "metrics.jsonl", time.monotonic() + 270
    while not (metrics.exists() and len(metrics.read_text().splitlines()) >= rows):
        assert process.poll() is None, process.communicate()[0][-4000:]
        assert time.monotonic() < deadline, kill(process)[-4000:]
        time.sleep(0.05)


def second_start(folder: Path) -> subprocess.CompletedProcess[str]:
    """Start a run of one process and wait for its end."""
    return subprocess.run(
        [sys.executable, "train.py", "tiny-smoke", "--log.dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "WORLD_SIZE": "2"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_one_run_per_folder_and_none_without_its_launcher(tmp_path: Path) -> None:
    process = start(tmp_path, "--eval.path", "", "--train.steps", "100")
    wait_for_row(process, tmp_path)
    ranks = psutil.Process(process.pid).children(recursive=True)
    for rank in ranks:
        rank.suspend()  # a living run that writes nothing, so that any change is the second start's
    try:
        before = contents(tmp_path)
        second = second_start(tmp_path)
        after = contents(tmp_path)
    finally:
        for rank in ranks:
            rank.resume()

    os.kill(process.pid, signal.SIGKILL)
    gone, alive = psutil.wait_procs(ranks, timeout=60)
    assert not alive, f"{len(gone)} processes ended with their launcher, not {alive}"
    process.communicate()

    assert after == before
    assert second.returncode == 2
    assert "another run writes to this folder (process " in second.stderr
    assert "Traceback" not in second.stderr


def test_signal_to_a_rank_stops_after_the_step_and_the_run_resumes(tmp_path: Path) -> None:
    """SIGTERM to one of two ranks: both save the same step and leave; then a wrong bit is found."""
    flags = ("--eval.path", "", "--checkpoint.export", "false", "--train.steps")
    process = start(tmp_path, *flags, "40")
    wait_for_row(process, tmp_path, rows=2)
    ranks = psutil.Process(process.pid).children(recursive=True)
    next(rank for rank in ranks if rank.environ()["RANK"] == "1").send_signal(signal.SIGTERM)
    output = finish(process)
    assert process.returncode != 0
    (line,) = [line for line in output.splitlines() if line.startswith("stopped by SIGTERM after")]
    step = int(line.split("after step ")[1].split(";")[0])
    command = f"torchrun --nproc_per_node 2 train.py --from {tmp_path}"
    assert line.endswith(f"continue with: {command}")
    assert "exitcode  : 75" in output  # of the rank, in torchrun's table
    assert [row["step"] for row in rows_of(tmp_path)] == list(range(1, step + 1))
    assert (tmp_path / "checkpoints" / f"step_{step:06d}").is_dir()

    output = run(tmp_path, *flags, str(step + 1))
    assert f"after step {step}" in output
    assert [row["step"] for row in rows_of(tmp_path)] == list(range(1, step + 2))

    shard = tmp_path / "checkpoints" / f"step_{step + 1:06d}" / "__1_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    output = run(tmp_path, *flags, str(step + 2))
    assert f"step_{step + 1:06d} is damaged: __1_0.distcp has other content" in output
    assert f"step_{step:06d} after step {step}" in output
    assert [row["step"] for row in rows_of(tmp_path)] == list(range(1, step + 3))


def test_stopped_rank_ends_the_run_and_the_launcher_resumes_it(tmp_path: Path) -> None:
    """A rank that hangs without end: the watchdogs end the run, torchrun starts it again."""
    flags = ("--eval.path", "", "--checkpoint.export", "false", "--checkpoint.every", "1")
    limits = ("--debug.stall_s", "10", "--debug.kill_after_s", "20", "--train.steps", "6")
    process = start(tmp_path, *flags, *limits, launcher=("--max_restarts", "2"))
    wait_for_row(process, tmp_path, rows=2)
    ranks = psutil.Process(process.pid).children(recursive=True)
    next(rank for rank in ranks if rank.environ()["RANK"] == "1").suspend()
    output = finish(process)
    assert process.returncode == 0, output[-4000:]
    assert "no rank made progress for 20 s (debug.kill_after_s); rank 0 ends" in output
    assert "resuming from" in output
    assert [row["step"] for row in rows_of(tmp_path)] == list(range(1, 7))


def test_rank_that_waits_for_one_that_never_joins_ends(tmp_path: Path) -> None:
    """One of two ranks starts: as if the other one had been stopped while it was imported."""
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    limits = ("--debug.stall_s", "1", "--debug.kill_after_s", "2")
    done = subprocess.run(
        [sys.executable, "train.py", "tiny-smoke", "--log.dir", str(tmp_path), *limits],
        cwd=ROOT,
        env=os.environ
        | ranks
        | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 75, done.stderr[-3000:]
    assert "no rank made progress for 4 s (debug.kill_after_s); rank 0 ends" in done.stderr


def test_step_that_fails_twice_ends_the_restarts(tmp_path: Path) -> None:
    """A reward function that always fails in step 2, and a launcher that would try four times."""
    folder, reward = tmp_path / "run", tmp_path / "fails.py"
    reward.write_text(
        "from pathlib import Path\n"
        "def fails(response, prompt):\n"
        f"    if Path({str(folder / 'metrics.jsonl')!r}).exists():\n"
        "        raise RuntimeError('no step 2')\n"
        "    return float(len(response) % 7)\n"
    )
    flags = ("--reward.function", f"{reward}:fails", "--reward.retries", "0", "--eval.path", "")
    process = start(
        folder,
        *(*flags, "--checkpoint.every", "1", "--parallel.ep", "1", "--train.steps", "3"),
        ranks=1,
        launcher=("--max_restarts", "3"),
    )
    output = finish(process)
    assert process.returncode != 0
    attempts, said, rest = output.partition("step 2 failed twice in a row. The run stops here")
    assert said and attempts.count("RewardError on rank 0") == 2
    assert "no step 2" in rest.partition("Traceback")[2], "the error is shown once more"
    assert [row["step"] for row in rows_of(folder)] == [1]


def test_full_disk_stops_the_save_and_not_the_run(tmp_path: Path) -> None:
    """A disk of 45 MB that a large file fills; when that is gone, the delayed save succeeds."""
    disk = tmp_path / "disk"
    command = own_disk(disk, "45m")
    if not command:
        pytest.skip("this system does not let a user mount a file system")
    # More steps than it makes: a signal ends it when everything has been seen.
    flags = ("--checkpoint.export", "false", "--checkpoint.keep", "1", "--train.steps", "500")
    attempt = launch(disk, *flags, prefix=command)
    try:
        full = FullDisk(attempt, disk)
        attempt.wait_for("row 1", lambda: rows_written(full.inside) >= 1)
        full.fill_until_said("not written: ", "no space: a checkpoint needs ", "tries again")
        rows = rows_written(full.inside)
        attempt.wait_for("a further row", lambda: rows_written(full.inside) > rows)
        full.empty()
        attempt.wait_for("a checkpoint", lambda: newest_checkpoint(full.inside) > rows)
        attempt.process.send_signal(signal.SIGTERM)
        assert attempt.end() == REQUEUE, attempt.text[-4000:]
    finally:
        attempt.kill()


def test_full_disk_stops_the_export_and_the_checkpoint_remains(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = own_disk(folder / "hf", "256k")
    if not command:
        pytest.skip("this system does not let a user mount a file system")
    attempt = launch(folder, "--train.steps", "1", prefix=command)
    assert attempt.end() == 1
    assert "SaveError on rank 0: " in attempt.text and "not exported: " in attempt.text
    assert "make room and start again" in attempt.text and "continue with: " in attempt.text
    assert newest_checkpoint(folder) == 1 and not any((folder / "hf").iterdir())

    rows = rows_written(folder)
    again = finish_run(folder, "--train.steps", "1")
    assert (folder / "hf" / "step_000001" / "config.json").exists(), again.text
    assert rows_written(folder) == rows, "no step was made again"


needs_compiler = pytest.mark.skipif(not shutil.which("cc"), reason="the slow disk needs cc")


@needs_compiler
def test_steps_go_on_beside_a_save_and_a_kill_loses_only_it(tmp_path: Path) -> None:
    """The disk holds back checkpoint 2; step 3 is made meanwhile; then everything is killed."""
    straight, folder = tmp_path / "straight", tmp_path / "run"
    finish_run(straight)
    attempt = launch(folder, prefix=HeldDisk(tmp_path, step=2).prefix)
    try:
        attempt.wait_for_rows(3)
    finally:
        attempt.kill()
    checkpoints = folder / "checkpoints"
    assert newest_checkpoint(folder) == 1 and (checkpoints / ".step_000002.partial").is_dir()
    resumed = finish_run(folder)
    assert "step_000001 after step 1" in resumed.text
    require_equal(folder, straight)


@needs_compiler
def test_step_that_fails_beside_a_save_lets_it_end_first(tmp_path: Path) -> None:
    folder, failed, reward = tmp_path / "run", tmp_path / "failed", tmp_path / "fails.py"
    reward.write_text(
        "from pathlib import Path\n"
        "def fails(response, prompt):\n"
        f"    metrics = Path({str(folder / 'metrics.jsonl')!r})\n"
        "    if metrics.exists() and metrics.read_text().count('\\n') >= 2:\n"
        f"        Path({str(failed)!r}).touch()\n"
        "        raise RuntimeError('no step 3')\n"
        "    return float(len(response) % 7)\n"
    )
    flags = ("--reward.function", f"{reward}:fails", "--reward.retries", "0")
    disk = HeldDisk(tmp_path, step=2)
    attempt = launch(folder, *flags, prefix=disk.prefix)
    try:
        attempt.wait_for("a failure", failed.exists)
        assert newest_checkpoint(folder) == 1
        time.sleep(2)  # a rank that did not wait for its save would be gone
        disk.let_go()
        assert attempt.end() == 1, attempt.text[-4000:]
    finally:
        attempt.kill()
    assert "RewardError on rank" in attempt.text and newest_checkpoint(folder) == 2
