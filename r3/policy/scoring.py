"""Score tokens with Megatron's schedule: the part that trained and frozen policies share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.utils import get_attr_wrapped_model
from torch import nn

from r3 import extras
from r3.algo.packing import filler_micro_batch
from r3.layers.attention import packed_params
from r3.layers.layout import depths_ND, local_tokens, router_rows
from r3.models.shape import ModelShape
from r3.routing.ledger import ReplayLedger
from r3.routing.replay import Mode, Replay
from r3.runtime.device import Device
from r3.runtime.mesh import Mesh
from r3.types import MicroBatch


@dataclass(frozen=True, kw_only=True)
class TokenScores:
    """Result of a pass without gradients, for the tokens that this rank computes.

    One tensor per micro-batch, on the device, float32 [N] (N / cp under context parallelism). Empty
    on all but the last pipeline stage.

    Attributes:
        logprobs: log-probability of each target.
        entropy: entropy of the distribution at each position.
        rollout_logprobs, loss_mask, sampled, positions: the micro-batches' values for the same
            tokens.
        compared: 1 at loss tokens that the engine sampled with the policy's present weights. Tokens
            of older policy versions are excluded.
        ledger: what replay did; `ledger.recorded` has the routes if the pass recorded them.
    """

    logprobs: tuple[torch.Tensor, ...]
    entropy: tuple[torch.Tensor, ...]
    rollout_logprobs: tuple[torch.Tensor, ...]
    loss_mask: tuple[torch.Tensor, ...]
    sampled: tuple[torch.Tensor, ...]
    positions: tuple[torch.Tensor, ...]
    compared: tuple[torch.Tensor, ...]
    ledger: ReplayLedger


class ScoringPolicy:
    """A Megatron shard that scores tokens.

    Attributes:
        wrapped: the model chunks, as Megatron's schedules run them.
        replay: the routers' routes.
    """

    device: Device
    mesh: Mesh
    shape: ModelShape
    wrapped: list[Any]
    replay: Replay

    def score(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        mode: Mode,
        recorded_routes: Sequence[torch.Tensor] | None = None,
    ) -> TokenScores:
        """Compute log-probabilities and entropy of every target, without gradients.

        All ranks must call with equally many micro-batches.

        Args:
            micro_batches: what to score.
            mode: "replay" replays routes, "live" lets routers choose, "record" lets them choose and
                keeps the routes.
            recorded_routes: routes to replay in place of the micro-batches' own: `ledger.recorded`
                of an earlier pass over the same micro-batches.
        """
        outputs: list[tuple[torch.Tensor, torch.Tensor]] = []
        seen: list[MicroBatch] = []

        def keep(_number: int, tokens: MicroBatch, scores_2N: torch.Tensor) -> torch.Tensor:
            outputs.append((scores_2N[0], scores_2N[1]))
            seen.append(tokens)
            return scores_2N.new_zeros(())

        with self.replay.schedule(self._mode(mode), training=False) as ledger_of:
            self._run_schedule(
                micro_batches, keep, forward_only=True, recorded_routes=recorded_routes
            )
            ledger = ledger_of()
        return TokenScores(
            logprobs=tuple(logprobs for logprobs, _ in outputs),
            entropy=tuple(entropy for _, entropy in outputs),
            rollout_logprobs=tuple(tokens.rollout_logprobs_N for tokens in seen),
            loss_mask=tuple(tokens.loss_mask_N for tokens in seen),
            sampled=tuple(tokens.sampled_N for tokens in seen),
            positions=tuple(tokens.positions_N for tokens in seen),
            compared=tuple(tokens.loss_mask_N * tokens.current_N for tokens in seen),
            ledger=ledger,
        )

    def _mode(self, mode: Mode) -> Mode:
        return mode if self.shape.moe_layers else "live"

    def _run_schedule(
        self,
        micro_batches: Sequence[MicroBatch],
        on_scores: Callable[[int, MicroBatch, torch.Tensor], torch.Tensor],
        *,
        forward_only: bool,
        recorded_routes: Sequence[torch.Tensor] | None = None,
        on_forward: Callable[[], None] = lambda: None,
    ) -> None:
        """Run Megatron's own schedule.

        On the last pipeline stage `on_scores(number, tokens, scores_2N)` returns the loss;
        `scores_2N` has the targets' log-probabilities and the entropies.
        """
        everything = [*micro_batches, *self._fillers(micro_batches)]

        def forward_step(
            iterator: Iterator[tuple[int, MicroBatch]], model: Any
        ) -> tuple[torch.Tensor, Any]:
            number, micro_batch = next(iterator)
            device, is_filler = self.device.torch, number >= len(micro_batches)
            tokens = local_tokens(micro_batch, self.mesh.cp, device)
            own = router_rows(tokens, self.mesh.tp)
            routes_NLK, compared_N = tokens.routed_experts_NLK[own], tokens.captured_N[own]
            # A stage of dense layers has recorded no routes.
            if recorded_routes and not is_filler:
                routes_NLK, compared_N = recorded_routes[number], tokens.real_N[own]
            rows, compared_N = int(compared_N.sum()), compared_N.to(device)
            self.replay.load(
                routes_NLK.to(device),
                compared_N,
                rows=rows,
                depths_ND=depths_ND(tokens.positions_N[own]) * compared_N[:, None],
                model=model,
            )
            head = get_attr_wrapped_model(model, "head", return_model_obj=True)
            is_restricted = len(micro_batch.kept_ids) > 0
            head.kept = (tokens.kept_counts_N, tokens.kept_ids) if is_restricted else None
            scores = model(
                tokens.tokens_N[None],
                tokens.positions_N[None],
                None,
                labels=tokens.targets_N[None],
                packed_seq_params=packed_params(micro_batch.cu_seqlens, device),
            )

            if model is self.wrapped[-1] and not is_filler:
                on_forward()

            def loss_func(
                output: torch.Tensor,
            ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
                loss = 0.0 * output.sum() if is_filler else on_scores(number, tokens, output)
                return loss, torch.ones((), dtype=torch.int, device=loss.device), {}

            return scores, loss_func

        lengths = [micro_batch.num_tokens for micro_batch in everything]
        stages = None
        if self.mesh.pp.size > 1:
            config, chunks = self.wrapped[0].config, len(self.wrapped)
            stages = extras.stages().KnownShapes(config, self.mesh, lengths, num_chunks=chunks)
        with torch.no_grad() if forward_only else nullcontext(), restored_dispatchers(self.wrapped):
            get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=[iter(enumerate(everything)) for _ in self.wrapped],
                model=self.wrapped,
                num_microbatches=len(everything),
                seq_length=max(lengths),
                micro_batch_size=1,
                forward_only=forward_only,
                p2p_communicator=stages,
                # Megatron takes both or none. They are the groups that it would take by itself.
                pg_collection=self.mesh.megatron if stages else None,
            )

    def _fillers(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Return the fillers that the interleaved schedule needs: it takes micro-batches in groups.

        A group has one micro-batch per stage. Fillers have routes of this rank's layers even if the
        micro-batches have none (R2 replays what it recorded).
        """
        missing = -len(micro_batches) % self.mesh.pp.size if len(self.wrapped) > 1 else 0
        layers = len(self.replay.layers)
        filler = filler_micro_batch(
            num_experts=self.shape.num_experts,
            num_layers=layers,
            topk=self.shape.topk if layers else 0,
            multiple=2 * self.mesh.cp.size * self.mesh.tp.size,
        )
        return [filler] * missing


@contextmanager
def restored_dispatchers(chunks: Iterable[nn.Module]) -> Iterator[None]:
    """After the block, the dispatchers of all MoE layers have the attributes that they had before.

    Inside, Megatron's and R3's dispatchers keep tensors of the micro-batch, some with their graph,
    until the next forward. On CUDA, one such tensor keeps the whole segment of the allocator that
    it lies in, which may be one that gradients were cut from.
    """
    layers = [one for chunk in chunks for one in chunk.modules() if isinstance(one, MoELayer)]
    kept = [(layer.token_dispatcher, dict(vars(layer.token_dispatcher))) for layer in layers]
    try:
        yield
    finally:
        for dispatcher, attributes in kept:
            vars(dispatcher).clear()
            vars(dispatcher).update(attributes)
