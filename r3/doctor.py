"""Preflight: known-answer tests of the route path on the user's own model, settings and layout.

    torchrun --nproc_per_node 8 -m r3.doctor PRESET [--section.field value ...]
    python -m r3.doctor PRESET --parallel.ep 1
    torchrun --nproc_per_node 8 -m r3.doctor --fast PRESET    the machines only, in seconds

The doctor builds the parts as `train.py` builds them and writes nothing. Its main test sends coded
rollouts through exchange, packing, slicing and the routers: each token names its rollout, and its
routes encode (layer, rollout, position). The test then compares what every router used with the
code of the token that it was given. A route that is shifted, swapped, lost or sent to the wrong
layer or rank cannot match. `--fast` loads no model: it compares devices, disks, clocks and versions
of all ranks, and reduces a tensor over them. Exit code 0: all checks passed; 1: a check failed; 2:
wrong settings.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, cycle, islice, pairwise, product

import numpy as np
import torch
import torch.distributed as dist

from r3.cli import parse as cli
from r3.config import Config, EnvConfig, with_values
from r3.data.prompts import run_prompts
from r3.engine import Sampling, sampling_seed
from r3.metrics.reduce import DEPTHS
from r3.rewards.scorer import Scorer
from r3.rollout.collect import Collector
from r3.rollout.conversation_setup import ConversationSetup
from r3.rollout.task import read_task
from r3.routing.replay import Mode, RouterTap
from r3.run.folder import RunDir
from r3.run.prepare import refusing
from r3.run.session import Session, build_run, init_rank
from r3.runtime.device import init_device, leave
from r3.runtime.mesh import Axis
from r3.runtime.process import is_leader
from r3.runtime.terminal import own_streams, say
from r3.sync.residency import State
from r3.sync.rollouts import PackingSpec
from r3.sync.weights import sync_weights
from r3.tools import health
from r3.tools.coded_routes import CheckFailed, read_back_coded_routes
from r3.tools.mismatch.jumps import growth
from r3.tools.passes import pass_figures, shared_batch
from r3.tools.proof import prove_sync, prove_weights, sample_single_turn, sync_tolerance, turned
from r3.types import Batch, Rollout

_JOIN_S = 120.0  # that a rank of --fast waits for the others
_SAMPLES, _RESPONSE_TOKENS = 4, 64  # samples per prompt, and their longest response
_DEPTH_PROMPTS, _DEPTH_TOKENS = 2, 48  # per range of positions, and tokens decoded there


@dataclass(kw_only=True)
class DoctorContext:
    """The run under test; `rollouts` holds those of all engines once a check has sampled them."""

    run: Session
    rollouts: list[Rollout] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check; all ranks run it.

    Attributes:
        run: returns a text with its result, or raises what is wrong. It raises only after its last
            collective, because a rank that leaves earlier would let the others wait.
        needs: checks that must have passed before.
    """

    name: str
    run: Callable[[DoctorContext], str]
    needs: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """The result of one check over all ranks."""

    name: str
    passed: bool
    text: str


def examine(context: DoctorContext, checks: Sequence[Check]) -> Iterator[CheckResult]:
    """Run every check in turn. All ranks must iterate to the end; all get the same results."""
    run = context.run
    failed: set[str] = set()
    for check in checks:
        if missing := failed.intersection(check.needs):
            failed.add(check.name)
            yield CheckResult(
                name=check.name, passed=False, text=f"skipped: needs {', '.join(missing)}"
            )
            continue
        try:
            text, passed = check.run(context), True
        # Guards raise AssertionError. RouteError, SyncError, EngineStateError, WeightMismatch,
        # ResidencyError and collectives that time out are RuntimeErrors.
        except (AssertionError, RuntimeError, ValueError) as error:
            said = str(error).removeprefix(f"rank {run.mesh.world.rank}: ")
            text, passed = f"{type(error).__name__}: {said}", False
            if run.mesh.world.size > 1:  # the others may wait for this rank, up to the time limit
                say(f"rank {run.mesh.world.rank} fails {check.name}: {text}", error=True)
        answers = run.mesh.world.all_gather_object((passed, text))
        failures = [f"rank {rank}: {text}" for rank, (well, text) in enumerate(answers) if not well]
        if failures:
            failed.add(check.name)
        yield CheckResult(
            name=check.name,
            passed=not failures,
            text=" | ".join(failures) if failures else answers[0][1],
        )


