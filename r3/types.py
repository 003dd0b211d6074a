"""The nouns of `r3`: what flows from the data set to the optimizer, in which shape, aligned to which token.

Shape letters, one legend for the whole package (a suffix of a name gives its shape: `tokens_T`, `routed_experts_NLK`):

    P prompts          G members of a group (answers per prompt)     R rollouts (P * G)
    T tokens of one sequence       N packed tokens of a micro-batch  V vocabulary    D hidden size
    L MoE layers       K experts per token                           E experts

Alignment. A rollout holds the sequence as it was sampled; a micro-batch holds it as it is trained. `packing` is the
only place that shifts one into the other:

    rollout       index t     0     1     2     3     4            tokens_T        x0 x1 x2 x3 x4
                  tokens_T    x0    x1    x2    x3    x4           loss_mask_T      0  0  1  1  1   (1 = x_t was sampled)
                  logprobs_T  0     0     p2    p3    p4           p_t = log-prob of x_t when it was sampled
                  routes      e0    e1    e2    e3    (none)       e_t = experts that processed x_t, T-1 rows

    micro-batch   index t     0     1     2     3     4            everything about predicting x_{t+1} sits at t
                  tokens_N    x0    x1    x2    x3    x4
                  targets_N   x1    x2    x3    x4    -            the last position predicts nothing: mask 0
                  loss_mask   0     1     1     1     0
                  logprobs    0     p2    p3    p4    0
                  routes      e0    e1    e2    e3    -1           -1 = not captured; the router chooses for itself

The last sampled token was never processed by the engine, so it has no routes, and nothing is trained at it. A route
that was not captured is -1 in every slot of its row, never a legal expert id: a lost row can then never pass for expert 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch  # named only: worker processes take prompts without paying for torch

Message = Mapping[str, Any]  # one chat message: {"role": ..., "content": ...}


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One question, tokenised once. `id` is stable across runs, ranks and epochs: it names the row of its data set."""

    id: str
    messages: tuple[Message, ...]
    tokens_T: tuple[int, ...]
    answer: str
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """One sampled answer with what the engine did for it.

    Example: a prompt of 3 tokens answered with 2 has T = 5, `loss_mask_T` = 0 0 0 1 1 and 4 rows of routes.

    Attributes:
        prompt_id: the `Prompt.id` it answers.
        group: index of the prompt in the step; rollouts of one group share a baseline.
        sample_index: index of the sample inside its group, 0 .. G-1.
        tokens_T: prompt and response ids, int64.
        loss_mask_T: 1 where the policy sampled the token (float32), 0 elsewhere.
        logprobs_T: log-probability of each sampled token under the distribution it was drawn from, 0 elsewhere, float32.
        routed_experts: experts that processed positions 0 .. T-2 in the MoE layers, [T-1, L, K]; the smallest signed
            integer type that fits; empty [T-1, 0, 0] for a dense model.
        finish_reason: "stop"; "length" (the last message was cut, or no room was left for another); of conversations with an
            environment also "turns" (env.max_turns) and "error" (the environment failed).
        policy_version: the step whose weights sampled it; the oldest one, if several did.
        segments: ((first token, version), ...) where several versions sampled it in turn (rollout.step_token_budget): tokens
            from the first one on came under that version, and so did the routes from the row before it, which led to it.
            Empty: all of `version`.
        response: the model's last message, decoded, for rewards, dumps and people.
        messages: the whole conversation, if an environment held it; empty if it is the prompt and one response.
        turn_rewards: reward that the environment gave after each turn, None where it gave none.
    """

    prompt_id: str
    group: int
    sample_index: int
    tokens_T: np.ndarray
    loss_mask_T: np.ndarray
    logprobs_T: np.ndarray
    routed_experts: np.ndarray
    finish_reason: str
    policy_version: int
    response: str
    segments: tuple[tuple[int, int], ...] = ()
    messages: tuple[Message, ...] = ()
    turn_rewards: tuple[float | None, ...] = ()

    def __post_init__(self) -> None:
        tokens = len(self.tokens_T)
        lengths = (len(self.loss_mask_T), len(self.logprobs_T), self.routed_experts.shape[0] + 1)
        if any(length != tokens for length in lengths):
            raise AssertionError(
                f"rollout {self.prompt_id}/{self.sample_index}: {tokens} tokens, but loss mask, logprobs and routes + 1 "
                f"have {lengths}"
            )

    @property
    def num_response_tokens(self) -> int:
        """Tokens the policy sampled."""
        return int(self.loss_mask_T.sum())

    @property
    def num_tokens_after_prompt(self) -> int:
        """Tokens that `rollout.max_response_tokens` limits: the sampled ones and the observations between them."""
        sampled = np.flatnonzero(self.loss_mask_T)
        return len(self.tokens_T) - int(sampled[0]) if len(sampled) else 0

    @property
    def policy_versions(self) -> tuple[int, ...]:
        """Policy versions that sampled it, oldest first."""
        return tuple(policy_version for _, policy_version in self.segments) or (
            self.policy_version,
        )

    def num_stale_tokens(self, policy_version: int) -> int:
        """Tokens that older versions than this one sampled."""
        first = next(
            (token for token, sampler in self.segments if sampler >= policy_version),
            len(self.tokens_T),
        )
        if not self.segments and self.policy_version >= policy_version:
            return 0
        return int(self.loss_mask_T[:first].sum())


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Whole sequences packed end to end for one forward and backward pass; alignment as drawn above.

    `cu_seqlens` are the sequence borders (int32, on the host: reading them must not wait for the device), `rollout_ids`
    the index of each sequence in the step's list of rollouts, -1 for a filler sequence that carries no loss.
    `routed_experts_NLK` holds the MoE layers of the rank's pipeline stage, or all of the model's, in the smallest type.
    `sequence_weights_N` is 1 / (loss tokens of the sequence) at its loss tokens, 0 elsewhere; `real_N` is true on tokens of
    rollouts and false on filler. `current_N` is false on rollouts that an older version than the step's began: policy and
    engine cannot be compared there.
    """

    tokens_N: torch.Tensor
    targets_N: torch.Tensor
    positions_N: torch.Tensor
    cu_seqlens: tuple[int, ...]
    loss_mask_N: torch.Tensor
    rollout_logprobs_N: torch.Tensor
    advantages_N: torch.Tensor
    sequence_weights_N: torch.Tensor
    routed_experts_NLK: torch.Tensor
    real_N: torch.Tensor
    current_N: torch.Tensor
    rollout_ids: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Packed tokens, fillers included."""
        return int(self.tokens_N.shape[0])

    @property
    def captured_N(self) -> torch.Tensor:
        """True where the experts that processed the token were captured: neither missing (-1) nor of a filler."""
        if not self.routed_experts_NLK.numel():  # none captured, or a stage without MoE layers
            return self.real_N.new_zeros(self.num_tokens)
        return (self.routed_experts_NLK >= 0).flatten(1).all(1) & self.real_N


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """What one optimizer step consumes on this data-parallel rank, with denominators that are global.

    `num_loss_tokens` and `num_sequences` (those with loss tokens) count over every rank: losses are divided by them, never
    by a local mean, so results do not depend on the layout.
    """

    micro_batches: tuple[MicroBatch, ...]
    num_loss_tokens: int
    num_sequences: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """What one optimizer step reports. `metrics` are this rank's partials, still to be reduced over ranks."""

    grad_norm: float
    router_grad_norm: float
    lr: float
    metrics: Mapping[str, Any]


class RouteError(RuntimeError):
    """Routes that must not be replayed: incomplete, illegal, of other tokens or of other weights."""
