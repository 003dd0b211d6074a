"""The tokens that top-k and top-p left, taken from vLLM's sampler (`r3.algo.sampling_mask`).

vLLM's own `return_sampling_mask` is not used: it needs Model Runner V2, where R3 captures no routes
and which does not exist on CPU. The sampler of V1 computes log-probabilities after all filters,
which are -inf at tokens that it did not keep. A number of the set travels with the log-probability
of the sampled token, so that vLLM itself keeps both with their token: under preemption, chunks and
batches that are scheduled ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


class KeptTokens:
    """Sets of tokens by number, from an engine's sampler.

    Attributes:
        wanted: `SamplingParams.logprobs` of a request whose sets are wanted; 0 of others.
    """

    wanted = 1

    def __init__(self, llm: Any) -> None:
        """Set the hook in an engine (vLLM's `LLM`)."""
        (runner,) = llm.collective_rpc(lambda worker: worker.model_runner)
        self._gather = runner.sampler.gather_logprobs
        self._runner = runner
        self._sets: list[np.ndarray] = []
        runner.sampler.gather_logprobs = self._with_numbers

    def _with_numbers(
        self, logprobs_BV: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor
    ) -> Any:
        """Gather the sampled token's log-probability, and beside it the number of its set."""
        gathered = self._gather(logprobs_BV, 0, token_ids)
        if num_logprobs != self.wanted:
            return gathered
        batch = self._runner.input_batch
        assert len(batch.req_ids) == len(logprobs_BV), "a row of a batch is one request"
        wants = [batch.num_logprobs.get(name) == self.wanted for name in batch.req_ids]
        rows = torch.tensor(wants, device=logprobs_BV.device).nonzero()[:, 0]
        is_kept = logprobs_BV[rows] > -torch.inf
        numbers = torch.full_like(gathered.logprob_token_ids, -1)
        first = len(self._sets)
        numbers[rows, 0] = torch.arange(
            first, first + len(rows), dtype=numbers.dtype, device=numbers.device
        )
        ids = is_kept.nonzero()[:, 1].int().cpu().numpy()
        borders = is_kept.sum(1).cumsum(0).cpu().numpy()
        self._sets += np.split(ids, borders[:-1])
        return gathered._replace(
            logprob_token_ids=torch.cat([gathered.logprob_token_ids, numbers], 1),
            logprobs=gathered.logprobs.expand(-1, 2),
        )

    def take(self, logprobs: Any) -> tuple[list[float], list[np.ndarray]]:
        """Return the log-probabilities of a request's tokens, and the set of each.

        Args:
            logprobs: vLLM's `FlatLogprobs`, two entries per token.
        """
        numbers: Sequence[int] = logprobs.token_ids[1::2]
        assert min(numbers) >= 0, "a token was sampled without its set"
        return list(logprobs.logprobs[::2]), [self._sets[number] for number in numbers]

    def clear(self) -> None:
        """Forget all sets. No request may be in flight."""
        self._sets.clear()
