"""A session: one attempt at a run on one rank. Its parts are built, resumed and closed here."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from r3 import extras
from r3.config import Config, flatten
from r3.engine import Engine
from r3.errors import Explained
from r3.metrics.console import stage
from r3.metrics.meter import Meter, Writer
from r3.policy import Policy
from r3.rollout.task import Task
from r3.run import checkpoint
from r3.run.checkpointer import Checkpointer
from r3.run.ends import REQUEUE, FailureReport, StoppedEarly, StopRequest, resume_command
from r3.run.folder import RunDir, write_text
from r3.run.lock import RunLock
from r3.run.manifest import digest_of
from r3.run.open import Opened, ResumeError, newest_whole
from r3.run.prepare import Prepared
from r3.runtime.device import Device, init_device, leave, seed_everything, settle
from r3.runtime.mesh import Axis, Mesh, build_mesh
from r3.runtime.process import is_leader
from r3.runtime.terminal import say
from r3.sync.residency import Residency, State
from r3.sync.weights import WeightStream, sync_weights


class Phases:
    """What happens when a phase of the run begins, or proceeds.

    Args:
        watchdog: told of each phase.
        files: of users' code, which may have changed in the phase before what the process is.
        lock: of the run's folder; its holder ends if another folder has taken the place.
    """

    def __init__(self, watchdog: Any, files: Sequence[str], lock: RunLock | None = None) -> None:
        self._lock = lock
        self._watchdog, self._who = watchdog, f"your code ({', '.join(files)})" if files else ""
        self._surroundings: Any = None
        self._last = ""

    def begin_steps(self) -> None:
        """Set back from now on what users' code changes."""
        self._surroundings = extras.surroundings().Surroundings() if self._who else None

    def enter(self, phase: str) -> None:
        """Note progress in a phase."""
        if self._watchdog:
            self._watchdog.beat(phase)
        # Not within a phase: a function may set a default for a moment, and set it back itself.
        if phase != self._last:
            if self._surroundings:
                self._surroundings.restore(self._who)
            if self._lock:
                self._lock.require_there()
        self._last = phase


@dataclass(frozen=True, kw_only=True)
class Session:
    """Everything that a step uses on one rank.

    Attributes:
        built_engine: the engine; None if nothing is sampled (`Config.uses_engine`).
        folder: where the run writes.
        stop: whether a signal asked the run to end.
        opened: its folder as it was opened, with the checkpoint that the run continues from.
        proved: policy versions whose sync was proved.
        small_files: config, tokenizer and templates of the starting model, as they were at the
            start; on rank 0.
    """

    config: Config
    task: Task
    device: Device
    mesh: Mesh
    built_engine: Engine | None
    policy: Policy
    weights: WeightStream
    residency: Residency
    meter: Meter
    phases: Phases
    folder: RunDir
    stop: StopRequest
    checkpointer: Checkpointer
    opened: Opened = field(default_factory=Opened)
    proved: set[int] = field(default_factory=set)
    small_files: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def engine(self) -> Engine:
        """The engine of a run that samples."""
        assert self.built_engine is not None, "a run without generation has no engine"
        return self.built_engine

    @property
    def steps_done(self) -> int:
        """Steps that the checkpoint has behind it; 0 for a new run."""
        return self.opened.step

    def sync(self, policy_version: int) -> None:
        """Give the engine the policy's weights and wake it. All ranks must call.

        Every use of the engine starts here, so it never samples from stale weights. The syncs of a
        start's first two versions are proved, and those of every `debug.prove_sync_every`-th: all
        weights of the engine are compared with the policy's, then log-probabilities of tokens that
        it decodes.

        Args:
            policy_version: steps behind the weights; the engine takes this version.

        Raises:
            SyncError: on every rank: an engine has other weights than the policy.
        """
        with self.meter.phase("sync"):
            self.residency.move(State.SYNC)
            sync_weights(
                self.weights, self.engine, self.device, self.mesh, policy_version=policy_version
            )
            self.residency.move(State.GENERATE)
        every = self.config.debug.prove_sync_every
        due = len(self.proved) < 2 or (every > 0 and policy_version % every == 0)
        if due and policy_version not in self.proved:
            self.proved.add(policy_version)
            with self.meter.phase("prove_sync"):
                extras.proof().prove_weights(self.weights, self.engine, self.mesh)
                # Held-out prompts fit the engine in every kind of run.
                heldout = self.task.heldout
                prompts = (heldout[0].prompts if heldout else self.task.prompts.prompts)[:4]
                extras.proof().prove_sync(self.engine, self.policy, prompts, self.config, self.mesh)

    def close(self) -> None:
        """Close the engine, if there is one, and let go of the policy."""
        if self.built_engine is not None:
            self.built_engine.close()
        self.policy.close()

    def release_engine(self) -> None:
        """Put the engine to sleep and give the device memory back to the policy."""
        self.residency.move(State.TRAIN)


def init_rank(config: Config, *, timeout_s: float | None = None) -> tuple[Device, Mesh]:
    """Join the process groups and seed this rank. All ranks must call.

    Args:
        timeout_s: seconds that a collective may wait for other ranks; None is
            debug.collective_timeout_s.
    """
    device = init_device(timeout_s=timeout_s or config.debug.collective_timeout_s)
    seed_everything(config.train.seed, deterministic=config.debug.deterministic)
    return device, build_mesh(device, config.parallel)


