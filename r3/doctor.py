"""Preflight: known-answer tests of the whole route path, on the user's own model, settings and layout, before a run starts.

    torchrun --nproc_per_node 8 -m r3.doctor PRESET [--section.field value ...]
    python -m r3.doctor PRESET --parallel.ep 1

The parts are those of a run, built as `train.py` builds them; nothing is written. The heart of it: rollouts whose token says
which rollout it is of, and whose routes are a code of (layer, rollout, position), go through exchange, packing, slicing and
the routers. What leaves every router is then compared with the code of the token that was really fed, wherever the layout
put it: a route that was shifted, swapped, lost or sent to the wrong layer or rank cannot answer right. Exit code 0: all
passed; 1: something did not; 2: the settings are wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from r3 import cli
from r3.config import Config
from r3.data import prompts_of_step
from r3.device import Device, init_device, leave, seed_everything
from r3.diagnostics import mismatch
from r3.engine import Engine
from r3.exchange import Scored, distribute
from r3.mesh import Axis, Mesh, build_mesh
from r3.policy import Policy
from r3.policy.replay import Mode, RouterTap
from r3.residency import Residency, State
from r3.rollout import Answers, answer
from r3.shape import ModelShape
from r3.start import Task, read_task, refusing
from r3.sync import WeightStream, prove_sync, sync_tolerance, sync_weights
from r3.types import Rollout

_MICRO_BATCH_TOKENS = 128  # small, so that every rank gets several micro-batches of several sequences
_ROLLOUTS_PER_RANK = 8
_ANSWERS = 4  # per question that the engine is asked


@dataclass(kw_only=True)
class Patient:
    """Everything a step uses, built for one rank; `answers` are filled in by the check that makes them."""

    config: Config
    task: Task
    device: Device
    mesh: Mesh
    engine: Engine
    policy: Policy
    stream: WeightStream
    residency: Residency
    answers: Answers = field(default_factory=lambda: Answers(rollouts=[], rewards=[]))

    @classmethod
    def admit(cls, config: Config, task: Task) -> Patient:
        """Build all of it. All ranks must call."""
        device = init_device(timeout_s=600.0)
        seed_everything(config.train.seed, deterministic=config.debug.deterministic)
        mesh = build_mesh(device, config.parallel)
        engine = Engine(config, device, task.shape, task.tokenizer, max_model_len=task.max_model_len)
        policy = Policy(config, device, mesh, task.shape)
        return cls(
            config=config,
            task=task,
            device=device,
            mesh=mesh,
            engine=engine,
            policy=policy,
            stream=WeightStream(policy, device, mesh),
            residency=Residency(engine, policy, device),
        )


@dataclass(frozen=True, kw_only=True)
class Check:
    """One question to the patient: `run` returns what it found in words, or raises what is wrong. All ranks run it.

    `needs` names checks without which it cannot be asked.
    """

    name: str
    run: Callable[[Patient], str]
    needs: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The answer of all ranks to one check."""

    name: str
    passed: bool
    said: str


class Unwell(AssertionError):
    """A check found something wrong; the message says what, where."""


def examine(patient: Patient, checks: Sequence[Check]) -> Iterator[Finding]:
    """Ask every check in turn. All ranks must iterate to the end; all get the same findings."""
    failed: set[str] = set()
    for check in checks:
        if lacking := failed.intersection(check.needs):
            failed.add(check.name)
            yield Finding(name=check.name, passed=False, said=f"not asked: needs {', '.join(lacking)}")
            continue
        try:
            said, passed = check.run(patient), True
        # What the parts raise when they refuse: guards assert, and RouteError, SyncError, EngineStateError,
        # WeightMismatch, ResidencyError and a collective that timed out are RuntimeErrors.
        except (AssertionError, RuntimeError, ValueError) as error:
            said, passed = f"{type(error).__name__}: {error}", False
        answers = patient.mesh.world.all_gather_object((passed, said))
        complaints = [f"rank {rank}: {text}" for rank, (well, text) in enumerate(answers) if not well]
        if complaints:
            failed.add(check.name)
        yield Finding(
            name=check.name,
            passed=not complaints,
            said=" | ".join(complaints) if complaints else answers[0][1],
        )


