"""Start a run that is prepared: join the ranks, build it, resume it, and close it."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from r3 import extras
from r3.config import Config, flatten
from r3.metrics.console import stage
from r3.metrics.meter import Writer
from r3.rollout.task import Task
from r3.run import checkpoint
from r3.run.build import Run, build_run, init_rank
from r3.run.digests import users_files
from r3.run.ends import REQUEUE, FailureReport, StoppedEarly, resume_command
from r3.run.folder import write_text
from r3.run.open import Opened, ResumeError, newest_whole
from r3.run.prepare import Prepared
from r3.run.result import closing
from r3.runtime.device import leave, settle
from r3.runtime.mesh import Axis
from r3.runtime.process import is_leader
from r3.runtime.terminal import say


class RankError(RuntimeError):
    """Ranks that differ in settings, data or checkpoint."""


@contextmanager
def ending(prepared: Prepared) -> Iterator[None]:
    """End this process after the block, as a program does. All ranks must call.

    The exit code is 0; 2 if the folder cannot be resumed; 75 if a signal stopped the run; and 1,
    or 130 after Ctrl-C, with one block on the console if an error leaves the block.
    """
    folder, code = prepared.folder.path, 0
    with FailureReport(folder, rank=int(os.environ.get("RANK", "0"))):
        try:
            yield
        except ResumeError as error:
            if is_leader():
                say(error, error=True)
            sys.exit(2)
        except StoppedEarly as stopped:
            code = REQUEUE
            if is_leader():
                say(f"{stopped}; continue with: {resume_command(folder)}")
    leave(code)


@contextmanager
def begin(prepared: Prepared) -> Iterator[Run]:
    """Build the run and resume it; close it after the block. All ranks must call.

    Raises:
        RankError: the ranks differ in settings, data or checkpoint.
        ResumeError: no checkpoint can be resumed.
    """
    config, task, lock = prepared.invocation.config, prepared.task, prepared.opened.lock
    stopped = prepared.folder.stopped if is_leader() and not config.eval.only else None
    if stopped is not None:
        stopped.unlink(missing_ok=True)
    try:
        run = _build(prepared)
        base, *differences = prepared.invocation.differences
        settings = [f"settings   {base}", *(f"         {each}" for each in differences)]
        run.meter.console.header(
            [*settings, *extras.header(config, task, run.mesh, run.device, run.opened)]
        )
        prepared.watchdog.watch(prepared.folder, kill_after_s=config.debug.kill_after_s)
        with run.meter, run.stop, run.checkpointer:
            run.phases.begin_steps()
            yield run
    except StoppedEarly as end:
        if stopped is not None:
            with suppress(OSError):  # a full disk: the checkpoint is what counts
                write_text(stopped, f"{end}\n")
        raise
    finally:
        task.close()
        if lock is not None:
            lock.release()
    if run.device.rank == 0:
        step = run.steps_done if config.eval.only else run.meter.last_step
        seconds = time.perf_counter() - prepared.began
        say(closing(config, prepared.folder, seconds, step, run.meter.last_row))


def _build(prepared: Prepared) -> Run:
    """Join the ranks, build the run and load its checkpoint. All ranks must call."""
    config, task, opened = prepared.invocation.config, prepared.task, prepared.opened
    folder = prepared.folder

    @contextmanager
    def watched(what: str) -> Iterator[None]:
        prepared.watchdog.beat(what)
        with stage(what):
            yield

    with watched("joining the ranks"):
        device, mesh = init_rank(config)
        require_one_start(config, task, opened, mesh.world)
    if opened.checkpoint:
        with watched("verifying the checkpoint"):
            writes = not config.eval.only
            opened = newest_whole(opened, folder, config, mesh.world, writes=writes)
    run = build_run(
        config,
        task,
        device=device,
        mesh=mesh,
        opened=opened,
        writes=True,
        stage=watched,
        small_files=prepared.small_files,
        watchdog=prepared.watchdog,
        tracker=start_tracker(config, opened),
    )
    with ExitStack() as undo:
        undo.enter_context(run.meter)
        if opened.checkpoint:
            with watched(f"loading {opened.checkpoint}"):
                checkpoint.load(
                    opened.checkpoint, run.policy, device, mesh, weights_only=config.eval.only
                )
        settle()
        undo.pop_all()
    return run


def start_tracker(config: Config, opened: Opened) -> Writer | None:
    """The tracker of the run on rank 0; None if there is none, and for an evaluation alone."""
    if config.log.tracker == "none" or opened.state is None:
        return None
    with stage(f"starting {config.log.tracker}"):
        return extras.tracker(config, opened.state.tracker_id)


def require_one_start(config: Config, task: Task, opened: Opened, world: Axis) -> None:
    """Require that all ranks have the same settings, data and checkpoint. All ranks must call.

    Machines that do not see the same files would start at different steps and wait for each other
    without end, or mix groups of different prompts.

    Raises:
        RankError: on every rank; names what differs between two ranks.
    """
    # The folder of the run may have several names.
    settings = {name: value for name, value in flatten(config).items() if name != "log.dir"}
    sets = (task.prompts.prompts, *(each.prompts for each in task.heldout))
    mine = {
        "step to begin after": opened.step,
        "settings": _digest(f"{name} {value}" for name, value in settings.items()),
        "prompts": _digest(
            f"{p.id} {len(p.tokens_T)} {p.accepted}" for prompts in sets for p in prompts
        ),
        "sizes of the model": task.shape,
        "your Python files": _digest(map(_source, users_files(config))),
    }
    everybody = world.all_gather_object(mine)
    for what, value in everybody[0].items():
        for rank, theirs in enumerate(everybody):
            if theirs[what] != value:
                raise RankError(
                    f"ranks 0 and {rank} differ in {what}: {value} and {theirs[what]}. Do all "
                    "machines see the same folders "
                    "(log.dir, data, model)?"
                )


def _source(file: str) -> str:
    return Path(file).read_text(encoding="utf-8", errors="replace")


def _digest(lines: Iterable[str]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for line in lines:
        digest.update(line.encode(errors="backslashreplace") + b"\n")
    return digest.hexdigest()
