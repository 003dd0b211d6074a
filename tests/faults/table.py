"""The table of faults: each is made in a real run of `tiny-smoke`, and its promise is checked."""

from __future__ import annotations

import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.faults.attempts import (
    FLAGS,
    REWARD,
    Attempt,
    Unexpected,
    failing_reward,
    finish,
    flip_bit,
    launch,
    newest_checkpoint,
    require_equal,
    rows_written,
)
from tests.faults.disk import fill_and_empty, own_disk
from tests.nodes import no_nodes, two_nodes
from tests.runs import QUIET_THREADS, rows_of
from tests.slurm.cluster import cluster, missing
from tests.world import ROOT

_AT = 2  # rows that a run has written when its fault strikes


class Skip(Exception):
    """This machine cannot make the fault; the text says why."""


@dataclass(frozen=True)
class Outcome:
    """What became of a run.

    Attributes:
        seen: the lines that its user reads.
        lost: work that has to be done again.
        goes_on: what starts it again.
    """

    seen: str
    lost: str
    goes_on: str


@dataclass(frozen=True)
class Place:
    """Where a fault's runs write, and an undisturbed run to compare with."""

    folder: Path
    straight: Path


@dataclass(frozen=True)
class Fault:
    """One row of the table; `make` raises Unexpected if R3 breaks its promise."""

    name: str
    what: str
    make: Callable[[Place], Outcome]


TABLE: list[Fault] = []


def _fault(name: str, what: str) -> Callable[[Callable[[Place], Outcome]], object]:
    """Make a row of the table of a function."""
    return lambda make: TABLE.append(Fault(name, what, make))


# "(=)": the introduction of the page says what it means.
_BY_HAND = "the same command resumes (=)"
_BY_ITSELF = "the launcher starts the ranks again (=)"


def _line(text: str, *parts: str) -> str:
    """The first printed line that holds all parts."""
    for line in text.splitlines():
        if all(part in line for part in parts):
            return line.strip()
    raise Unexpected(f"no line with {parts} in:\n{text[-3000:]}")


def _steps(count: int) -> str:
    return {0: "nothing", 1: "1 step"}.get(count, f"{count} steps")


def _resumed(place: Place, reached: int) -> str:
    """Start the run again by hand; returns what had to be made again."""
    saved = newest_checkpoint(place.folder)
    finish(place.folder)
    require_equal(place.folder, place.straight)
    return _steps(reached - saved)


@contextmanager
def _running(place: Place, *flags: str, restarts: int = 0, rows: int = _AT) -> Iterator[Attempt]:
    attempt = launch(place.folder, *flags, restarts=restarts)
    try:
        attempt.wait_for_rows(rows)
        yield attempt
    finally:
        attempt.kill()


def _restarted(
    place: Place,
    strike: Callable[[Attempt], object],
    *flags: str,
    restarts: int = 3,
    calm: Path | None = None,
) -> tuple[Attempt, str]:
    """A run that its launcher starts again; what the ranks had to make again."""
    with _running(place, *flags, restarts=restarts) as attempt:
        reached = rows_written(place.folder)
        strike(attempt)
        attempt.end_with(0)
    require_equal(place.folder, calm or place.straight)
    attempt.require_gone()
    resumed = int(_line(attempt.text, "resuming from").rpartition(" ")[2])
    return attempt, _steps(reached - resumed)


@_fault("kill-rank", "SIGKILL of a rank")
def _rank_killed(place: Place) -> Outcome:
    with _running(place) as attempt:
        began = time.monotonic()
        attempt.rank(1).kill()
        attempt.end()
        seconds = time.monotonic() - began
    reached = rows_written(place.folder)
    seen = f"{_line(attempt.text, 'r3: rank 1 was ended by')} (after {seconds:.0f} s)"
    return Outcome(seen, _resumed(place, reached), _BY_HAND)


@_fault("kill-rank-restart", "SIGKILL of a rank, `MAX_RESTARTS=3`")
def _rank_killed_with_restarts(place: Place) -> Outcome:
    attempt, lost = _restarted(place, lambda attempt: attempt.rank(0).kill())
    seen = _line(attempt.text, "resuming from")
    return Outcome(f"resuming from {Path(seen).name}", lost, _BY_ITSELF)