# --------------------------------------------------------------------------------------------------------------------
# Collectives and routers


def check_collectives(patient: Patient) -> str:
    """Every axis of the mesh adds up, and ragged bytes arrive where they were sent."""
    mesh, world = patient.mesh, patient.mesh.world
    world.barrier()
    axes = [axis for axis in vars(mesh).values() if isinstance(axis, Axis)]
    grouped = [axis for axis in axes if axis.group is not None]
    for axis in grouped:
        ranks = torch.tensor([1.0, axis.rank], device=patient.device.torch)
        found = axis.all_reduce(ranks).tolist()
        expected = [axis.size, axis.size * (axis.size - 1) / 2]
        if found != expected:
            raise Unwell(f"axis {axis.name}: the sum of ones and of ranks is {found}, not {expected}")
    gathered = world.all_gather_object(("rank", world.rank))
    if gathered != [("rank", rank) for rank in range(world.size)]:
        raise Unwell(f"all_gather_object returned {gathered}")
    messages = world.all_to_all_bytes([_message(world.rank, to) for to in range(world.size)])
    for sender, message in enumerate(messages):
        if message != _message(sender, world.rank):
            raise Unwell(f"all_to_all_bytes: what came from rank {sender} is not what it sent")
    return (
        f"{len(grouped) or 'no'} axes of several ranks add up, {world.size}^2 ragged messages arrived whole"
    )


def _message(sender: int, receiver: int) -> bytes:
    return f"{sender}>{receiver};".encode() * ((3 * sender + receiver) % 5)  # of every length, 0 too


def check_routers(patient: Patient) -> str:
    """One tap on every router of the decoder, under its global layer number; none elsewhere, none in Megatron's list."""
    taps, moe_layers = patient.policy.replay.taps, patient.policy.shape.moe_layers
    found: dict[int, int] = {}
    others = 0
    for chunk in patient.policy.chunks:
        inside = {id(module) for module in chunk.decoder.modules()}
        for module in chunk.modules():
            if not hasattr(module, "router_replay"):
                continue
            if id(module) not in inside:  # a multi-token-prediction head routes live
                others += 1
                if isinstance(module.router_replay, RouterTap):
                    raise Unwell(
                        f"a router outside the decoder has the tap of layer {module.router_replay.layer}"
                    )
                continue
            layer = module.layer_number - 1
            found[layer] = found.get(layer, 0) + 1
            if module.router_replay is not taps.get(layer):
                raise Unwell(f"the router of layer {layer} asks another object than the tap of its layer")
    if repeated := [layer for layer, count in found.items() if count > 1]:
        raise Unwell(f"layers {repeated} have several routers")
    if found.keys() != taps.keys():
        raise Unwell(f"taps on layers {sorted(taps)}, routers in layers {sorted(found)}")
    if listed := len(RouterTap.global_router_replay_instances):
        raise Unwell(
            f"{listed} instances in Megatron's class-level list: something else may set their routes"
        )
    stages = patient.mesh.world.all_gather_object((patient.mesh.pp.rank, tuple(sorted(taps))))
    by_stage: dict[int, tuple[int, ...]] = dict(stages)
    if any(by_stage[stage] != layers for stage, layers in stages):
        raise Unwell(f"ranks of one pipeline stage hold different MoE layers: {sorted(set(stages))}")
    everywhere = sorted(layer for layers in by_stage.values() for layer in layers)
    if everywhere != list(moe_layers):
        raise Unwell(
            f"the pipeline's stages have routers in layers {everywhere}, the model in {list(moe_layers)}"
        )
    dense = patient.policy.shape.num_layers - len(moe_layers)
    return (
        f"{len(everywhere)} routers, one a MoE layer ({dense} dense) over {len(by_stage)} stage(s); "
        f"{others} outside the decoder, untapped; class-level list empty"
    )