def build_run(
    config: Config,
    task: Task,
    *,
    device: Device,
    mesh: Mesh,
    opened: Opened | None = None,
    writes: bool = False,
    hosts: Sequence[str] | None = None,
    stage: Callable[[str], AbstractContextManager[None]] | None = None,
    watchdog: Any = None,
    tracker: Writer | None = None,
    small_files: Mapping[str, bytes] = MappingProxyType({}),
) -> Session:
    """Build engine and policy on this rank, in memory state TRAIN. All ranks must call.

    Without anything to sample there is no engine.

    Args:
        opened: with the checkpoint that the run continues from; this function does not load it.
        writes: whether metrics are written to the folder of the run.
        hosts: overrides the machine of each rank (see `WeightStream`).
        stage: entered with a text around each part that takes seconds to build.
        watchdog: told of each phase.
        tracker: gets metrics and samples.
        small_files: of the starting model, for exports; rank 0 needs them.
    """
    opened = opened or Opened()
    stage = stage or (lambda _: nullcontext())
    # Absolute: users' code may change the working folder while a thread writes a checkpoint.
    folder = RunDir(RunDir.of(config).path.absolute())
    # The engine comes first: vLLM sizes itself by the memory it finds free.
    engine: Engine | None = None
    if config.uses_engine:
        with stage("building the engine"):
            engine = Engine(
                config, device, task.shape, task.tokenizer, max_model_len=task.max_model_len
            )
    with stage("building the policy"):
        policy = Policy(config, device, mesh, task.shape, trains=config.trains)
        weights = WeightStream(policy, device, mesh, hosts=hosts)
    phases = Phases(watchdog, config.users_files, opened.lock)
    # Evaluation alone writes samples, but no row among those of the training.
    meter = Meter(
        folder if writes and config.trains else None,
        mesh.world,
        config,
        on_phase=phases.enter,
        first_step=opened.step if config.trains else 0,
        tracker=tracker,
        trace=extras.step_trace(folder, config.debug.profile, device.rank) if writes else None,
    )
    return Session(
        config=config,
        task=task,
        device=device,
        mesh=mesh,
        built_engine=engine,
        policy=policy,
        weights=weights,
        residency=Residency(engine, policy, device, reward_model=task.reward_model),
        meter=meter,
        phases=phases,
        folder=folder,
        stop=StopRequest(folder.first_failure),
        opened=opened,
        checkpointer=Checkpointer(
            folder.checkpoints, keep=config.checkpoint.keep, state=opened.state, lock=opened.lock
        ),
        small_files=small_files,
    )


class RankError(Explained):
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
def begin(prepared: Prepared) -> Iterator[Session]:
    """Build the run and resume it; close it after the block. All ranks must call.

    Raises:
        RankError: the ranks differ in settings, data or checkpoint.
        ResumeError: no checkpoint can be resumed.
    """
    config, task, folder = prepared.invocation.config, prepared.task, prepared.folder
    stopped = folder.stopped if is_leader() and config.trains else None
    if stopped is not None:
        stopped.unlink(missing_ok=True)
    try:
        run = _build(prepared)
        base, *differences = prepared.invocation.differences
        settings = [f"settings   {base}", *(f"         {difference}" for difference in differences)]
        run.meter.console.header(
            [*settings, *extras.header(config, task, run.mesh, run.device, run.opened)]
        )
        os.environ["R3_RUN_DIR"] = str(folder.path.absolute())  # for agents of other processes
        prepared.watchdog.watch(folder, kill_after_s=config.debug.kill_after_s)
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
        if prepared.opened.lock is not None:
            prepared.opened.lock.release()
    if run.device.rank == 0:
        step = run.meter.last_step if config.trains else run.opened.step
        seconds = time.perf_counter() - prepared.began
        say(extras.result().closing(config, folder, seconds, step, run.meter.last_row))


def _build(prepared: Prepared) -> Session:
    """Join the ranks, build the run and load its checkpoint. All ranks must call."""
    config, task, opened = prepared.invocation.config, prepared.task, prepared.opened

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
            opened = newest_whole(opened, prepared.folder, config, mesh.world, writes=config.trains)
    tracker = None
    if config.log.tracker != "none" and opened.state:  # none for an evaluation alone
        with stage(f"starting {config.log.tracker}"):
            tracker = extras.tracker(config, opened.state.tracker_id)
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
        tracker=tracker,
    )
    with ExitStack() as undo:
        undo.enter_context(run.meter)
        if opened.checkpoint:
            with watched(f"loading {opened.checkpoint}"):
                checkpoint.load_checkpoint(
                    opened.checkpoint, run.policy, device, mesh, weights_only=not config.trains
                )
        settle()
        undo.pop_all()
    return run


def require_one_start(config: Config, task: Task, opened: Opened, world: Axis) -> None:
    """Require that all ranks have the same settings, data and checkpoint. All ranks must call.

    Machines that do not see the same files would start at different steps and wait for each other
    without end, or mix groups of different prompts.

    Raises:
        RankError: on every rank; names what differs between two ranks.
    """
    # The folder of the run may have several names.
    settings = {name: value for name, value in flatten(config).items() if name != "log.dir"}
    sets = (task.prompts.prompts, *(heldout.prompts for heldout in task.heldout))
    mine = {
        "step to begin after": opened.step,
        "settings": digest_of(f"{name} {value}" for name, value in settings.items()),
        "prompts": digest_of(
            f"{p.id} {len(p.tokens_T)} {p.accepted}" for prompts in sets for p in prompts
        ),
        "sizes of the model": task.shape,
        "your Python files": digest_of(map(_source, config.users_files)),
    }
    everybody = world.all_gather_object(mine)
    for what, value in everybody[0].items():
        for rank, theirs in enumerate(everybody):
            if theirs[what] != value:
                raise RankError(
                    f"ranks 0 and {rank} differ in {what}: {value} and {theirs[what]}. Do all "
                    "machines see the same folders (log.dir, data, model)?"
                )


def _source(file: str) -> str:
    return Path(file).read_text(encoding="utf-8", errors="replace")