@_fault("kill-launcher", "SIGKILL of the launcher")
def _launcher_killed(place: Place) -> Outcome:
    with _running(place) as attempt:
        ranks = attempt.family()[1:]
        attempt.process.kill()
        _, alive = psutil.wait_procs(ranks, timeout=10)
        if alive:
            raise Unexpected(f"{alive} live on without their launcher")
    reached = rows_written(place.folder)
    return Outcome("nothing: the ranks end at once", _resumed(place, reached), _BY_HAND)


@_fault("term-launcher", "SIGTERM to the launcher")
def _launcher_terminated(place: Place) -> Outcome:
    return _stopped(place, lambda attempt: attempt.process.send_signal(signal.SIGTERM))


@_fault("usr1-rank", "SIGUSR1 to a rank")
def _rank_signalled(place: Place) -> Outcome:
    return _stopped(place, lambda attempt: attempt.rank(1).send_signal(signal.SIGUSR1))


def _stopped(place: Place, send: Callable[[Attempt], None]) -> Outcome:
    with _running(place) as attempt:
        send(attempt)
        attempt.end_with(75)
    reached = rows_written(place.folder)
    seen = _line(attempt.text, "stopped by SIG").replace(str(place.folder), "RUN_DIR")
    return Outcome(seen, _resumed(place, reached), _BY_HAND)


@_fault("hang", "a rank hangs (SIGSTOP), `MAX_RESTARTS=2`")
def _rank_hangs(place: Place) -> Outcome:
    attempt, lost = _restarted(
        place, lambda attempt: attempt.rank(1).suspend(), *_LIMITS, restarts=2
    )
    seen = _line(attempt.text, "no rank made progress", "rank 1", "is stopped")
    return Outcome(seen, lost, _BY_ITSELF)


_LIMITS = ("--debug.stall_s", "5", "--debug.kill_after_s", "10")


def _calm(place: Place) -> Path:
    """An undisturbed run with the reward function that makes faults."""
    folder = place.straight.with_name("calm")
    if not folder.exists():
        finish(folder, *REWARD)
    return folder


@_fault(
    "regex",
    "a regular expression in a reward function never ends, on one of two ranks, `MAX_RESTARTS=2`",
)
def _reward_hangs(place: Place) -> Outcome:
    begin = Path(f"{place.folder}.regex.1").touch
    flags = (*_LIMITS, *REWARD)
    attempt, lost = _restarted(place, lambda _: begin(), *flags, restarts=2, calm=_calm(place))
    report = _line(attempt.text, "rank 1 made no progress", "it runs your code, regex")
    _line(attempt.text, "rank 1 ends", "it runs your code, regex")
    return Outcome(report.replace(f"{ROOT}/", ""), lost, _BY_ITSELF)


@_fault(
    "pool", "SIGKILL of a rank whose reward file keeps a `ProcessPoolExecutor`, `MAX_RESTARTS=3`"
)
def _pool_left(place: Place) -> Outcome:
    kill = lambda attempt: attempt.rank(0).kill()  # noqa: E731
    attempt, lost = _restarted(place, kill, *REWARD, calm=_calm(place))
    seen = f"resuming from {Path(_line(attempt.text, 'resuming from')).name}"
    return Outcome(f"{seen}; the pool ends with its rank", lost, _BY_ITSELF)


@_fault(
    "changes", "a reward function changes torch's default dtype, the folder, `sys.stdout`, seeds"
)
def _users_changes(place: Place) -> Outcome:
    calm = _calm(place)
    Path(f"{place.folder}.changes").touch()
    attempt = finish(place.folder, *REWARD)
    require_equal(place.folder, calm)
    seen = _line(attempt.text, "changed torch's default dtype").replace(f"{ROOT}/", "")
    for what in ("the working folder", "the locale"):
        _line(attempt.text, f"changed {what}")
    _line(attempt.text, "done")
    return Outcome(f"{seen}; others alike", "nothing", "the run goes on (=)")


