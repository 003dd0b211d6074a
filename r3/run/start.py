"""Start a run: read and check its data, build it, resume it, and close it."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from statistics import fmean

from r3.cli.parse import Invocation
from r3.config import Config, ConfigError, Problem, flatten
from r3.data.prompts import DataError
from r3.metrics.console import stage
from r3.metrics.trackers import Tracker
from r3.models.freeze import frozen_tensors
from r3.models.hf_checkpoint import CheckpointError
from r3.models.shape import ModelShape
from r3.rewards.scorer import RewardError
from r3.rollout.conversation import EnvironmentFailed
from r3.rollout.task import Task, read_task
from r3.run import checkpoint
from r3.run.build import Run, build_run, init_rank
from r3.run.check import check_task
from r3.run.failures import FailureReport, resume_command
from r3.run.folder import RunDir, read_metrics
from r3.run.identity import read_identity
from r3.run.lock import require_free
from r3.run.resume import ResumeError, Start, open_run
from r3.run.stop import REQUEUE, StoppedEarly
from r3.run.verify import newest_whole
from r3.run.watchdog import Watchdog
from r3.runtime.algorithm import AlgorithmError
from r3.runtime.device import Device, leave, settle
from r3.runtime.mesh import Axis, Mesh
from r3.runtime.process import die_with_launcher


class RankError(RuntimeError):
    """Ranks that differ in settings, data or checkpoint."""


_MISTAKES = (
    *(AlgorithmError, CheckpointError, ConfigError, DataError),
    *(EnvironmentFailed, ResumeError, RewardError),
)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A run that can be built: its data is read and its folder is ready."""

    invocation: Invocation
    task: Task
    folder: RunDir
    start: Start
    began: float  # time.perf_counter()


@contextmanager
def refusing() -> Iterator[None]:
    """Turn a user's mistake into one message on rank 0 and exit code 2; nothing is written."""
    try:
        yield
    except _MISTAKES as error:
        if _is_leader():
            print(error, file=sys.stderr, flush=True)
        sys.exit(2)


@contextmanager
def ending(prepared: Prepared) -> Iterator[None]:
    """End this process after the block, as a program does. All ranks must call.

    The exit code is 0; 2 if the folder cannot be resumed; 75 if a signal stopped the run; and 1,
    or 130 after Ctrl-C, with one block on the console if an error leaves the block.
    """
    folder, code = prepared.folder.path, 0
    with FailureReport(folder, rank=_rank()):
        try:
            yield
        except ResumeError as error:
            if _is_leader():
                print(error, file=sys.stderr, flush=True)
            sys.exit(2)
        except StoppedEarly as stopped:
            code = REQUEUE
            if _is_leader():
                print(f"{stopped}; continue with: {resume_command(folder)}", flush=True)
    leave(code)


@contextmanager
def begin(prepared: Prepared) -> Iterator[Run]:
    """Build the run and resume it; close it after the block. All ranks must call.

    Raises:
        RankError: the ranks differ in settings, data or checkpoint.
        ResumeError: no checkpoint can be resumed.
    """
    config, task, lock = prepared.invocation.config, prepared.task, prepared.start.lock
    try:
        with _watch(config) as watch:
            run = _build(prepared, watch)
        base, *differences = prepared.invocation.differences
        settings = [f"settings   {base}", *(f"         {each}" for each in differences)]
        run.meter.header([*settings, *header(config, task, run.mesh, run.device, run.start)])
        with run.meter, run.watchdog, run.stop, run.background:
            yield run
    finally:
        task.close()
        if lock is not None:
            lock.release()
    if run.device.rank == 0:
        step = run.steps_done if config.eval.only else config.train.steps
        seconds = time.perf_counter() - prepared.began
        print(closing(config, prepared.folder, seconds, step), flush=True)


