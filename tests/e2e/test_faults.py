"""Faults made on purpose in runs of `torchrun train.py`: what the user sees, and what is left."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from r3.runtime.device import free_port
from r3.tools.beside.watchdog import ENDS_RANK
from tests.faults.attempts import (
    failing_reward,
    flip_bit,
    launch,
    newest_checkpoint,
    rows_written,
)
from tests.faults.disk import HeldDisk, fill_and_empty, own_disk
from tests.runs import program, rows_of, timeless_rows
from tests.tiny import FEW_ROWS
from tests.warm import interpreter
from tests.world import ROOT

# Several starts each, on machines that may be busy.
pytestmark = [pytest.mark.e2e, pytest.mark.large, pytest.mark.timeout(900)]

# One rank costs half of what two do; that all ranks learn of the disk of one is in tests/ranks.
ONE_RANK = ("--standalone", "--nproc_per_node", "1")
ALONE = ("--parallel.ep", "1")
# Ranks that torchrun itself starts, as programs of their own.
OF_TORCHRUN = {
    "launcher": ("-m", "torch.distributed.run"),
    "ranks": ("--standalone", "--nproc_per_node", "2"),
}


def first_of_two(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Start the first of two ranks and wait for its end."""
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = (interpreter(), "train.py", "tiny-smoke", "--log.dir", folder, *flags)
    return program(*command, env=ranks | address | {"PYTHONPATH": str(ROOT)})


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def signalled(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A run that was started twice and then stopped by a signal to one of its two ranks.

    `before` and `after` are the files of the folder around the `second` start, `step` the last one
    that the run said it made.
    """
    folder = tmp_path_factory.mktemp("signalled")
    flags = ("--eval.path", "", "--checkpoint.every", "1", "--train.steps", "100")
    flags += ("--rollout.prompts_per_step", "4", "--data.path", FEW_ROWS)
    attempt = launch(folder, *flags, **OF_TORCHRUN)
    attempt.wait_for_rows(2)
    ranks = attempt.family()[1:]
    for rank in ranks:
        rank.suspend()  # a living run that writes nothing, so that any change is the second start's
    try:
        before = contents(folder)
        second = first_of_two(folder, *flags)
        after = contents(folder)
    finally:
        for rank in ranks:
            rank.resume()
    attempt.rank(1).send_signal(signal.SIGTERM)
    assert attempt.end() != 0
    output = attempt.text
    step = int(output.partition("stopped by SIGTERM after step ")[2].partition(";")[0])
    given = dict(folder=folder, flags=flags, second=second, before=before, after=after)
    return SimpleNamespace(**given, output=output, step=step)


def test_second_start_is_refused_and_changes_nothing(signalled: SimpleNamespace) -> None:
    assert signalled.after == signalled.before
    assert signalled.second.returncode == 2
    assert "another run writes to this folder (process " in signalled.second.stderr
    assert "Traceback" not in signalled.second.stderr


def test_signal_to_a_rank_stops_both_after_the_step(signalled: SimpleNamespace) -> None:
    folder, step = signalled.folder, signalled.step
    command = f"torchrun --nproc_per_node 2 train.py --from {folder}"
    assert f"after step {step}; continue with: {command}\n" in signalled.output
    assert "exitcode  : 75" in signalled.output  # of the rank, in torchrun's table
    steps = [row["step"] for row in rows_of(folder)]
    assert steps[:step] == list(range(1, step + 1))
    assert (folder / "checkpoints" / f"step_{step:06d}").is_dir()


def test_damage_falls_back_and_ranks_end_with_their_launcher(signalled: SimpleNamespace) -> None:
    """The run goes on beside a wrong bit in its newest checkpoint; then the launcher is killed."""
    folder, step = signalled.folder, signalled.step
    rows = timeless_rows(folder)[:step]
    shard = folder / "checkpoints" / f"step_{step:06d}" / "__1_0.distcp"
    flip_bit(shard)
    attempt = launch(folder, *signalled.flags, **OF_TORCHRUN)
    attempt.wait_for_rows(step + 1)
    ranks = attempt.family()[1:]
    attempt.process.kill()
    gone, alive = psutil.wait_procs(ranks, timeout=60)
    assert not alive, f"{len(gone)} processes ended with their launcher, not {alive}"
    assert f"step_{step:06d} is damaged: __1_0.distcp has other content" in attempt.text
    assert f"step_{step - 1:06d} after step {step - 1}" in attempt.text
    assert timeless_rows(folder)[:step] == rows, "the step is made again as it was"


needs_compiler = pytest.mark.skipif(not shutil.which("cc"), reason="the slow disk needs cc")


@pytest.fixture(scope="module")
def hung(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A run whose disk held back checkpoint 4. A rank was stopped in step 6; the launcher started
    the ranks again; then step 6 failed, and at last the disk went on.

    Returns:
        before, after: rows up to step 5 of the first and of the second attempt.
        partial: whether checkpoint 4 was begun when the rank was stopped.
        kept: the newest checkpoint then.
        waited: whether the ranks lived on while the disk held their checkpoint.
        code: of the launcher.
        newest: the newest checkpoint at the end.
    """
    tmp_path = tmp_path_factory.mktemp("hung")
    folder, armed, failed = tmp_path / "run", tmp_path / "armed", tmp_path / "failed"
    flags = failing_reward(folder, 6, armed)
    flags += ("--checkpoint.every", "2", "--checkpoint.keep", "0", "--train.steps", "20")
    flags += ("--rollout.prompts_per_step", "4")
    limits = ("--debug.stall_s", "5", "--debug.kill_after_s", "15")
    disk = HeldDisk(tmp_path, step=4)
    attempt = launch(folder, *flags, *limits, prefix=disk.prefix, restarts=1)
    try:
        attempt.wait_for_rows(5)
        attempt.rank(1).suspend()
        before = timeless_rows(folder)[:5]
        partial = (folder / "checkpoints" / ".step_000004.partial").is_dir()
        kept = newest_checkpoint(folder)
        attempt.wait_for("a restart", lambda: "resuming from" in attempt.text)
        armed.touch()
        attempt.wait_for("a failure", failed.exists)
        after = timeless_rows(folder)
        time.sleep(2)  # a rank that did not wait for its save would be gone
        waited = attempt.process.poll() is None and newest_checkpoint(folder) == kept
        disk.let_go()
        code = attempt.end()
    finally:
        attempt.kill()
    given = dict(before=before, after=after, partial=partial, kept=kept, waited=waited, code=code)
    return SimpleNamespace(**given, text=attempt.text, newest=newest_checkpoint(folder))


@needs_compiler
def test_stopped_rank_ends_the_run_and_the_launcher_resumes_it(hung: SimpleNamespace) -> None:
    assert "no rank made progress for 15 s (debug.kill_after_s); rank 0 ends" in hung.text
    assert "step_000002 after step 2" in hung.text
    assert hung.after == hung.before, "the steps are made again as they were"


@needs_compiler
def test_steps_go_on_beside_a_save_and_a_kill_loses_only_it(hung: SimpleNamespace) -> None:
    assert [row["step"] for row in hung.before] == [1, 2, 3, 4, 5]
    assert hung.partial and hung.kept == 2


@needs_compiler
def test_step_that_fails_beside_a_save_lets_it_end_first(hung: SimpleNamespace) -> None:
    assert hung.waited
    assert (hung.code, hung.newest) == (1, 4)
    assert "RewardError on rank" in hung.text


def test_rank_that_waits_for_one_that_never_joins_ends(tmp_path: Path) -> None:
    """One of two ranks starts: as if the other one had been stopped while it was imported."""
    limits = ("--debug.stall_s", "1", "--debug.kill_after_s", "2")
    done = first_of_two(tmp_path, *limits)
    assert done.returncode == -ENDS_RANK, done.stderr[-3000:]  # launch/ makes 75 of it
    assert "no rank made progress for 4 s (debug.kill_after_s); rank 0 ends" in done.stderr


def test_step_that_fails_twice_ends_the_restarts(tmp_path: Path) -> None:
    """A reward function that always fails in step 2, and a launcher that would try four times."""
    folder = tmp_path / "run"
    flags = (*failing_reward(folder, step=2), "--rollout.prompts_per_step", "4")
    flags += ("--train.steps", "3")
    attempt = launch(folder, *flags, *ALONE, ranks=ONE_RANK, restarts=3, is_warm=True)
    assert attempt.end() != 0
    said = "step 2 failed twice in a row. The run stops here"
    attempts, found, rest = attempt.text.partition(said)
    assert found and attempts.count("RewardError on rank 0") == 2
    assert "no step 2" in rest.partition("Traceback")[2], "the error is shown once more"
    assert [row["step"] for row in rows_of(folder)] == [1]


def test_full_disk_stops_the_save_and_not_the_run(tmp_path: Path) -> None:
    """A disk of 45 MB that a large file fills; when that is gone, the delayed save succeeds."""
    # More steps than it makes: a signal ends it when everything has been seen.
    flags = ("--checkpoint.export", "false", "--checkpoint.keep", "1", "--train.steps", "500")
    flags += ("--rollout.prompts_per_step", "2")
    with own_disk(tmp_path / "disk", "45m") as disk:
        if disk is None:
            pytest.skip("this system does not let a user mount a file system")
        attempt = launch(
            disk.folder, *flags, *ALONE, prefix=disk.prefix, ranks=ONE_RANK, is_warm=True
        )
        texts = ("not written: ", "no space: a checkpoint needs ", "tries again")
        fill_and_empty(attempt, disk, *texts)


def test_full_disk_stops_the_export_and_the_checkpoint_remains(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    flags = ("--train.steps", "1", "--rollout.prompts_per_step", "4", *ALONE)
    with own_disk(folder / "hf", "256k") as disk:
        if disk is None:
            pytest.skip("this system does not let a user mount a file system")
        attempt = launch(folder, *flags, prefix=disk.prefix, ranks=ONE_RANK, is_warm=True)
        assert attempt.end() == 1
    assert "SaveError on rank 0: " in attempt.text and "not exported: " in attempt.text
    assert "make room and start again" in attempt.text and "continue with: " in attempt.text
    assert newest_checkpoint(folder) == 1 and not any((folder / "hf").iterdir())

    rows = rows_written(folder)
    again = launch(folder, *flags, ranks=ONE_RANK, is_warm=True)
    assert again.end() == 0, again.text[-3000:]
    assert (folder / "hf" / "step_000001" / "config.json").exists(), again.text
    assert rows_written(folder) == rows, "no step was made again"