@_fault("hangup", "SIGHUP to the launcher (the terminal is closed)")
def _hung_up(place: Place) -> Outcome:
    return _stopped(place, lambda attempt: attempt.process.send_signal(signal.SIGHUP))


@_fault("interrupt", "Ctrl-C twice")
def _interrupted_twice(place: Place) -> Outcome:
    with _running(place) as attempt:
        ranks = attempt.family()[1:]
        attempt.process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        began = time.monotonic()
        attempt.process.send_signal(signal.SIGINT)
        attempt.end_with(130)
        seconds = time.monotonic() - began
        if psutil.wait_procs(ranks, timeout=10)[1] or seconds > 20:
            raise attempt.unexpected(f"{seconds:.0f} s")
    seen = attempt.text.strip().splitlines()[-1].replace(str(place.folder), "RUN_DIR")
    if "SIGINT" not in seen or "death signal" in attempt.text:
        raise Unexpected(attempt.text[-3000:])
    return Outcome(seen, _resumed(place, rows_written(place.folder)), _BY_HAND)


@_fault("reader", "the reader of the console leaves (`\\| head -n 1`)")
def _reader_leaves(place: Place) -> Outcome:
    return _silent(place, '"$0" "$@" 2>&1 | head -n 1')


@_fault("console", "the disk of the console's file is full")
def _console_full(place: Place) -> Outcome:
    return _silent(place, 'exec "$0" "$@" >/dev/full 2>&1')


def _silent(place: Place, shell: str) -> Outcome:
    """A run whose lines cannot be written."""
    attempt = launch(place.folder, prefix=("sh", "-c", shell))
    attempt.end_with(0)
    require_equal(place.folder, place.straight)
    return Outcome("nothing: the lines are dropped", "nothing", "the run goes on to its end")


@_fault("bit", "one bit of a shard of the newest checkpoint flips")
def _bit_flipped(place: Place) -> Outcome:
    return _damaged(place, lambda folder: flip_bit(folder / "__1_0.distcp"))


@_fault("missing", "a file of the newest checkpoint is missing")
def _file_missing(place: Place) -> Outcome:
    return _damaged(place, lambda folder: (folder / "__0_0.distcp").unlink())


@_fault("other-step", "a shard of another step in the newest checkpoint")
def _other_step(place: Place) -> Outcome:
    def swap(folder: Path) -> None:
        older = folder.with_name(f"step_{newest_checkpoint(place.folder) - 1:06d}")
        shutil.copyfile(older / "__0_0.distcp", folder / "__0_0.distcp")

    return _damaged(place, swap)


def _damaged(place: Place, damage: Callable[[Path], None]) -> Outcome:
    with _running(place, rows=3) as attempt:
        attempt.kill()
    reached = newest_checkpoint(place.folder)
    damage(place.folder / "checkpoints" / f"step_{reached:06d}")
    again = finish(place.folder)
    require_equal(place.folder, place.straight)
    seen = _line(again.text, "is damaged:").partition(f"{place.folder}/")[2]
    return Outcome(seen, _steps(1), _BY_HAND)


@_fault("second-start", "a second start in the folder of a running run")
def _second_start(place: Place) -> Outcome:
    with _running(place) as attempt:
        ranks = [attempt.rank(number) for number in (0, 1)]
        for rank in ranks:
            rank.suspend()  # the run is short: it must not end before the second start
        second = launch(place.folder)
        code = second.end()
        for rank in ranks:
            rank.resume()
        if code != 2:
            raise Unexpected(f"exit code {code}, not 2:\n{second.text[-3000:]}")
        attempt.end_with(0)
    require_equal(place.folder, place.straight)
    seen = _line(second.text, "another run writes").partition(str(place.folder))[2].lstrip("': ")
    seen = re.sub(r"process \d+ on .*?\)", "process PID on HOST, started TIME)", seen)
    return Outcome(seen, "nothing", "the first run goes on undisturbed")