# --------------------------------------------------------------------------------------------------------------------
# The route path


def coded_experts(rollouts_N: np.ndarray, positions_N: np.ndarray, shape: ModelShape) -> np.ndarray:
    """The routes `[N, L, K]` that stand for (layer, rollout, position): K distinct experts drawn by a hash of the three.

    Any two differ but for a chance of 1 / C(E, K), so a path that mixes them up is wrong almost everywhere.
    """
    experts = np.arange(shape.num_experts, dtype=np.uint64)
    layers = np.array(shape.moe_layers, dtype=np.uint64)
    key = (
        rollouts_N.astype(np.uint64)[:, None, None] * np.uint64(0x9E3779B97F4A7C15)
        + positions_N.astype(np.uint64)[:, None, None] * np.uint64(0xC2B2AE3D27D4EB4F)
        + layers[:, None] * np.uint64(0x165667B19E3779F9)
        + experts * np.uint64(0x27D4EB2F165667C5)
    )
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # splitmix64
        key = (key ^ (key >> np.uint64(shift))) * np.uint64(factor)
    return np.argsort(key ^ (key >> np.uint64(31)), axis=-1)[..., : shape.topk]


def coded_rollouts(lengths: Sequence[int], shape: ModelShape) -> list[Rollout]:
    """Rollout i consists of token i + 1 alone and has coded routes: a token and its position say what must be read back."""
    rollouts = []
    for index, length in enumerate(lengths):
        mask_T = np.ones(length, np.float32)
        mask_T[0] = 0
        rows = np.arange(length - 1)
        rollouts.append(
            Rollout(
                prompt_id=f"doctor:{index}",
                group=index // 2,
                member=index % 2,
                tokens_T=np.full(length, index + 1, np.int64),
                loss_mask_T=mask_T,
                logprobs_T=-mask_T,
                routed_experts=coded_experts(np.full(length - 1, index), rows, shape).astype(np.int16),
                finish_reason="stop",
                version=0,
                response="",
            )
        )
    return rollouts