# ------------------------------------------------------------------------------------------------
# Collectives and routers


def check_collectives(context: DoctorContext) -> str:
    """Check that every axis adds up and that messages of different lengths arrive unchanged."""
    run = context.run
    mesh, world = run.mesh, run.mesh.world
    problems = []
    world.barrier()
    axes = [
        axis for axis in vars(mesh).values() if isinstance(axis, Axis) and axis.group is not None
    ]
    for axis in axes:
        sums = axis.all_reduce(torch.tensor([1.0, axis.rank], device=run.device.torch)).tolist()
        expected = [axis.size, axis.size * (axis.size - 1) / 2]
        if sums != expected:
            problems.append(
                f"axis {axis.name}: the sum of ones and of ranks is {sums}, not {expected}"
            )
    gathered = world.all_gather_object(("rank", world.rank))
    if gathered != [("rank", rank) for rank in range(world.size)]:
        problems.append(f"all_gather_object returned {gathered}")
    messages = world.all_to_all_bytes([_message(world.rank, to) for to in range(world.size)])
    problems += [
        f"all_to_all_bytes: the message from rank {sender} is not what it sent"
        for sender, message in enumerate(messages)
        if message != _message(sender, world.rank)
    ]
    if problems:
        raise CheckFailed("; ".join(problems))
    return (
        f"{len(axes) or 'no'} axes of several ranks add up, {world.size}^2 ragged messages arrived "
        "whole"
    )


def _message(sender: int, receiver: int) -> bytes:
    # of every length, 0 too
    return f"{sender}>{receiver};".encode() * ((3 * sender + receiver) % 5)


def check_routers(context: DoctorContext) -> str:
    """Check that every router of the decoder has one tap under its global layer number."""
    run = context.run
    taps, shape = run.policy.replay.taps, run.policy.shape
    problems: list[str] = []
    layers: list[int] = []
    outside = 0
    for chunk in run.policy.chunks:
        decoder = {id(module) for module in chunk.decoder.modules()}
        for module in chunk.modules():
            if not hasattr(module, "router_replay"):
                continue
            if id(module) in decoder:
                layer = module.layer_number - 1
                layers.append(layer)
                if module.router_replay is not taps.get(layer):
                    problems.append(
                        f"the router of layer {layer} does not use the tap of its layer"
                    )
            else:  # a multi-token-prediction head routes live
                outside += 1
                if isinstance(module.router_replay, RouterTap):
                    problems.append(
                        "a router outside the decoder has the tap of layer "
                        f"{module.router_replay.layer}"
                    )
    if sorted(layers) != sorted(taps):
        problems.append(f"taps on layers {sorted(taps)}, routers in layers {sorted(layers)}")
    if listed := len(RouterTap.global_router_replay_instances):
        problems.append(
            f"{listed} instances in Megatron's class-level list: something else may set their "
            "routes"
        )
    stages = set(run.mesh.world.all_gather_object((run.mesh.pp.rank, tuple(sorted(taps)))))
    everywhere = sorted(layer for _, held in stages for layer in held)
    if everywhere != list(shape.moe_layers):
        problems.append(
            f"pipeline stages have routers {sorted(stages)}, the model in {list(shape.moe_layers)}"
        )
    if problems:
        raise CheckFailed("; ".join(problems))
    return (
        f"{len(everywhere)} routers, one per MoE layer ({shape.num_layers - len(everywhere)} "
        f"dense) over {len(stages)} "
        f"stage(s); {outside} outside the decoder, without tap; class-level list empty"
    )


# ------------------------------------------------------------------------------------------------
# The engine