def _watch(config: Config) -> Watchdog:
    """Ends this rank if it waits for ever for another one while the run starts.

    Loading shows no progress in between, so a stage of the start may take twice as long as one of
    a step.
    """
    return Watchdog(
        int(os.environ.get("RANK", "0")),
        int(os.environ.get("WORLD_SIZE", "1")),
        stall_s=config.debug.stall_s,
        kill_after_s=2 * config.debug.kill_after_s,
    )


def _build(prepared: Prepared, watch: Watchdog) -> Run:
    """Join the ranks, build the run and load its checkpoint. All ranks must call."""
    config, task, start = prepared.invocation.config, prepared.task, prepared.start
    folder = prepared.folder

    @contextmanager
    def watched(what: str) -> Iterator[None]:
        watch.beat(what)
        with stage(what):
            yield

    with watched("joining the ranks"):
        device, mesh = init_rank(config)
        require_one_start(config, task, start, mesh.world)
    if start.found:
        with watched("verifying the checkpoint"):
            writes = not config.eval.only
            start = newest_whole(start, folder, config, mesh.world, writes=writes)
    run = build_run(
        config,
        task,
        device=device,
        mesh=mesh,
        start=start,
        writes=True,
        stage=watched,
        tracker=start_tracker(config, folder),
    )
    if start.found:
        with watched(f"loading {start.found.folder}"):
            checkpoint.load(start.found, run.policy, device, mesh, weights_only=config.eval.only)
    settle()
    return run


def start_tracker(config: Config, folder: RunDir) -> Tracker | None:
    """The tracker of the run on rank 0; None if there is none, and for an evaluation alone."""
    identity = read_identity(folder.path) if _is_leader() else None
    if config.log.tracker == "none" or config.eval.only or identity is None:
        return None
    with stage(f"starting {config.log.tracker}"):
        return Tracker(config, identity.run_id)


def prepare(invocation: Invocation) -> Prepared | None:
    """Read the task, then make the run's folder ready to start or to resume. Uses no device.

    Returns:
        None if there is nothing to run: `--check` is done, or the run is finished already.

    Raises:
        ConfigError, CheckpointError, DataError, ResumeError: settings, model folder, data or the
            folder of the run are wrong.
        EnvironmentFailed, RewardError: `--check` called a function of the user, which failed.
    """
    began = time.perf_counter()
    die_with_launcher()
    config, check = invocation.config, invocation.check
    require_engines_within_machines(config)
    run_dir = RunDir(Path(config.log.dir))
    with ExitStack() as undo:
        with stage("reading model facts, data and rewards"):
            task = read_task(config)
        undo.callback(task.close)
        if check:
            require_free(run_dir.path)
        writes = _is_leader() and not config.eval.only and not check
        start = open_run(run_dir, config, writes=writes, overrides=invocation.overrides)
        if start.lock is not None:
            undo.callback(start.lock.release)
        if check:
            for line in check_task(task, config.algo):
                print(line, flush=True)
            return None
        if config.eval.only:
            what = (
                f"checkpoint {start.found.folder}, after step {start.found.step}"
                if start.found
                else f"{config.model.path}: {run_dir.path} has no checkpoint"
            )
            start = replace(start, notes=(f"evaluating {what}; no training",))
        elif start.found is not None and _is_finished(config, run_dir, start.found.step):
            if _is_leader():
                print(
                    f"{run_dir.path} is finished: {result(run_dir, start.found.step)}. "
                    "Set a larger --train.steps to continue, or another --log.dir for a new run.",
                    flush=True,
                )
            return None
        undo.pop_all()  # `begin` closes them
    return Prepared(invocation=invocation, task=task, folder=run_dir, start=start, began=began)


def _is_finished(config: Config, run_dir: RunDir, step: int) -> bool:
    exported = not config.checkpoint.export or run_dir.hf(config.train.steps).exists()
    return step >= config.train.steps and exported


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _is_leader() -> bool:
    return _rank() == 0


