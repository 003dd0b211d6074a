"""The engine as an oracle for a dump: its tokens decoded again, and where engine and policy part.

The engine decodes the tokens of the dump one at a time, as it decoded them when they were sampled:
each is put in the place of the one that it samples. It returns their log-probabilities and the
experts that it chose. The policy replays these experts. What is left of the difference then comes
from weights or arithmetic, and its place (layer, position, experts) tells which.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from r3.config import Config, with_values
from r3.data.template import load_tokenizer
from r3.engine import Engine, Sampling, Transcript, Turn
from r3.engine.proof import compare
from r3.models.shape import ModelShape
from r3.policy import Policy, TokenScores
from r3.routing import Mode
from r3.runtime.device import Device
from r3.runtime.mesh import Mesh
from r3.sync import Residency, State
from r3.sync.rollouts import PackingSpec, distribute, share_out
from r3.sync.weights import WeightStream, sync_weights
from r3.tools.mismatch_watch import growth
from r3.types import Batch, MicroBatch, Rollout

POSITIONS = (0, 64, 256, 1024, 4096, 16384)
"""First positions of the ranges of the table."""
_FEWEST = 16
"""Tokens that a mean needs."""
_ALIKE, _SHIFTED = 0.5, 0.3
"""Slots of other tokens agree in half or fewer; how much better a shift must be."""
_SIGMAS = 4.0
"""Standard errors by which an expert stands out of a hundred."""


def build_engine(
    config: Config, device: Device, shape: ModelShape, rollouts: Sequence[Rollout], folder: str
) -> Engine:
    """Build an engine for a dump, asleep. All ranks must call, before the policy is built.

    Args:
        folder: a Hugging Face folder whose weights it loads; empty: it waits for the policy's.
    """
    if folder:  # a deeper sleep would drop its weights
        config = with_values(config, {"model.path": folder, "engine.sleep_level": 1})
    return Engine(
        config,
        device,
        shape,
        load_tokenizer(config.model.path),
        max_model_len=max(len(each.tokens_T) for each in rollouts),
        from_disk=bool(folder),
    )


def decode(
    engine: Engine,
    policy: Policy,
    rollouts: Sequence[Rollout],
    device: Device,
    mesh: Mesh,
    *,
    from_disk: bool,
) -> tuple[list[Forced], list[str]]:
    """Decode a dump by an engine that sleeps; it sleeps again afterwards. All ranks must call.

    Args:
        from_disk: the engine has weights of its own.

    Returns:
        What the engine returned, and names of its tensors that are not the policy's.
    """
    residency, stream = Residency(engine, policy, device), WeightStream(policy, device, mesh)
    version = rollouts[0].policy_version
    residency.move(State.SYNC)
    if from_disk:
        engine.policy_version = version
        engine.reset_cache()
    else:
        sync_weights(stream, engine, device, mesh, policy_version=version)
    residency.move(State.GENERATE)
    different = compare(engine.llm, stream.read_blocks(), engine.shape).different
    temperature = policy.config.rollout.temperature
    forced = forced_decoding(engine, rollouts, mesh, temperature=temperature)
    residency.move(State.TRAIN)
    return forced, different


@dataclass(frozen=True, kw_only=True)
class Forced:
    """What the engine returned for one rollout, whose tokens it decoded again.

    Attributes:
        logprobs_T: log-probability of every token after the prompt, 0 in the prompt.
        routed_experts: its choice, [T-1, L, K]; [T-1, 0, 0] without capture.
    """

    logprobs_T: np.ndarray
    routed_experts: np.ndarray


@contextmanager
def _forcing(engine: Engine, tokens: Mapping[int, Sequence[int]]) -> Iterator[None]:
    """Inside, requests sample the tokens that are given for their keys.

    vLLM's sampler computes its log-probabilities as ever; the token that it drew is replaced before
    they are read off. The place of a row's token is the number of tokens that the request has.
    """
    (runner,) = engine.llm.collective_rpc(lambda worker: worker.model_runner)
    sampler, batch = runner.sampler, runner.input_batch
    draw = sampler.sample

    def given(*args: Any, **more: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        drawn, logprobs = draw(*args, **more)
        for row, name in enumerate(batch.req_ids[: len(drawn)]):
            wanted = tokens[int(name.partition("-")[0])]
            place = int(batch.num_tokens_no_spec[row])
            if place < len(wanted):  # with async scheduling a step more is drawn, and dropped
                drawn[row] = wanted[place]
        return drawn, logprobs

    sampler.sample = given
    try:
        yield
    finally:
        del sampler.sample


def forced_decoding(
    engine: Engine, rollouts: Sequence[Rollout], mesh: Mesh, *, temperature: float
) -> list[Forced]:
    """Decode the tokens of rollouts again, after their prompts. All ranks must call.

    Observations between sampled tokens are decoded too; nobody reads their log-probabilities.

    Args:
        engine: awake.
        rollouts: the same on all ranks; each engine decodes its share.
        mesh: the layout of the ranks.
        temperature: of the log-probabilities.

    Returns:
        One for each rollout, on all ranks.

    Raises:
        RouteError: the engine returned no routes, or too few.
    """
    share = range(mesh.engine_dp.rank, len(rollouts), mesh.engine_dp.size)
    starts = {i: int(rollouts[i].loss_mask_T.argmax()) for i in share}
    tokens = {i: rollouts[i].tokens_T.tolist() for i in share}
    sampling = Sampling(temperature=temperature)  # nothing ends a turn but its length
    found: dict[int, Forced] = {}
    with (
        _forcing(engine, tokens),
        engine.sampler(policy_version=engine.policy_version) as sampler,
    ):
        for i in share:
            sampler.add(
                Turn(
                    key=i,
                    tokens_T=tokens[i][: starts[i]],
                    first_row=0,
                    seed=i,
                    max_tokens=len(tokens[i]) - starts[i],
                    sampling=sampling,
                )
            )
        while sampler.busy:
            for sampled in sampler.step():
                i = sampled.key
                assert tokens[i][starts[i] :] == sampled.tokens_T, f"{rollouts[i].name}: not forced"
                name = f"rollout {rollouts[i].name}"
                transcript = Transcript(engine.capture_spec, tokens[i][: starts[i]], who=name)
                transcript.append_sample(sampled)
                logprobs_T = np.array(transcript.logprobs, np.float32)
                found[i] = Forced(logprobs_T=logprobs_T, routed_experts=transcript.rows())
    own = found if engine.is_leader else {}
    everything = {i: each for part in mesh.world.all_gather_object(own) for i, each in part.items()}
    return [everything[i] for i in range(len(rollouts))]


def by_rollout(
    rollouts: Sequence[Rollout],
    micro_batches: Sequence[MicroBatch],
    passes: Mapping[str, TokenScores],
    mesh: Mesh,
) -> list[dict[str, np.ndarray]]:
    """Return the scores of every rollout, on all ranks. All ranks must call.

    `logprobs_PASS` [T] are 0 where nothing was sampled; `routes_PASS` [T-1, L, K] are the experts
    that the routers chose in a pass that recorded them.

    Args:
        rollouts: the same on every rank.
        micro_batches: what this rank scored; whole sequences, so no tensor, pipeline or context
            parallelism.
        passes: what `policy.score` returned, by name.
    """
    own: dict[int, dict[str, np.ndarray]] = {}
    for number, micro_batch in enumerate(micro_batches):
        starts = micro_batch.cu_seqlens[:-1]
        for index, start in zip(micro_batch.rollout_ids, starts, strict=True):
            if index < 0:
                continue
            mask_T = rollouts[index].loss_mask_T
            rows = slice(start, start + len(mask_T) - 1)
            own[index] = {}
            for label, scores in passes.items():
                # Position t scores token t + 1; the first token has no score.
                logprobs = np.append(np.float32(0), scores.logprobs[number][rows].cpu().numpy())
                own[index][f"logprobs_{label}"] = logprobs.astype(np.float32) * mask_T
                if scores.ledger.recorded:
                    routes = scores.ledger.recorded[number][rows]
                    own[index][f"routes_{label}"] = routes.cpu().numpy()
    everything = {i: a for part in mesh.world.all_gather_object(own) for i, a in part.items()}
    assert everything.keys() == set(range(len(rollouts))), (
        f"scores of {len(everything)} rollouts, the dump has {len(rollouts)}"
    )
    return [everything[i] for i in range(len(rollouts))]


def packed(
    rollouts: Sequence[Rollout], policy: Policy, mesh: Mesh, *, tokens: int, captured: bool
) -> Batch:
    """Pack rollouts that all ranks have, each rank its share. All ranks must call.

    Args:
        tokens: most in a micro-batch.
        captured: whether they have routes.
    """
    spec = PackingSpec(
        micro_batch_tokens=tokens,
        layers=policy.replay.layers,
        captured=captured,
        on_missing="live",
    )
    own = share_out(rollouts, mesh.world.rank, mesh.world.size)
    (batch,), _ = distribute(own, mesh, policy.shape, spec)
    return batch


def sides(
    policy: Policy,
    rollouts: Sequence[Rollout],
    forced: Sequence[Forced],
    mesh: Mesh,
    *,
    tokens: int,
    different: Sequence[str] = (),
) -> Parting:
    """Score rollouts with the engine's routes and with live ones, and put all side by side.

    All ranks must call. Arguments as of `packed` and `Parting`.
    """
    pairs = zip(rollouts, forced, strict=True)
    changed = [replace(one, routed_experts=each.routed_experts) for one, each in pairs]
    captured = forced[0].routed_experts.shape[1] > 0
    batch = packed(changed, policy, mesh, tokens=tokens, captured=captured)
    modes: dict[str, Mode] = (
        {"replay": "replay", "live": "record"} if captured else {"live": "live"}
    )
    passes = {name: policy.score(batch.micro_batches, mode=mode) for name, mode in modes.items()}
    scores = by_rollout(rollouts, batch.micro_batches, passes, mesh)
    return Parting.of(
        rollouts,
        forced,
        [each["logprobs_replay" if captured else "logprobs_live"] for each in scores],
        [
            each.get("routes_live", one.routed_experts)
            for each, one in zip(scores, changed, strict=True)
        ],
        policy.shape,
        different,
    )


@dataclass(frozen=True, kw_only=True)
class Parting:
    """A dump, the engine and the policy side by side: tokens of all rollouts end to end.

    N tokens whose next token was sampled; L MoE layers; K experts.

    Attributes:
        names: of the rollouts.
        rollout_N: index of the rollout.
        position_N: position in the conversation.
        delta_N: log-probability of the policy with the engine's routes, less the engine's.
        dump_delta_N: the engine's log-probability less the dump's.
        engine_NLK, dump_NLK, policy_NLK: experts that the engine chose, those of the dump, and
            those that the policy's routers choose by themselves; sorted. L is 0 without routes.
        shape: sizes of the model.
        different: weights of the engine that are not the policy's.
    """

    names: tuple[str, ...]
    rollout_N: np.ndarray
    position_N: np.ndarray
    delta_N: np.ndarray
    dump_delta_N: np.ndarray
    engine_NLK: np.ndarray
    dump_NLK: np.ndarray
    policy_NLK: np.ndarray
    shape: ModelShape
    different: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        rollouts: Sequence[Rollout],
        forced: Sequence[Forced],
        logprobs: Sequence[np.ndarray],
        live: Sequence[np.ndarray],
        shape: ModelShape,
        different: Sequence[str] = (),
    ) -> Parting:
        """Put side by side what was found for each rollout.

        Args:
            rollouts: the dump.
            forced: what the engine returned.
            logprobs: of the policy with the engine's routes, at the tokens, [T].
            live: experts of the policy without replay, [T-1, L, K].
            shape: sizes of the model.
            different: weights of the engine that are not the policy's.
        """
        rows = [np.flatnonzero(each.loss_mask_T[1:]) for each in rollouts]

        def column(values: Sequence[np.ndarray]) -> np.ndarray:
            return np.concatenate([v[r] for v, r in zip(values, rows, strict=True)])

        def experts(values: Sequence[np.ndarray]) -> np.ndarray:
            return np.sort(column(values), axis=-1)

        ours = column([each[1:] for each in logprobs])
        engines = column([each.logprobs_T[1:] for each in forced])
        return cls(
            names=tuple(each.name for each in rollouts),
            rollout_N=np.repeat(np.arange(len(rows)), [len(r) for r in rows]),
            position_N=np.concatenate(rows),
            delta_N=ours - engines,
            dump_delta_N=engines - column([each.logprobs_T[1:] for each in rollouts]),
            engine_NLK=experts([each.routed_experts for each in forced]),
            dump_NLK=experts([each.routed_experts for each in rollouts]),
            policy_NLK=experts(live),
            shape=shape,
            different=tuple(different),
        )

    @property
    def first_N(self) -> np.ndarray:
        """Place of the first layer in which policy and engine choose other experts; L: none.

        What follows the first one may follow from it.
        """
        differs_NL = (self.policy_NLK != self.engine_NLK).any(-1)
        none_N = ~differs_NL.any(-1) if differs_NL.shape[1] else np.ones(len(differs_NL), bool)
        first_N = differs_NL.argmax(-1) if differs_NL.shape[1] else np.zeros(len(none_N), int)
        return np.where(none_N, differs_NL.shape[1], first_N)

    def by_position(self) -> dict[str, tuple[float, float]]:
        """Mean |D| and share of tokens whose experts differ, per range of `POSITIONS`."""
        place_N = np.searchsorted(POSITIONS, self.position_N, side="right") - 1
        found = {}
        for i, start in enumerate(POSITIONS):
            if (here := place_N == i).sum() >= _FEWEST:
                end = POSITIONS[i + 1] if i + 1 < len(POSITIONS) else "up"
                parted = self.first_N[here] < self.engine_NLK.shape[1]
                found[f"{start}-{end}"] = float(abs(self.delta_N[here]).mean()), parted.mean()
        return found

    def parts_first(self, *, exact: bool) -> int:
        """Place of the first layer whose router chooses otherwise for more tokens than rounding
        explains; L: none.

        Args:
            exact: both compute in float32.
        """
        layers = self.engine_NLK.shape[1]
        shares = np.bincount(self.first_N, minlength=layers + 1)[:layers] / len(self.first_N)
        beyond = np.flatnonzero(shares > _rounding(exact)[1])
        return int(beyond[0]) if len(beyond) else layers

    def by_expert(self, place: int) -> list[tuple[int, float, float]]:
        """Experts of a layer whose tokens part more often than others: (expert, own, others').

        A token parts if the next router chooses otherwise for it; after the last one, by the size
        of log |D|. One expert is taken at a time, and its tokens are left out for the next.
        """
        if place + 1 < self.engine_NLK.shape[1]:
            value_N = (self.first_N == place + 1).astype(np.float64)
        else:
            value_N = np.log(abs(self.delta_N) + 1e-9).astype(np.float64)
        uses_EN = [
            (self.engine_NLK[:, place] == expert).any(-1)
            for expert in range(self.shape.num_experts)
        ]
        left_N = np.ones(len(value_N), bool)
        found: list[tuple[int, float, float]] = []
        while True:
            best: tuple[float, int, float, float] = (_SIGMAS, -1, 0.0, 0.0)
            for expert, uses_N in enumerate(uses_EN):
                own, others = value_N[uses_N & left_N], value_N[~uses_N & left_N]
                if min(len(own), len(others)) < _FEWEST:
                    continue
                error = np.sqrt(own.var() / len(own) + others.var() / len(others)) + 1e-9
                sigmas = float((own.mean() - others.mean()) / error)
                best = max(best, (sigmas, expert, float(own.mean()), float(others.mean())))
            _, expert, own_mean, others_mean = best
            if expert < 0:
                return found
            found.append((expert, own_mean, others_mean))
            left_N &= ~uses_EN[expert]

    def shifted(self) -> Iterator[str]:
        """Rollouts whose dumped routes are the engine's of a neighbouring token, or of none."""
        for i, name in enumerate(self.names):
            own = np.flatnonzero(self.rollout_N == i)
            dump, engine = self.dump_NLK[own], self.engine_NLK[own]
            if len(own) < _FEWEST or not dump.size:
                continue
            alike = _alike(dump, engine)
            before, after = _alike(dump[1:], engine[:-1]), _alike(dump[:-1], engine[1:])
            if alike < _ALIKE and max(before, after) > alike + _SHIFTED:
                which = "before" if before > after else "after"
                yield (
                    f"rollout {name}: its dumped routes are those of the token {which} "
                    f"({max(before, after):.0%} of the slots; {alike:.0%} in their own place)"
                )

    def findings(self, *, exact: bool) -> list[str]:
        """Say what the places of the differences mean; empty if they are what rounding leaves.

        Args:
            exact: both compute in float32.
        """
        found = list(self.shifted())
        if self.different:
            names = ", ".join(self.different[:8])
            found.append(
                f"{len(self.different)} tensors of the engine are not the policy's: {names}"
            )
        layers, size = self.engine_NLK.shape[1], float(abs(self.delta_N).mean())
        largest, parted = _rounding(exact)
        place = self.parts_first(exact=exact)
        layer = self.shape.moe_layers[place] if place < layers else -1
        share = float((self.first_N < layers).mean())
        if size < largest:
            if share > 2 * parted:
                found.append(
                    f"policy and engine choose other experts for {share:.1%} of the tokens"
                    + (f", first in layer {layer}" if place < layers else "")
                    + ", and with the same experts compute the same: compare the router's bias, "
                    "and the types of its bias and logits"
                )
            return found
        if grown := growth({name: mean for name, (mean, _) in self.by_position().items()}):
            return [*found, grown]
        experts = self.by_expert(place - 1) if place else []
        # More of them are no exchange: their tokens differ for a reason that is not theirs.
        if 0 < len(experts) <= max(2, self.shape.num_experts // 4):
            before = self.shape.moe_layers[place - 1]
            names = ", ".join(str(expert) for expert, *_ in experts)
            found.append(
                f"layer {before}, experts {names}: their tokens part behind this layer, those of "
                "others seldom: their weights differ, or their order"
            )
        else:
            where = (
                f"something before the router of layer {layer} differs: compare config.json of "
                "both, then attention, norms and experts there"
                if place < layers
                else "every router chooses the same: compare rollout.temperature, then the output "
                "layer and what follows the last router"
            )
            found.append(f"mean |D| is {size:.1e} at all positions alike, and {where}")
        return found

    def table(self) -> list[str]:
        """Aligned lines: engine and policy by layer, position and experts."""
        layers, first_N = self.engine_NLK.shape[1], self.first_N
        lines = [
            f"engine now against the dump    mean |D| {abs(self.dump_delta_N).mean():.2e}"
            + (f", same experts in {_alike(self.engine_NLK, self.dump_NLK):.2%}" if layers else ""),
            f"policy against engine now      mean |D| {abs(self.delta_N).mean():.2e}, "
            f"k3 {(np.expm1(self.delta_N) - self.delta_N).mean():.2e} with the engine's experts",
            *(
                f"  position {name:>12s}        mean |D| {mean:.2e}"
                + (f", other experts for {parted:.2%} of the tokens" if layers else "")
                for name, (mean, parted) in self.by_position().items()
            ),
        ]
        for place in range(layers):
            share = float((first_N == place).mean())
            name = self.shape.moe_layers[place]
            lines.append(f"  layer {name:15d}        other experts first here: {share:.2%}")
        return lines


def _rounding(exact: bool) -> tuple[float, float]:
    """Largest mean |D|, and largest share of tokens that part first in a layer, by rounding.

    Measured with the embedded model: 1e-6 and none in float32, 1e-2 and 1 % in bfloat16.
    """
    return (1e-4, 0.002) if exact else (0.05, 0.03)


def _alike(one: np.ndarray, other: np.ndarray) -> float:
    """Share of slots with the same set of experts; nan without slots."""
    return float((one == other).all(-1).mean()) if one.size else float("nan")