def check_sync(context: DoctorContext) -> str:
    """Check that the engine takes the policy's weights and decodes what the policy computes.

    Three syncs: of the model's weights, of quite different ones, and of the model's again.
    """
    run = context.run
    config, prompts = run.config, run.task.prompts.prompts[:4]

    def proved(version: int) -> tuple[int, float]:
        if not run.engine.is_asleep:
            run.residency.move(State.TRAIN)
        run.residency.move(State.SYNC)
        sync_weights(run.weights, run.engine, run.device, run.mesh, policy_version=version)
        run.residency.move(State.GENERATE)
        compared = prove_weights(run.weights, run.engine, run.mesh)
        return compared, prove_sync(run.engine, run.policy, prompts, config, run.mesh)

    compared, worst = proved(0)
    with turned(run.policy, run.weights):
        _, others = proved(1)
    _, worst = proved(0)
    limit = sync_tolerance(config)
    return (
        f"{compared} tensors of the engine are the policy's, bit for bit; log-probabilities of "
        f"decoded tokens differ by at most {worst:.1e}, with other weights between two syncs by "
        f"{others:.1e} (limit {limit:g})"
    )


def check_engine_rows(context: DoctorContext) -> str:
    """Check that sampled rollouts have a row of distinct legal experts for all tokens but the
    last.
    """
    run = context.run
    config, shape, world = run.config, run.policy.shape, run.mesh.world
    prompts = run_prompts(run.task.prompts, config, 0, 2 * run.mesh.engine_dp.size)
    rollout = config.rollout
    collector = Collector(
        engine=run.engine,
        mesh=run.mesh,
        setup=ConversationSetup.of(EnvConfig(), run.task.tokenizer, shape.source),
        scorer=Scorer.of_function(lambda _rollout, _prompt: 0.0),
        sampling=Sampling(
            temperature=rollout.temperature, top_p=rollout.top_p, top_k=rollout.top_k
        ),
        run_seed=config.train.seed,
        samples_per_prompt=_SAMPLES,
        max_response_tokens=min(rollout.max_response_tokens, _RESPONSE_TOKENS),
    )
    rollouts = collector.collect(prompts, policy_version=0, seed_step=0).rollouts
    run.residency.move(State.TRAIN)
    layers, topk = (len(shape.moe_layers), shape.topk) if run.engine.capture else (0, 0)
    problems = [
        f"rollout {rollout.prompt_id}/{rollout.sample_index}: {problem}"
        for rollout in rollouts
        for problem in _row_problems(rollout, layers, topk, shape.num_experts)
    ]
    context.rollouts = [rollout for part in world.all_gather_object(rollouts) for rollout in part]
    if problems:
        raise CheckFailed("; ".join(problems[:3]))
    if not run.engine.capture:
        why = f"replay.mode is {config.replay.mode}" if shape.moe_layers else "the model is dense"
        return f"{len(context.rollouts)} rollouts; routes are not captured: {why}"
    rows = sum(len(rollout.routed_experts) for rollout in context.rollouts)
    return (
        f"{len(context.rollouts)} rollouts, {rows} rows = tokens - 1 of top-{topk} in {layers} MoE "
        f"layers; slots of {shape.num_layers - layers} dense layers dropped"
    )


def _row_problems(rollout: Rollout, layers: int, topk: int, experts: int) -> Iterator[str]:
    routes = rollout.routed_experts
    if routes.shape != (len(rollout.tokens_T) - 1, layers, topk):
        yield f"{len(rollout.tokens_T)} tokens have routes of shape {routes.shape}"
    if routes.size and not (routes.min() >= 0 and routes.max() < experts):
        yield f"experts {routes.min()} .. {routes.max()} of {experts}"
    if (np.diff(np.sort(routes, axis=-1), axis=-1) == 0).any():
        yield "an expert is chosen twice for a token"
    sampled = rollout.logprobs_T[rollout.loss_mask_T > 0]
    if not (np.isfinite(sampled).all() and (sampled <= 0).all()):
        yield "log-probabilities are not finite, or above 0"


