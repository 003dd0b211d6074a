"""The data types of R3, from the data set to the optimizer, with their shapes and alignment.

Shape letters, one legend for the whole package. A suffix of a name gives its shape, as in
`tokens_T` and `routed_experts_NLK`:

    P prompts           G samples per prompt (a group)       R rollouts (P * G)
    T tokens of one sequence    N packed tokens of a micro-batch    V vocabulary    D hidden size
    L MoE layers        K experts per token                  E experts

Alignment. A rollout has the sequence as it was sampled; a micro-batch has it as it is trained.
`r3.algo.packing` is the only place that shifts one into the other:

    rollout       index t     0     1     2     3     4
                  tokens_T    x0    x1    x2    x3    x4
                  loss_mask_T 0     0     1     1     1        1 = x_t was sampled
                  logprobs_T  0     0     p2    p3    p4       p_t = log-prob of x_t when sampled
                  kept        -     -     S2    S3    S4       S_t = tokens x_t could be (top-k)
                  routes      e0    e1    e2    e3    (none)   e_t = experts that processed x_t

    micro-batch   index t     0     1     2     3     4        all about predicting x_{t+1} is at t
                  tokens_N    x0    x1    x2    x3    x4
                  targets_N   x1    x2    x3    x4    -        the last position predicts nothing
                  loss_mask   0     1     1     1     0
                  logprobs    0     p2    p3    p4    0
                  kept        -     S2    S3    S4    -
                  routes      e0    e1    e2    e3    -1       -1 = not captured: routed live

The engine never processes the last sampled token: it has no routes, and nothing is trained at it.
A route that was not captured is -1 in every slot of its row, never a legal expert id, so that a
lost row cannot be taken for expert 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from r3.errors import Explained

if TYPE_CHECKING:
    # For annotations only: worker processes import prompts without importing torch.
    import torch

Message = Mapping[str, Any]
"""One chat message: {"role": ..., "content": ...}."""

Key = tuple[int, int, int]
"""Group, sample index and sequence of a rollout."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One question, tokenised once.

    Attributes:
        id: names the row of its data set; the same in all runs, ranks and epochs.
        messages: the conversation so far.
        tokens_T: the conversation in the chat template, with the generation prompt.
        answer: the reference answer; empty if the row has none.
        answers: all accepted answers, if the row lists several; `answer` is the first.
        metadata: other columns of the row, for rewards and environments.
        spans: (first, end) of the tokens to learn in supervised training, where `tokens_T` is the
            whole conversation; empty otherwise.
        tools: JSON schemas that its tokens show: those of its row, else of the environment.
    """

    id: str
    messages: tuple[Message, ...]
    tokens_T: tuple[int, ...]
    answer: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    spans: tuple[tuple[int, int], ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    answers: tuple[str, ...] = ()

    @property
    def accepted(self) -> tuple[str, ...]:
        """The accepted answers, at least one."""
        return self.answers or (self.answer,)


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingMask:
    """The tokens that the engine kept for each token of a rollout, of which it drew one.

    Attributes:
        counts_T: how many; 0 where nothing was sampled, int32.
        token_ids: those of the first token, then those of the next, int32.
    """

    counts_T: np.ndarray
    token_ids: np.ndarray


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """One sampled response with its log-probabilities and routes.

    A workflow's episode is one or several of them, its sequences: they share group and sample
    index.

    Example: a prompt of 3 tokens and a response of 2 have T = 5, `loss_mask_T` = 0 0 0 1 1 and 4
    rows of routes.

    Attributes:
        prompt_id: `Prompt.id` of its prompt.
        group: index of the prompt in the step; rollouts of one group share a baseline.
        sample_index: index of the sample inside its group, 0 .. G-1.
        tokens_T: prompt and response ids, int64.
        loss_mask_T: 1 where the policy sampled the token (float32), 0 elsewhere.
        logprobs_T: log-probability of each sampled token under the distribution it was drawn from,
            0 elsewhere, float32.
        routed_experts: experts that processed positions 0 .. T-2 in the MoE layers, [T-1, L, K], in
            the smallest signed integer type; [T-1, 0, 0] for a dense model.
        finish_reason: "stop"; "length" (the last message was truncated, or there was no room for
            another one). Conversations with an environment also have "turns" (env.max_turns),
            "error" (the environment failed) and "aborted" (the last call was given up).
        policy_version: training steps behind the weights that sampled it; the oldest, if several.
        segments: ((first token, policy version), ...) if several versions sampled it in turn
            (partial rollouts). Tokens from the first token on are of that version, and so are the
            routes from the row before it. Empty: all of it is of `policy_version`.
        response: the model's last message, decoded, for rewards, dumps and people.
        messages: the whole conversation with an environment; empty for a prompt and one response.
        turn_rewards: reward of the environment after each turn, None where it gave none.
        metrics: what its environment and its reward functions reported, by full names.
        sequence: index among the sequences of its episode, in the order in which they began.
        own_reward: whether its reward is of this sequence alone (a workflow that rewards each
            call), and not of its whole episode. None if a workflow's episode is unfinished or
            failed: then it is as in the other episodes of the step.
        sampling_mask: what `rollout.top_k` and `rollout.top_p` left; None: the whole vocabulary.
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
    metrics: Mapping[str, float] = field(default_factory=dict)
    sequence: int = 0
    own_reward: bool | None = False
    sampling_mask: SamplingMask | None = None

    def __post_init__(self) -> None:
        tokens = len(self.tokens_T)
        lengths = [len(self.loss_mask_T), len(self.logprobs_T), self.routed_experts.shape[0] + 1]
        if self.sampling_mask:
            lengths.append(len(self.sampling_mask.counts_T))
        if any(length != tokens for length in lengths):
            raise AssertionError(
                f"rollout {self.name}: {tokens} tokens, but loss mask, "
                f"log-probabilities, routes + 1 and sampling mask have {lengths}"
            )

    @property
    def name(self) -> str:
        """Prompt, sample and, after the first, sequence, for messages."""
        sequence = f"/{self.sequence}" if self.sequence else ""
        return f"{self.prompt_id}/{self.sample_index}{sequence}"

    @property
    def key(self) -> Key:
        """Group, sample index and sequence: unique in a step, whose samples are in this order."""
        return (self.group, self.sample_index, self.sequence)

    @classmethod
    def unsampled(
        cls, row: Prompt, tokens_T: np.ndarray, mask_T: np.ndarray, *, group: int = 0, step: int = 0
    ) -> Rollout:
        """A response that was given, not sampled: log-probabilities are 0, and there are no routes.

        Args:
            row: its answer is the response.
            tokens_T: prompt and response, int64.
            mask_T: 1 at the response, float32.
            group: index of the row in the step.
            step: training steps behind the policy.
        """
        return cls(
            prompt_id=row.id,
            group=group,
            sample_index=0,
            tokens_T=tokens_T,
            loss_mask_T=mask_T,
            logprobs_T=np.zeros_like(mask_T),
            routed_experts=np.zeros((len(tokens_T) - 1, 0, 0), np.int8),
            finish_reason="stop",
            policy_version=step,
            response=row.answer,
        )

    @property
    def is_truncated(self) -> bool:
        """Whether its last message was truncated, or had no room for another one after it."""
        return self.finish_reason == "length"

    @property
    def num_response_tokens(self) -> int:
        """Tokens that the policy sampled."""
        return int(self.loss_mask_T.sum())

    @property
    def num_tokens_after_prompt(self) -> int:
        """Tokens that the limit of a response counts: sampled tokens and observations."""
        sampled = np.flatnonzero(self.loss_mask_T)
        return len(self.tokens_T) - int(sampled[0]) if len(sampled) else 0

    @property
    def policy_versions(self) -> tuple[int, ...]:
        """Policy versions that sampled it, oldest first."""
        return tuple(policy_version for _, policy_version in self.segments) or (
            self.policy_version,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A rollout with its reward.

    Attributes:
        reward: as reward functions and environments gave it; 0 for rows that are learned.
        parts: the value of each reward function that was called.
    """

    rollout: Rollout
    reward: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Whole sequences packed end to end for one forward and backward pass, aligned as drawn above.

    Under context parallelism a rank computes a part of it, which is one too: N / cp tokens, with a
    part of every sequence (`r3.layers.layout.local_tokens`).

    Attributes:
        positions_N: position of each token in its sequence.
        cu_seqlens: borders of the sequences, on the host: reading must not wait for the device.
        sampled_N: true where the policy sampled the target, whether it has loss or not.
        sequence_weights_N: 1 / (loss tokens of the sequence) at its loss tokens, 0 elsewhere.
        routed_experts_NLK: routes of the MoE layers of the rank's pipeline stage, or of all, in the
            smallest signed integer type.
        real_N: true at tokens of rollouts, false at filler.
        current_N: false on rollouts that an older policy version than the step's started; policy
            and engine cannot be compared there.
        advantages_N: advantage of each token's rollout where there is loss; 0 until
            `packing.with_advantages` sets them.
        rollout_ids: index of each sequence among the rollouts of the step, which are in the order
            of their keys; -1 for filler, which has no loss.
        prompt_ids: `Rollout.prompt_id` of each sequence, "" for filler.
        kept_counts_N: how many tokens the engine kept for each target; 0: the whole vocabulary.
        kept_ids: these tokens, target by target, int32.
        num_loss_tokens, num_sequences: loss tokens, and sequences with loss tokens, of the whole
            update, over all ranks. Losses are divided by these counts, never by local ones, so that
            results do not depend on the layout. 0 until `packing.as_batch` sets them: there is no
            loss then.
    """

    tokens_N: torch.Tensor
    targets_N: torch.Tensor
    positions_N: torch.Tensor
    cu_seqlens: tuple[int, ...]
    loss_mask_N: torch.Tensor
    sampled_N: torch.Tensor
    rollout_logprobs_N: torch.Tensor
    advantages_N: torch.Tensor
    sequence_weights_N: torch.Tensor
    routed_experts_NLK: torch.Tensor
    real_N: torch.Tensor
    current_N: torch.Tensor
    rollout_ids: tuple[int, ...]
    prompt_ids: tuple[str, ...]
    kept_counts_N: torch.Tensor
    kept_ids: torch.Tensor
    num_loss_tokens: int = 0
    num_sequences: int = 0

    @property
    def num_tokens(self) -> int:
        """Packed tokens, fillers included."""
        return int(self.tokens_N.shape[0])

    @property
    def captured_N(self) -> torch.Tensor:
        """True where the token's route was captured: neither missing (-1) nor filler, bool [N]."""
        # No routes were captured, or the stage has no MoE layers.
        if not self.routed_experts_NLK.numel():
            return self.real_N.new_zeros(self.num_tokens)
        return (self.routed_experts_NLK >= 0).flatten(1).all(1) & self.real_N


Batch = tuple[MicroBatch, ...]
"""What one optimizer step trains on, on this data-parallel rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """The result of one optimizer step.

    Attributes:
        grad_norm: norm of all gradients before clipping.
        router_grad_norm: norm of the routers' gradients before clipping.
        lr: learning rate.
    """

    grad_norm: float
    router_grad_norm: float
    lr: float


class RouteError(Explained):
    """Routes must not be replayed: incomplete, illegal, of other tokens or of other weights."""