@_fault("same-failure", "one step fails again and again, `MAX_RESTARTS=3`")
def _same_failure(place: Place) -> Outcome:
    """A reward function that fails whenever step 3 is reached."""
    attempt = launch(place.folder, *failing_reward(place.folder, step=3), restarts=3)
    if not attempt.end():
        raise attempt.unexpected("a run that cannot pass step 3 ended well")
    failures = attempt.text.partition("failed twice")[0].count("RewardError on rank")
    if failures != 2:
        raise attempt.unexpected(f"step 3 failed {failures} times, not 2")
    seen = _line(attempt.text, "failed twice").partition(str(place.folder))[2].lstrip(": ")
    return Outcome(seen, "nothing more", "correct the cause, then start by hand")


@_fault("full-disk", "the disk is full for some steps")
def _disk_full(place: Place) -> Outcome:
    # More steps than it makes: a signal ends it when everything has been seen.
    flags = ("--checkpoint.keep", "1", "--checkpoint.export", "false", "--train.steps", "500")
    with own_disk(place.folder.with_name("disk"), "45m") as disk:
        if disk is None:
            raise Skip("this system does not let a user mount a file system")
        attempt = launch(disk.folder, *flags, prefix=disk.prefix, is_warm=True)
        fill_and_empty(attempt, disk, "no space: a checkpoint needs")
    seen = _line(attempt.text, "not written: ", "no space: a checkpoint needs")
    seen = seen.replace(f"{disk.folder}/", "RUN_DIR/")
    return Outcome(seen, "nothing", "the run goes on; the save succeeds when there is room")


