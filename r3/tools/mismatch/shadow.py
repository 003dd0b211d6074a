"""Some tokens of a step's first update with live routes too (`replay.shadow_every`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from r3.algo.sampling_mask import of_rows
from r3.layers.layout import local_rows
from r3.metrics.reduce import Mean, Partial, mismatch
from r3.policy.policy import Policy
from r3.policy.updates import panel_of
from r3.types import MicroBatch

_COMPARED = ("k3", "f2", "abs_p99", "abs_max")


def shadow(*tokens: torch.Tensor) -> dict[str, Partial]:
    """The metrics of `mismatch` that the passes with replayed and with live routes compare."""
    panel = mismatch(*tokens)
    return {key: panel[key] for key in _COMPARED}


@dataclass(kw_only=True)
class ShadowSample:
    """Tokens of one micro-batch of the first update, with live routes and with replayed ones.

    They show what replay changes in this run. The replayed scores are those of the update itself.

    Attributes:
        number: of the micro-batch.
        is_sampled_N: 1 at the sampled tokens among those of it that this rank computes.
        live: metrics with live routes.
        replayed: log-probabilities of update and engine, and 1 at tokens to compare, each [N].
    """

    number: int
    is_sampled_N: torch.Tensor
    live: dict[str, Any]
    replayed: tuple[torch.Tensor, ...] = ()

    def keep(self, number: int, tokens: MicroBatch, logprobs_N: torch.Tensor) -> None:
        """Keep the update's scores of the sampled tokens."""
        if number == self.number:
            compared_N = tokens.loss_mask_N * tokens.current_N * self.is_sampled_N
            self.replayed = (logprobs_N, tokens.rollout_logprobs_N, compared_N)

    def metrics(self, policy: Policy) -> dict[str, Any]:
        """Return partials of both kinds of routes and of the ratio, after the first update."""
        if not policy.reports:
            return {}
        arms = {"replay": shadow(*self.replayed), "live": self.live}
        # Both are over the same tokens: the ratio of sums is the ratio of means.
        live, replay = arms["live"]["k3"], arms["replay"]["k3"]
        return {"mismatch/k3_ratio": Mean(live.total, replay.total)} | {
            f"mismatch/{name}_{arm}": part
            for arm, panel in arms.items()
            for name, part in panel.items()
        }


def shadow_sample(
    policy: Policy, first: Sequence[MicroBatch], tokens: int, *, turn: int
) -> ShadowSample:
    """Score a sample of the first update's tokens with live routes. All ranks must call."""
    number, multiple = turn % len(first), policy.mesh.length_multiples[0]
    part, rows = part_of(first[number], tokens, multiple=multiple, turn=turn)
    is_sampled_N = torch.zeros(first[number].num_tokens)
    is_sampled_N[rows] = 1.0
    own = local_rows(first[number].cu_seqlens, policy.mesh.cp)
    return ShadowSample(
        number=number,
        is_sampled_N=is_sampled_N[own].to(policy.device.torch),
        live=panel_of(policy, policy.score([part], mode="live"), shadow),
    )


def part_of(
    micro_batch: MicroBatch, tokens: int, *, multiple: int, turn: int = 0
) -> tuple[MicroBatch, slice]:
    """Return at least `tokens` consecutive tokens of a micro-batch, from the start of a sequence.

    The last sequence may be cut: attention is causal, so its tokens keep their scores.

    Args:
        micro_batch: the micro-batch.
        tokens: how many tokens are wanted.
        multiple: what the number of tokens is a multiple of (see `Mesh.length_multiples`).
        turn: the part starts at another sequence for another turn.

    Returns:
        The part, and the rows that it has of the micro-batch.
    """
    borders = micro_batch.cu_seqlens
    size = min(-(-tokens // multiple) * multiple, borders[-1])
    fitting = [number for number, at in enumerate(borders[:-1]) if at + size <= borders[-1]]
    first = fitting[turn % len(fitting)]
    start = borders[first]
    inner = [at - start for at in borders[first:] if at < start + size]
    rows = slice(start, start + size)
    of_tokens = {
        name: getattr(micro_batch, name)[rows]
        for name in MicroBatch.__slots__
        if name.endswith(("_N", "_NLK"))
    }
    part = replace(
        micro_batch,
        cu_seqlens=(*inner, size),
        rollout_ids=micro_batch.rollout_ids[first : first + len(inner)],
        prompt_ids=micro_batch.prompt_ids[first : first + len(inner)],
        kept_ids=of_rows(micro_batch.kept_counts_N, micro_batch.kept_ids, rows)[1],
        **of_tokens,
    )
    return part, rows
