"""Where a dump, the engine and the policy part, and what the place of a difference means."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from r3.models.shape import ModelShape
from r3.tools.mismatch.jumps import growth
from r3.types import Rollout

POSITIONS = (0, 64, 256, 1024, 4096, 16384)
"""First positions of the ranges of the table."""
_FEWEST = 16
"""Tokens that a mean needs."""
_ALIKE, _SHIFTED = 0.5, 0.3
"""Slots of other tokens agree in half or fewer; how much better a shift must be."""
_SIGMAS = 4.0
"""Standard errors by which an expert stands out of a hundred."""


@dataclass(frozen=True, kw_only=True)
class Forced:
    """What the engine returned for one rollout, whose tokens it decoded again.

    Attributes:
        logprobs_T: log-probability of every token after the prompt, 0 in the prompt.
        routed_experts: its choice, [T-1, L, K]; [T-1, 0, 0] without capture.
    """

    logprobs_T: np.ndarray
    routed_experts: np.ndarray


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
        rows = [np.flatnonzero(rollout.loss_mask_T[1:]) for rollout in rollouts]

        def column(values: Sequence[np.ndarray]) -> np.ndarray:
            return np.concatenate([v[r] for v, r in zip(values, rows, strict=True)])

        def experts(values: Sequence[np.ndarray]) -> np.ndarray:
            return np.sort(column(values), axis=-1)

        ours = column([logprobs_T[1:] for logprobs_T in logprobs])
        engines = column([rollout.logprobs_T[1:] for rollout in forced])
        return cls(
            names=tuple(rollout.name for rollout in rollouts),
            rollout_N=np.repeat(np.arange(len(rows)), [len(r) for r in rows]),
            position_N=np.concatenate(rows),
            delta_N=ours - engines,
            dump_delta_N=engines - column([rollout.logprobs_T[1:] for rollout in rollouts]),
            engine_NLK=experts([rollout.routed_experts for rollout in forced]),
            dump_NLK=experts([rollout.routed_experts for rollout in rollouts]),
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
        by_range = {}
        for i, start in enumerate(POSITIONS):
            if (here := place_N == i).sum() >= _FEWEST:
                end = POSITIONS[i + 1] if i + 1 < len(POSITIONS) else "up"
                parted = self.first_N[here] < self.engine_NLK.shape[1]
                by_range[f"{start}-{end}"] = float(abs(self.delta_N[here]).mean()), parted.mean()
        return by_range

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
        apart: list[tuple[int, float, float]] = []
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
                return apart
            apart.append((expert, own_mean, others_mean))
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
        lines = list(self.shifted())
        if self.different:
            names = ", ".join(self.different[:8])
            lines.append(
                f"{len(self.different)} tensors of the engine are not the policy's: {names}"
            )
        layers, size = self.engine_NLK.shape[1], float(abs(self.delta_N).mean())
        largest, parted = _rounding(exact)
        place = self.parts_first(exact=exact)
        layer = self.shape.moe_layers[place] if place < layers else -1
        share = float((self.first_N < layers).mean())
        if size < largest:
            if share > 2 * parted:
                lines.append(
                    f"policy and engine choose other experts for {share:.1%} of the tokens"
                    + (f", first in layer {layer}" if place < layers else "")
                    + ", and with the same experts compute the same: compare the router's bias, "
                    "and the types of its bias and logits"
                )
            return lines
        if grown := growth({name: mean for name, (mean, _) in self.by_position().items()}):
            return [*lines, grown]
        experts = self.by_expert(place - 1) if place else []
        # More of them are no exchange: their tokens differ for a reason that is not theirs.
        if 0 < len(experts) <= max(2, self.shape.num_experts // 4):
            before = self.shape.moe_layers[place - 1]
            names = ", ".join(str(expert) for expert, *_ in experts)
            lines.append(
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
            lines.append(f"mean |D| is {size:.1e} at all positions alike, and {where}")
        return lines

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