def require_engines_within_machines(config: Config) -> None:
    """Raise ConfigError if an engine would have ranks on two machines, as the launcher placed them.

    The ranks of an engine share memory.
    """
    local, size = int(os.environ.get("LOCAL_WORLD_SIZE", "0")), config.parallel.engine_tp
    if local % size:
        rule = f"must divide the {local} rank(s) of a machine: an engine stays on one machine"
        fix = f"set parallel.engine_tp to {local} or a divisor of it, or start {size} ranks on each"
        raise ConfigError([Problem("parallel.engine_tp", size, rule, fix)])


def require_one_start(config: Config, task: Task, start: Start, world: Axis) -> None:
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
        "step to begin after": start.found.step if start.found else 0,
        "settings": _digest(f"{name} {value}" for name, value in settings.items()),
        "prompts": _digest(
            f"{p.id} {len(p.tokens_T)} {p.answer}" for prompts in sets for p in prompts
        ),
        "sizes of the model": task.shape,
        "your Python files": _digest(map(_source, _users_files(config))),
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


def _users_files(config: Config) -> list[str]:
    """Files that hold functions and classes of this run, as the settings name them."""
    specs = [config.env.path, *config.reward.function, *config.algo.own_functions.values()]
    specs += [*config.eval.env, *config.eval.function]
    return [file for file, colon, _ in (spec.rpartition(":") for spec in specs) if colon]


def _source(file: str) -> str:
    return Path(file).read_text(encoding="utf-8", errors="replace")