def check_replay(context: DoctorContext) -> str:
    """Check that replaying the engine's routes does not raise the mismatch."""
    run = context.run
    policy = run.policy
    batch = _batch_of(context.rollouts, run)
    live = pass_figures(policy, policy.score(batch, mode="live"))
    text = f"live k3 {live['k3']:.2e} max {live['abs_max']:.2e}"
    if not run.engine.capture:
        return text
    replayed = pass_figures(policy, policy.score(batch, mode="replay"))
    # What the check would show of an engine whose routes are late by a token.
    late = [
        replace(rollout, routed_experts=np.roll(rollout.routed_experts, 1, axis=0))
        for rollout in context.rollouts
    ]
    wrong = pass_figures(policy, policy.score(_batch_of(late, run), mode="replay"))
    text += (
        f"; replay k3 {replayed['k3']:.2e} max {replayed['abs_max']:.2e}; "
        f"live routing agrees in {replayed['agreement']:.2%} of slots; with routes of the token "
        f"before, k3 {wrong['k3']:.2e} and {wrong['agreement']:.2%}"
    )
    # A small sample differs by chance; routes of other tokens raise k3 by orders of magnitude.
    if not replayed["k3"] <= 2 * live["k3"] + 1e-7:
        raise CheckFailed(f"replaying the engine's routes raises the mismatch: {text}")
    return text


def _batch_of(rollouts: Sequence[Rollout], run: Session) -> Batch:
    """Pack the rollouts of all ranks as a step with one update does."""
    return shared_batch(rollouts, run.mesh, run.policy.shape, _packing(run))


def _packing(run: Session) -> PackingSpec:
    return replace(
        PackingSpec.of_step(run.config, run.policy.replay.layers, 0),
        num_updates=1,
        captured=run.engine.capture,
        min_coverage=0.0,
        filters_truncated=False,
        policy_versions=None,
    )