@_fault("torn-metrics", "the last line of `metrics.jsonl` is torn")
def _metrics_torn(place: Place) -> Outcome:
    with _running(place) as attempt:
        attempt.kill()
    reached = rows_written(place.folder)
    with (place.folder / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 3, "reward/me')
    saved = newest_checkpoint(place.folder)
    again = finish(place.folder)
    require_equal(place.folder, place.straight)
    seen = _line(again.text, "the last line is torn").partition(str(place.folder))[2].lstrip("/")
    return Outcome(seen, _steps(max(0, reached - saved)), _BY_HAND)


@_fault("explosion", "a learning rate of 1e30")
def _weights_explode(place: Place) -> Outcome:
    attempt = launch(place.folder, "--train.lr", "1e30", "--train.clip_grad", "0")
    if not attempt.end():
        raise attempt.unexpected("weights of 1e30 were accepted")
    if newest_checkpoint(place.folder) or (place.folder / "hf").exists():
        raise Unexpected("a broken policy was saved")
    text = _line(attempt.text, "Error on rank")
    after = text.partition("Nothing was saved")
    seen = f"{text.partition('; ')[0]} ... {after[1]}{after[2]}"
    return Outcome(seen, "nothing: no broken policy is saved", "with a lower train.lr")


@_fault("exit-at-import", "a reward file calls `sys.exit(0)`")
def _reward_exits(place: Place) -> Outcome:
    reward = place.folder.with_name("exits.py")
    reward.write_text("import sys\ndef f(response, prompt): return 1.0\nsys.exit(0)\n")
    attempt = launch(place.folder, "--reward.function", f"{reward}:f")
    attempt.end_with(2)
    seen = _line(attempt.text, "calls sys.exit").partition("exits.py calls")[2]
    return Outcome(f"exits.py calls{seen}", "nothing", "correct the file")


@_fault(
    "environment",
    "an environment raises, hangs, and replies with an unpaired surrogate (invalid Unicode)",
)
def _environment_fails(place: Place) -> Outcome:
    """A reply that no tokenizer can encode, an exception and a hang, with `on_error drop`."""
    environment = place.folder.with_name("odd.py")
    environment.write_text(
        "import time\n"
        "class Odd:\n"
        "    def reset(self, prompt):\n"
        "        self.kind = int(prompt.id.rpartition(':')[2]) % 4\n"
        "        return prompt.messages\n"
        "    def step(self, message):\n"
        "        if self.kind == 2:\n"
        "            raise RuntimeError('broken')\n"
        "        if self.kind == 3:\n"
        "            time.sleep(3600)\n"
        "        text = '\\ud800' if self.kind == 0 else 'Go on.'\n"
        "        done = self.kind == 1  # the first row, with which a start checks it\n"
        "        return ([] if done else [{'role': 'user', 'content': text}]), 1.0, done\n"
    )
    flags = ("--env.path", f"{environment}:Odd", "--env.on_error", "drop", "--env.timeout_s", "2")
    attempt = finish(place.folder, *flags, "--reward.function", "none", "--train.steps", "2")
    said = _line(attempt.text, "samples were dropped. The first: ").partition(" (")[0]
    rows = [row for row in rows_of(place.folder) if row["step"]]
    dropped, late = (sum(row[f"env/{key}"] for row in rows) for key in ("dropped", "timeouts"))
    if not dropped or not late:
        raise Unexpected(f"{dropped:.0f} conversations dropped, {late:.0f} of them late")
    counts = f"`env/dropped` is {dropped:.0f} in {len(rows)} steps, `env/timeouts` {late:.0f}"
    return Outcome(
        f"{said} (and its traceback). {counts}",
        "these conversations",
        "the run goes on (`env.on_error drop`)",
    )


@_fault("deleted", "the folder of the run is deleted while it runs")
def _folder_deleted(place: Place) -> Outcome:
    with _running(place) as attempt:
        shutil.rmtree(place.folder, ignore_errors=True)
        if not attempt.end():
            raise attempt.unexpected("half a folder, and a good end")
    seen = _line(attempt.text, "was deleted").partition(str(place.folder))[2].strip()
    return Outcome(seen, "the whole run", "as a new run")


@_fault("slurm", "the signal before Slurm's time limit, two nodes")
def _slurm_signal(place: Place) -> Outcome:
    """Two nodes with a rank each; the signal that Slurm sends before the time limit."""
    if reason := missing():
        raise Skip(reason)
    folder = place.folder.with_name("slurm")
    folder.mkdir()
    variables = {"PYTHON": sys.executable, "GLOO_SOCKET_IFNAME": "eth0", **QUIET_THREADS}
    with cluster(folder, variables, limit_s=400) as slurm:
        flags = ("tiny-smoke", "--log.dir", str(place.folder), *FLAGS)
        job = slurm.submit(["--nodes=2", "--gpus-per-node=1"], *flags)
        slurm.wait(job, "row 2", lambda _: rows_written(place.folder) >= _AT)
        slurm.call("run", "scancel", "--signal=USR1", "--batch", str(job))
        slurm.wait_for_text(job, "stopped by SIGUSR1")
        slurm.wait(job, "end", lambda facts: facts["JobState"] in ("COMPLETED", "FAILED"))
        facts, text = slurm.facts(job), slurm.output(job)
        if facts["JobState"] != "COMPLETED" or facts["Restarts"] != "1":
            raise Unexpected(f"{facts}\n{text[-3000:]}")
    require_equal(place.folder, place.straight)
    seen = _line(text, "requeueing job")
    return Outcome(seen, "nothing", "Slurm starts the job again (=)")


@_fault("lost-link", "the link between two nodes is lost, engines of 2 ranks")
def _link_lost(place: Place) -> Outcome:
    """Two nodes with two ranks and an engine of both; the cable between them is pulled out."""
    if reason := no_nodes():
        raise Skip(reason)
    limits = ("--debug.stall_s", "10", "--debug.kill_after_s", "20")
    flags = (*limits, "--parallel.engine_tp", "2")
    one = place.folder.with_name("one")
    if (alone := launch(one, *flags, ranks=("--standalone", "--nproc_per_node", "4"))).end():
        raise Unexpected(alone.text[-3000:])
    with two_nodes(place.folder.parent) as nodes:
        attempts = nodes.launch(place.folder, *flags, ranks=2)
        attempts[0].wait_for_rows(_AT)
        nodes.link("down")
        codes = [attempt.end() for attempt in attempts]
        reached, saved = rows_written(place.folder), newest_checkpoint(place.folder)
        nodes.link("up")
        again = nodes.launch(place.folder, *flags, ranks=2)
        if not all(codes) or any([attempt.end() for attempt in again]):
            raise Unexpected(f"{codes}\n{again[0].text[-3000:]}")
    require_equal(place.folder, one)
    seen = _line("\n".join(attempt.text for attempt in attempts), "no rank made progress")
    return Outcome(seen, _steps(reached - saved), _BY_HAND)