@dataclass
class ReadBack:
    """What left the routers of this rank, compared with the code of the tokens that were fed.

    Attributes:
        answered: layer -> (rollout, position) of every token whose experts were compared.
        wrong: layer -> how many of them went elsewhere.
        first: the first of those, in words.
    """

    shape: ModelShape
    mesh: Mesh
    lengths: Sequence[int]
    answered: dict[int, list[np.ndarray]] = field(default_factory=dict)
    wrong: dict[int, int] = field(default_factory=dict)
    first: str = ""
    _fed: tuple[np.ndarray, np.ndarray] | None = None

    @contextmanager
    def listening(self, policy: Policy) -> Iterator[None]:
        """Inside, every forward of the policy is read back."""
        hooks = []
        for chunk in policy.chunks:
            hooks.append(chunk.register_forward_pre_hook(self._on_tokens))
            for module in chunk.decoder.modules():
                if hasattr(module, "router_replay"):
                    hooks.append(module.register_forward_hook(self._on_routes))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _on_tokens(self, _module: Any, arguments: tuple[Any, ...]) -> None:
        tokens_N, positions_N = (tensor[0].cpu().numpy() for tensor in arguments[:2])
        self._fed = tokens_N, positions_N

    def _on_routes(self, module: Any, _arguments: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        assert self._fed is not None, "a router ran before its model was given tokens"
        tokens_N, positions_N = self._fed
        routed_NE = output[1].cpu().numpy().astype(bool)
        rows = len(routed_NE)
        if rows * self.mesh.tp.size == len(
            tokens_N
        ):  # sequence parallelism: this rank's routers see one slice
            part = slice(self.mesh.tp.rank * rows, (self.mesh.tp.rank + 1) * rows)
            tokens_N, positions_N = tokens_N[part], positions_N[part]
        layer = module.layer_number - 1
        rollouts_N = tokens_N - 1  # -1: filler
        lengths_N = np.array([*self.lengths, 0])[rollouts_N]
        coded_N = positions_N < lengths_N - 1  # a sequence's last token has no route
        where_N2 = np.stack([rollouts_N, positions_N], 1)[coded_N]
        position_of = list(self.shape.moe_layers).index(layer)
        expected_NK = coded_experts(*where_N2.T, self.shape)[:, position_of]
        expected_NE = np.zeros((len(where_N2), self.shape.num_experts), bool)
        np.put_along_axis(expected_NE, expected_NK, True, 1)
        differs_N = (routed_NE[coded_N] != expected_NE).any(1)
        self.answered.setdefault(layer, []).append(where_N2)
        self.wrong[layer] = self.wrong.get(layer, 0) + int(differs_N.sum())
        if differs_N.any() and not self.first:
            at = int(differs_N.argmax())
            rollout, position = where_N2[at].tolist()
            self.first = (
                f"layer {layer}, rollout {rollout}, position {position}: its routes say experts "
                f"{np.sort(expected_NK[at]).tolist()}, the router sent it to "
                f"{np.flatnonzero(routed_NE[coded_N][at]).tolist()}"
            )

    def verdict(self) -> int:
        """The (token, layer) slots read back over all ranks; raises when one is wrong, absent or twice. Collective."""
        everybody = self.mesh.world.all_gather_object((self.answered, self.wrong, self.first))
        wrong = {layer: sum(part[1].get(layer, 0) for part in everybody) for layer in self.shape.moe_layers}
        total = len(self.shape.moe_layers) * sum(length - 1 for length in self.lengths)
        if any(wrong.values()):
            first = next(said for _, _, said in everybody if said)
            layers = {layer: count for layer, count in wrong.items() if count}
            raise Unwell(
                f"{sum(wrong.values())} of {total} (token, layer) slots were routed elsewhere, by layer {layers}; {first}"
            )
        expected = [(i, t) for i, length in enumerate(self.lengths) for t in range(length - 1)]
        for layer in self.shape.moe_layers:
            parts = [part for answered, _, _ in everybody for part in answered.get(layer, [])]
            seen = sorted(map(tuple, np.concatenate(parts).tolist())) if parts else []
            if seen != expected:
                lost, extra = len(set(expected) - set(seen)), len(seen) - len(set(seen))
                raise Unwell(
                    f"layer {layer}: {lost} coded tokens never reached a router, {extra} reached it again"
                )
        return total


def check_route_path(patient: Patient) -> str:
    """Coded routes through exchange, packing, slicing and the routers; then once more through a training pass."""
    policy, mesh, shape = patient.policy, patient.mesh, patient.policy.shape
    if not shape.moe_layers:
        return "a dense model has no routes"
    room = min(_MICRO_BATCH_TOKENS, patient.config.train.micro_batch_tokens)
    count = min(_ROLLOUTS_PER_RANK * mesh.world.size, shape.vocab_size - 1)
    lengths = [2 + 7 * index % (room // 2 - 2) for index in range(count)]
    rollouts = coded_rollouts(lengths, shape)
    (batch,), ledger = distribute(
        [
            Scored(index=index, rollout=rollouts[index], advantage=1.0)
            for index in range(mesh.world.rank, count, mesh.world.size)
        ],
        mesh,
        shape,
        num_updates=1,
        micro_batch_tokens=room,
        on_missing="error",
    )
    del ledger
    reader = ReadBack(shape=shape, mesh=mesh, lengths=lengths)
    with reader.listening(policy):
        policy.score(batch.micro_batches, mode="replay")
    slots = reader.verdict()
    trained = ""
    if patient.config.replay.mode != "off":
        # Raises unless every loaded route was used once in each forward and once in each recomputation.
        policy.forward_backward(batch)
        trained = f"; a training pass (recompute {patient.config.model.recompute}) used each exactly once"
    return (
        f"{slots} coded (token, layer) slots read back right, each once, "
        f"from {len(batch.micro_batches)} micro-batch(es) a rank{trained}"
    )


# --------------------------------------------------------------------------------------------------------------------
# The engine


def check_sync(patient: Patient) -> str:
    """The engine takes the policy's weights and computes what the policy computes."""
    config = patient.config
    patient.residency.move(State.SYNC)
    sync_weights(patient.stream, patient.engine, patient.device, patient.mesh, version=0)
    patient.residency.move(State.GENERATE)
    prompts = patient.task.prompts.prompts[:4]
    worst = prove_sync(patient.engine, patient.policy, prompts, config, patient.mesh)
    worst = max(patient.mesh.world.all_gather_object(worst))
    limit = sync_tolerance(config.model.dtype, config.engine.dtype)
    return f"engine and policy differ by at most {worst:.1e} in a log-probability (limit {limit:g})"


def check_engine_rows(patient: Patient) -> str:
    """The engine's answers have a row of distinct legal experts for every token but the last, in MoE layers alone."""
    config, shape = patient.config, patient.policy.shape
    prompts = prompts_of_step(
        patient.task.prompts, seed=config.train.seed, step=0, count=2 * patient.mesh.engine_dp.size
    )
    patient.answers = answer(
        patient.engine,
        prompts,
        lambda _rollout, _prompt: 0.0,
        patient.mesh,
        members=_ANSWERS,
        version=0,
        run_seed=config.train.seed,
        seed_step=0,
        max_tokens=min(config.rollout.max_response_tokens, 64),
        temperature=config.rollout.temperature,
        top_p=config.rollout.top_p,
        top_k=config.rollout.top_k,
    )
    patient.residency.move(State.TRAIN)
    rows = 0
    layers, topk = (len(shape.moe_layers), shape.topk) if patient.engine.capture else (0, 0)
    for rollout in patient.answers.rollouts:
        who, routes = f"answer {rollout.prompt_id}/{rollout.member}", rollout.routed_experts
        if routes.shape != (len(rollout.tokens_T) - 1, layers, topk):
            raise Unwell(f"{who}: {len(rollout.tokens_T)} tokens have routes of shape {routes.shape}")
        if routes.size and not (routes.min() >= 0 and routes.max() < shape.num_experts):
            raise Unwell(f"{who}: experts {routes.min()} .. {routes.max()} of {shape.num_experts}")
        if (np.diff(np.sort(routes, axis=-1), axis=-1) == 0).any():
            raise Unwell(f"{who}: an expert is chosen twice")
        sampled = rollout.logprobs_T[rollout.loss_mask_T > 0]
        if not (np.isfinite(sampled).all() and (sampled <= 0).all()):
            raise Unwell(f"{who}: log-probabilities are not finite or above 0")
        rows += len(routes)
    count = sum(patient.mesh.world.all_gather_object(len(patient.answers.rollouts)))
    if not patient.engine.capture:
        return f"{count} answers; routes are not captured (replay.mode {config.replay.mode})"
    total = sum(patient.mesh.world.all_gather_object(rows))
    return (
        f"{count} answers, {total} rows = tokens - 1 of top-{topk} in {layers} MoE layers; "
        f"slots of {shape.num_layers - layers} dense layers dropped"
    )


def check_replay(patient: Patient) -> str:
    """Scored with the engine's routes, its answers are at least as likely to the policy as with live ones."""
    policy, config, mesh = patient.policy, patient.config, patient.mesh
    first = patient.answers.rollouts
    offsets = np.cumsum([0, *mesh.world.all_gather_object(len(first))])
    (batch,), ledger = distribute(
        [
            Scored(index=int(offsets[mesh.world.rank]) + i, rollout=rollout, advantage=0.0)
            for i, rollout in enumerate(first)
        ],
        mesh,
        policy.shape,
        num_updates=1,
        micro_batch_tokens=config.train.micro_batch_tokens,
        captured=patient.engine.capture,
        on_missing=config.replay.on_missing,
    )
    del ledger
    modes: tuple[Mode, ...] = ("live", "replay") if patient.engine.capture else ("live",)
    figures: dict[str, Mapping[str, float]] = {}
    agreed: list[float] = []
    for mode in modes:
        scores = policy.score(batch.micro_batches, mode=mode)
        columns = [torch.cat(c) for c in (scores.logprobs, scores.rollout_logprobs, scores.loss_mask) if c]
        partials = mismatch(*columns) if policy.reports else {}
        figures[mode] = _merged(mesh.world, partials)
        if mode == "replay":
            slots = mesh.world.all_gather_object(
                (
                    sum(int(layer) for layer in scores.ledger.agreed),
                    scores.ledger.rows * len(scores.ledger.agreed),
                )
            )
            agreed = [sum(part) for part in zip(*slots, strict=True)]
    said = "; ".join(f"{mode} k3 {f['k3']:.2e} max {f['abs_max']:.2e}" for mode, f in figures.items())
    if not agreed:
        return said
    replayed, live = figures["replay"]["k3"], figures["live"]["k3"]
    said += f"; live routing agrees in {agreed[0] / agreed[1]:.2%} of {agreed[1]} slots"
    # Two such small samples differ by chance; routes that belong to other tokens raise k3 by orders of magnitude.
    if not replayed <= 2 * live + 1e-7:
        raise Unwell(f"replaying the engine's routes raises the mismatch: {said}")
    return said


def check_memory(patient: Patient) -> str:
    """What the engine held while it generated is gone once it sleeps."""
    patient.residency.move(State.SYNC)  # notes the residue: both worlds have given up theirs
    used = patient.residency.used_gib
    freed = used[State.GENERATE.value] - used["residue"]
    cache = patient.config.engine.kv_cache_gib
    if not freed > cache / 2:
        expected = f", its KV cache has {cache:g} GiB" if cache else ""
        raise Unwell(f"sleep freed {freed:.3f} GiB{expected}")
    least = min(patient.mesh.world.all_gather_object(freed))
    residue = max(patient.mesh.world.all_gather_object(used["residue"]))
    return f"sleep freed {least:.3f} GiB on every rank; {residue:.2f} GiB stay when both worlds are away"


def _merged(world: Axis, partials: Mapping[str, Any]) -> dict[str, float]:
    """One figure a name from all ranks' parts. Collective."""
    everybody = [part for part in world.all_gather_object(dict(partials)) if part]
    reduced = {
        name: type(everybody[0][name]).reduce([part[name] for part in everybody]) for name in everybody[0]
    }
    return {name: value for name, value in reduced.items() if value is not None}


CHECKS = (
    Check(name="collectives", run=check_collectives),
    Check(name="routers", run=check_routers),
    Check(name="route path", run=check_route_path, needs=("collectives", "routers")),
    Check(name="sync", run=check_sync, needs=("collectives",)),
    Check(name="engine rows", run=check_engine_rows, needs=("sync",)),
    Check(name="replay on and off", run=check_replay, needs=("engine rows",)),
    Check(name="memory", run=check_memory, needs=("engine rows",)),
)


def main(argv: Sequence[str] | None = None) -> None:
    """Examine, say the findings line by line, end the process with 0 or 1."""
    config = cli.parse(sys.argv[1:] if argv is None else argv).config
    with refusing():
        task = read_task(config)
    patient = Patient.admit(config, task)
    parallel = config.parallel
    findings = []

    def say(text: str) -> None:
        if patient.device.rank == 0:
            print(text, flush=True)

    say(
        f"r3.doctor  {config.model.path} on {patient.device.world_size} rank(s): tp {parallel.tp} ep {parallel.ep} "
        f"pp {parallel.pp} cp {parallel.cp}, engine tp {parallel.engine_tp}, replay {config.replay.mode}"
    )
    for finding in examine(patient, CHECKS):
        findings.append(finding)
        say(f"{'pass' if finding.passed else 'FAIL'}  {finding.name:18s}  {finding.said}")
    failed = [finding.name for finding in findings if not finding.passed]
    say(
        f"{len(findings) - len(failed)} of {len(findings)} passed"
        + (f"; FAILED: {', '.join(failed)}" if failed else "")
    )
    leave(1 if failed else 0)


if __name__ == "__main__":
    main()