def check_depth(context: DoctorContext) -> str:
    """Check that the mismatch does not grow with the position in the conversation.

    Prompts of the run, one after the other, fill conversations to the end of each range of
    `DEPTHS` that the engine's context reaches.
    """
    run = context.run
    multiple, tokens = run.mesh.length_multiples[0], _packing(run).micro_batch_tokens
    longest = min(run.task.max_model_len - 1, tokens // multiple * multiple)
    text = list(chain.from_iterable(prompt.tokens_T for prompt in run.task.prompts.prompts))
    starts = [*DEPTHS.values(), longest]
    ends = [min(end, longest) for start, end in pairwise(starts) if start + _DEPTH_TOKENS < longest]
    if len(ends) < 2:
        return f"conversations of at most {longest + 1} tokens are in one range of positions"
    prompts = []
    for end, number in product(ends, range(_DEPTH_PROMPTS)):
        size = end - _DEPTH_TOKENS
        part = islice(cycle(text), number * size, (number + 1) * size)
        first = run.task.prompts.prompts[0]
        prompts.append(replace(first, id=f"doctor:{end}:{number}", tokens_T=tuple(part)))
    run.residency.move(State.SYNC)
    sync_weights(run.weights, run.engine, run.device, run.mesh, policy_version=0)
    run.residency.move(State.GENERATE)
    rollouts = sample_single_turn(
        run.engine,
        prompts,
        seeds=[sampling_seed(run.config.train.seed, -3, one.id, 0) for one in prompts],
        policy_version=0,
        max_tokens=_DEPTH_TOKENS,
        temperature=run.config.rollout.temperature,
        ends=False,
    )
    run.residency.move(State.TRAIN)
    (rollouts, *_) = run.mesh.world.all_gather_object(rollouts if run.engine.is_leader else [])
    batch = _batch_of(rollouts, run)
    mode: Mode = "replay" if run.engine.capture else "live"
    figures = pass_figures(run.policy, run.policy.score(batch, mode=mode))

    def of(figure: str) -> dict[str, float]:
        keys = {depth: f"{figure}_depth/{depth}" for depth in DEPTHS}
        return {depth: figures[key] for depth, key in keys.items() if key in figures}

    means, agreement = of("abs_mean"), of("agreement")
    if grown := growth(means):
        raise CheckFailed(grown)
    return "mean |D| and agreement by position: " + ", ".join(
        f"{depth} {mean:.1e} {agreement.get(depth, math.nan):.2%}" for depth, mean in means.items()
    )


def check_memory(context: DoctorContext) -> str:
    """Check that sleep frees the engine's memory: one more round of sync, generate and train."""
    run = context.run
    # the last notes the residue
    for state in (State.SYNC, State.GENERATE, State.TRAIN, State.SYNC):
        run.residency.move(state)
        if state is State.GENERATE:
            run.engine.fill_cache()
    used = run.residency.used_gib
    freed = used[State.GENERATE.value] - used["residue"]
    cache = run.config.engine.kv_cache_gib
    least = min(run.mesh.world.all_gather_object(freed))
    residue = max(run.mesh.world.all_gather_object(used["residue"]))
    if not freed > cache / 2:
        expected = f", its KV cache has {cache:g} GiB" if cache else ""
        raise CheckFailed(f"sleep frees {freed:.3f} GiB{expected}")
    return (
        f"sleep frees {least:.3f} GiB on every rank; {residue:.2f} GiB stay while engine and "
        "policy are put away"
    )


CHECKS = (
    Check(name="collectives", run=check_collectives),
    Check(name="routers", run=check_routers),
    Check(
        name="route path",
        run=lambda context: read_back_coded_routes(
            context.run.policy, context.run.mesh, context.run.config
        ),
        needs=("collectives", "routers"),
    ),
    Check(name="sync", run=check_sync, needs=("collectives",)),
    Check(name="engine rows", run=check_engine_rows, needs=("sync",)),
    Check(name="replay on and off", run=check_replay, needs=("engine rows",)),
    Check(name="depth", run=check_depth, needs=("engine rows",)),
    Check(name="memory", run=check_memory, needs=("engine rows",)),
)


def main(argv: Sequence[str] | None = None) -> None:
    """Run all checks, print one line per check, end the process with 0 or 1."""
    argv = list(sys.argv[1:] if argv is None else argv)
    config = cli.parse([word for word in argv if word != "--fast"]).config
    # Coded routes must not be replaced by likelier ones.
    config = with_values(config, {"replay.plausibility": 0.0})
    count, failed = 0, []
    for result in examine_machines(config) if "--fast" in argv else examine_path(config):
        count += 1
        failed += [] if result.passed else [result.name]
        _report(f"{'pass' if result.passed else 'FAIL'}  {result.name:18s}  {result.text}")
    end = f"; FAILED: {', '.join(failed)}" if failed else ""
    _report(f"{count - len(failed)} of {count} passed{end}")
    leave(1 if failed else 0)


def examine_machines(config: Config) -> Iterator[CheckResult]:
    """Compare what the ranks see of their machines. All ranks must call; all get the same."""
    device = init_device(timeout_s=_JOIN_S)
    _report(f"r3.doctor --fast on {device.world_size} rank(s)")
    world = Axis.of("world", dist.group.WORLD)
    for finding in health.findings(health.measure(device, world, RunDir.of(config).path)):
        text = " | ".join(finding.problems) or finding.text
        yield CheckResult(name=finding.name, passed=not finding.problems, text=text)


def examine_path(config: Config) -> Iterator[CheckResult]:
    """Build a run and run every check on it. All ranks must call; all get the same results."""
    with refusing():
        task = read_task(config)
    device, mesh = init_rank(config, timeout_s=600.0)
    context = DoctorContext(run=build_run(config, task, device=device, mesh=mesh))
    _report(
        f"r3.doctor  {task.shape.source} on {device.world_size} rank(s): "
        f"{config.parallel.in_words}, engine tp {mesh.engine_tp.size}, replay {config.replay.mode}"
    )
    yield from examine(context, CHECKS)


def _report(text: str) -> None:
    if is_leader():
        say(text)


if __name__ == "__main__":
    own_streams()
    main()
