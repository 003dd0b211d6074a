"""Sampling masks: the policy over the tokens that the engine kept.

With `rollout.top_k` and `rollout.top_p` the engine keeps a set S_t of tokens and draws x_t of it:

    mu(x_t) = exp(z(x_t) / temperature) / sum over v in S_t of exp(z(v) / temperature)

R3 takes S_t from the engine and renormalises the policy over it in the same way (Keep Sampling
Mask: DeepSeek-V3.2, arXiv 2512.02556, section 3.1). A policy over the whole vocabulary would differ
from the engine by log pi(S_t) in every token, with equal weights.

S_t is the same in all passes: updates, old log-probabilities, live routes, reference and teachers.
Ratios and KL compare distributions over the same tokens, and estimators of the KL keep their
expectation: over the whole vocabulary, that of k3 would be off by pi_ref(S_t) - 1. Entropy is that
of the renormalised policy. Logits outside S_t have no gradient.

Sets are ragged: a count per token, and ids of four bytes one after the other. `rollout.top_k`
bounds a count; only tokens as likely as the last of them come on top.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from r3.types import Rollout

EMPTY = np.zeros(0, np.int32)


def check_mask(rollout: Rollout, name: str, *, required: bool) -> None:
    """Raise ValueError unless each sampled token is among those that were kept for it.

    Args:
        name: of the rollout, for the message.
        required: a rollout without sets is refused.
    """
    mask = rollout.sampling_mask
    if mask is None:
        if required and rollout.loss_mask_T.any():
            raise ValueError(
                f"{name}: it has no sampling mask, and rollout.top_k restricts what is sampled"
            )
        return
    if mask.counts_T.sum() != len(mask.token_ids):
        raise ValueError(
            f"{name}: its sampling mask counts {mask.counts_T.sum()} tokens and has "
            f"{len(mask.token_ids)}"
        )
    owner = np.repeat(np.arange(len(mask.counts_T)), mask.counts_T)
    is_drawn = mask.token_ids == rollout.tokens_T[owner]
    drawn_T = np.bincount(owner[is_drawn], minlength=len(mask.counts_T))
    wrong = (drawn_T != rollout.loss_mask_T) | ((mask.counts_T > 0) != (drawn_T > 0))
    if wrong.any():
        token = int(wrong.argmax())
        kept = mask.token_ids[owner == token].tolist()
        raise ValueError(
            f"{name}: its sampling mask is of other tokens: of token {token}, "
            f"{'' if rollout.loss_mask_T[token] else 'not '}sampled, which is "
            f"{rollout.tokens_T[token]}, it kept {len(kept)}: {kept[:8]}"
        )


def of_rows(
    counts_N: torch.Tensor, ids: torch.Tensor, rows: slice | torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return counts and ids of some rows."""
    first_N = counts_N.cumsum(0) - counts_N
    counts, first = counts_N[rows], first_N[rows]
    shift = torch.repeat_interleave(first - (counts.cumsum(0) - counts), counts)
    return counts, ids[torch.arange(len(shift)) + shift]


@dataclass(frozen=True)
class KeptColumns:
    """The columns of logits that rows keep, in this rank's slice of the vocabulary.

    Attributes:
        starts: for each row its first place in `rows_M` and `columns_M`; then their length.
        rows_M, columns_M: a row, and a column that it keeps.
        is_restricted_N: false at rows that keep all.
    """

    starts: tuple[int, ...]
    rows_M: torch.Tensor
    columns_M: torch.Tensor
    is_restricted_N: torch.Tensor

    @classmethod
    def of(
        cls,
        counts_N: torch.Tensor,
        ids: torch.Tensor,
        *,
        first: int,
        size: int,
        device: torch.device,
    ) -> KeptColumns:
        """Select the columns of the slice `first` to `first + size - 1` of the vocabulary."""
        rows_M = torch.repeat_interleave(torch.arange(len(counts_N)), counts_N)
        mine = (ids >= first) & (ids < first + size)
        rows_M, columns_M = rows_M[mine], ids[mine] - first
        own_N = torch.bincount(rows_M, minlength=len(counts_N))
        return cls(
            starts=(0, *own_N.cumsum(0).tolist()),
            rows_M=rows_M.int().to(device),
            columns_M=columns_M.to(device),
            is_restricted_N=(counts_N > 0).to(device),
        )

    def restrict(self, logits_NV: torch.Tensor, rows: slice, elsewhere: float) -> None:
        """Set the other columns of some rows to a value, in place.

        Args:
            logits_NV: of these rows.
            rows: which ones they are.
        """
        stop = rows.start + len(logits_NV)
        part = slice(self.starts[rows.start], self.starts[stop])
        at: Any = (self.rows_M[part] - rows.start, self.columns_M[part])
        kept = logits_NV[at]
        logits_NV.masked_fill_(self.is_restricted_N[rows.start : stop, None], elsewhere)
        logits_NV[at] = kept