def _digest(lines: Iterable[str]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for line in lines:
        digest.update(line.encode(errors="backslashreplace") + b"\n")
    return digest.hexdigest()


def result(run_dir: RunDir, step: int) -> str:
    """What a run came to, from its rows: steps, accuracy before and after, mismatch with and
    without replay.

    Accuracy is left out unless it was measured before and after, the mismatch unless it was
    measured at all.
    """
    rows = read_metrics(run_dir.metrics) if run_dir.metrics.exists() else []
    accuracy = [
        f"{key.split('/')[1]} accuracy {rows[0][key]:.3f} -> {value:.3f}"
        for key, value in (rows[-1].items() if rows else ())
        if key.startswith("eval/")
        and key.endswith("/accuracy")
        and key in rows[0]
        and len(rows) > 1
    ]
    return "; ".join([", ".join([f"{step} steps", *accuracy]), *_mismatch_of(rows)])


def _mismatch_of(rows: Sequence[Mapping[str, float]]) -> list[str]:
    """Mean k3 over the steps with replayed and with live routes of the same tokens, or nothing."""
    pairs = [
        (row["mismatch/k3_replay"], row["mismatch/k3_live"])
        for row in rows
        if "mismatch/k3_replay" in row and "mismatch/k3_live" in row
    ]
    if not pairs:
        return []
    replay, live = (fmean(column) for column in zip(*pairs, strict=True))
    times = [f"{live / replay:.3g} times"] if replay else []
    return [", ".join([f"replay: k3 {replay:.1e}", f"live: {live:.1e}", *times])]


def closing(config: Config, run_dir: RunDir, seconds: float, step: int) -> str:
    """The last line of a run: its duration, its result, its files."""
    if config.eval.only:
        return f"done       in {seconds:.0f} s; answers in {run_dir.eval(step)}"
    places = [str(run_dir.hf(step))] if run_dir.hf(step).exists() else []
    places += [
        str(run_dir.metrics),
        *([str(run_dir.tensorboard)] if config.log.tensorboard else []),
    ]
    return f"done       in {seconds:.0f} s: {result(run_dir, step)}; {', '.join(places)}"


def reward_text(config: Config) -> str:
    """The reward functions in one line: `math` or `math + 0.1 my.py:short`."""
    reward = config.reward
    weights = reward.weights or (1.0,) * len(reward.function)
    terms = zip(reward.function, weights, strict=True)
    return " + ".join(
        function if weight == 1.0 else f"{weight:g} {function}" for function, weight in terms
    )


def frozen_lines(shape: ModelShape, patterns: Sequence[str]) -> list[str]:
    """The lines of the header about the routers and about `train.freeze`."""
    names = frozen_tensors(shape, patterns)
    ending = f".{shape.moe_names.router}.weight"
    router = {name for name in shape.tensor_shapes if name.endswith(ending)}
    trained = "trained" if not router & names else "frozen" if router <= names else "partly frozen"
    count = sum(prod(shape.tensor_shapes[name]) for name in names)
    frozen = f"{count:,} parameters in {len(names)} tensors (train.freeze {' '.join(patterns)})"
    return [
        f"routers    {trained}; no load-balancing loss, expert biases frozen",
        *([f"frozen     {frozen}"] if names else []),
    ]


def header(config: Config, task: Task, mesh: Mesh, device: Device, start: Start) -> list[str]:
    """The lines that describe a run before its first step."""
    shape, parallel = task.shape, config.parallel
    moe = (
        f", {shape.num_experts} experts top-{shape.topk} in {len(shape.moe_layers)} layers"
        if shape.moe_layers
        else ", dense"
    )
    mtp = (
        [
            f"left out   {shape.num_mtp_layers} multi-token-prediction layers, not trained or "
            "exported"
        ]
        if shape.num_mtp_layers
        else []
    )
    left_out = f"{task.prompts.dropped_too_long} dropped as too long"
    if config.data.drop_duplicates:
        left_out += f", {task.prompts.dropped_duplicates} as duplicates"
    sources = f" from {len(config.data.path)} sources" if len(config.data.path) > 1 else ""
    held_out = (
        ", ".join(f"{len(each.prompts)} held out in {each.settings.name}" for each in task.heldout)
        or "none held out"
    )
    sizes = [len(piece) for piece in parallel.pieces(shape.num_layers)]
    pipeline = f"pp {parallel.pp}"
    if parallel.vpp > 1 or len(set(sizes)) > 1:
        pipeline += f" ({parallel.vpp} piece(s) per stage of {'+'.join(map(str, sizes))} layers)"
    supervised = config.train.objective == "sft"
    what = "conversations" if supervised else "prompts"
    if config.uses_engine:
        engines = f"{mesh.engine_dp.size} engine(s) of {parallel.engine_tp}"
    else:
        engines = "no engine"
    updates = f"{config.train.updates_per_step} update(s), {config.train.steps} steps"
    replay = config.replay.mode if shape.moe_layers else "off (a dense model has no routes)"
    return [
        f"model      {config.model.path} ({shape.num_params / 1e6:,.1f} M parameters{moe})",
        *mtp,
        f"layout     {device.world_size} rank(s) on {device.torch.type}: dp {mesh.dp.size} ep "
        f"{parallel.ep} tp {parallel.tp} "
        f"{pipeline} cp {parallel.cp}; {engines}",
        f"precision  policy {config.model.dtype}"
        f"{f', engine {config.engine.dtype}' if config.uses_engine else ''}"
        f"{', head float32' if config.model.fp32_head else ''}"
        f"{', deterministic kernels' if config.debug.deterministic else ''}",
        f"data       {len(task.prompts)} {what}{sources} ({left_out}), {held_out}",
        *(
            [f"step       {config.rollout.prompts_per_step} conversations to learn, {updates}"]
            if supervised
            else [
                f"task       {config.env.path or config.env.command or config.env.name}, reward "
                f"{reward_text(config)}",
                f"step       {config.rollout.prompts_per_step} prompts x "
                f"{config.rollout.group_size} samples, {updates}",
                f"replay     {replay}; missing routes: {config.replay.on_missing}; reference "
                f"{'replays' if config.replay.reference else 'routes live'}; evaluation routes "
                "live",
            ]
        ),
        *([f"teacher    {' '.join(teachers)}"] if (teachers := config.algo.teacher) else []),
        *frozen_lines(shape, config.train.freeze),
        f"folder     {config.log.dir}",
        *start.notes,
    ]
