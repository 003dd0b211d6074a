"""The policy of a run: score tokens, update weights, offload and restore training memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from r3 import extras
from r3.config import Config, TrainConfig
from r3.metrics.reduce import Mean, PerLayer, mismatch
from r3.models.hf_checkpoint import CheckpointReader
from r3.models.shape import ModelShape
from r3.policy.build import build_chunks, experts_kind, let_go, transformer_config, wrap
from r3.policy.memory import TrainingMemory, chained
from r3.policy.objective import NONE_MADE, Passes, PolicyLoss, policy_loss
from r3.policy.scoring import ScoringPolicy
from r3.policy.weight_slots import Slot, load, slots
from r3.routing.ledger import ReplayLedger, load_metrics, routing_metrics
from r3.routing.replay import Replay, attach_replay
from r3.runtime.device import Device
from r3.runtime.mesh import Mesh, cuda_type_names
from r3.runtime.tensors import SharedTensor, share, to_host
from r3.types import Batch, MicroBatch, Update

OnScores = Callable[[int, MicroBatch, torch.Tensor], None]


class Policy(ScoringPolicy):
    """A Megatron shard of the trained model with its optimizer.

    Attributes:
        teachers: frozen checkpoints that score the samples; None without any.
        slots: for each of this rank's weights its place in the Hugging Face checkpoint.
        replay: the routers' routes.
        update_number: optimizer updates made so far; the learning rate is a function of it.
        is_onloaded: gradients and optimizer state are on the device.
    """

    def __init__(
        self, config: Config, device: Device, mesh: Mesh, shape: ModelShape, *, trains: bool = False
    ) -> None:
        """Build the shard and load it from `shape.source`. All ranks must call.

        Args:
            trains: there will be updates: host memory for the optimizer is made while it is loaded.

        Raises:
            ShapeError: the checkpoint does not have the tensors of the model.
        """
        self.config, self.device, self.mesh, self.shape = config, device, mesh, shape
        # First: a teacher leaves the device before the policy fills it.
        self.teachers = extras.teachers(config, device, mesh) if config.has_teacher else None
        self.megatron = transformer_config(config, shape)
        chunks = build_chunks(config, shape, self.megatron, mesh, device)
        planned = experts_kind(config, shape) == "fused" and not config.replay.plausibility
        self.replay: Replay = attach_replay(
            chunks,
            shape.moe_layers,
            mesh.pp,
            plausibility=config.replay.plausibility,
            plan=extras.dispatch().size_plan(mesh.ep, shape.num_experts // mesh.ep.size)
            if planned
            else None,
        )
        self.wrapped, self.optimizer, self._frozen = wrap(
            config, self.megatron, chunks, shape, mesh
        )
        streamed, kept_bytes = config.train.optimizer == "streamed", config.train.kept_bytes
        self.memory = TrainingMemory(
            self.wrapped, self.optimizer, device, streamed=streamed, kept_bytes=kept_bytes
        )
        if trains and config.moves_optimizer:
            self.memory.reserve()
        self.chunks = chunks
        self.slots: list[Slot] = slots(chunks, shape, mesh)
        with CheckpointReader(shape.source) as reader:
            reader.require(shape)
            load(self.slots, reader.read, shape)
        self.optimizer.reload_model_params()  # updates the float32 main parameters
        self._adapters = list(extras.adapters().adapters_of(chunks)) if config.uses_lora else []
        for adapters in self._adapters:
            adapters.start(reference=config.algo.kl_coef > 0)
        # Parameters that the optimizer must not change. Those of a unit share one parameter.
        self._untrained: list[torch.Tensor] = []
        if config.train.freeze and not self._adapters:
            names = extras.frozen_tensors(shape, config.train.freeze)
            own = (parameter for chunk in chunks for parameter in chunk.parameters())
            at = {parameter.data_ptr(): parameter for parameter in own}
            frozen = (slot.tensor.data_ptr() for slot in self.slots if names.issuperset(slot.hf))
            self._untrained = [at[place] for place in frozen if place in at]
        self.update_number = 0
        self.is_onloaded = True
        # The reference policy: this shard's initial weights, on the host.
        self._reference = (
            [to_host(buffer) for buffer in self.parameter_buffers()]
            if config.algo.kl_coef and not self._adapters
            else None
        )
        # Host copy of the policy's weights while the reference's are on the device.
        self._kept: list[torch.Tensor] | None = None

    def close(self) -> None:
        """Let go of the model, so that its memory is free when the last reference is gone.

        The policy cannot be trained afterwards.
        """
        let_go(self.wrapped)

    # ----------------------------------------------------------------------------------------------
    # Weights

    def parameter_buffers(self) -> list[torch.Tensor]:
        """Return the flat tensors of all of this rank's parameters."""
        return [
            of_chunk.param_data
            for chunk in self.wrapped
            for of_chunk in (*chunk.buffers, *chunk.expert_parallel_buffers)
        ]

    def shared_buffers(self) -> list[torch.Tensor]:
        """Return the flat tensors that `slots` are views of: parameters and expert biases."""
        return self._frozen if self._adapters else [*self.parameter_buffers(), *self._frozen]

    def share_parameters(self) -> list[SharedTensor]:
        """Return handles to the shared buffers for other ranks of this machine.

        They are valid for the whole run. With one rank there are none: sharing would move a CPU
        buffer into shared memory for nobody. With a quantised base there are none either.
        """
        if self.device.world_size == 1 or self.makes_weights:
            return []
        return [share(buffer) for buffer in self.shared_buffers()]

    @property
    def makes_weights(self) -> bool:
        """Whether some weights are made of a quantised base whenever they are needed."""
        return bool(self._adapters) and self.config.quantises_base

    def values(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return a shared buffer, or recompute its values."""
        made = (adapters.made(buffer) for adapters in self._adapters)
        return next((tensor for tensor in made if tensor is not None), buffer)

    @contextmanager
    def reference_weights(self) -> Iterator[None]:
        """Inside, the policy has the reference weights; its own are restored bit for bit.

        With adapters, they are the base, and the adapter that the run started with.
        """
        if self._adapters:
            try:
                for adapters in self._adapters:
                    adapters.merge(first=True)
                yield
            finally:
                self.merge_adapters()
            return
        assert self._reference is not None, "no reference weights are kept when algo.kl_coef is 0"
        buffers = self.parameter_buffers()
        kept = self._kept or [None] * len(buffers)
        self._kept = own = [
            to_host(buffer, into) for buffer, into in zip(buffers, kept, strict=True)
        ]
        try:
            for buffer, weights in zip(buffers, self._reference, strict=True):
                buffer.copy_(weights, non_blocking=True)
            yield
        finally:
            for buffer, weights in zip(buffers, own, strict=True):
                buffer.copy_(weights, non_blocking=True)

    def merge_adapters(self) -> None:
        """Set the weights from base and adapters, if there are adapters."""
        for adapters in self._adapters:
            adapters.merge()

    # ----------------------------------------------------------------------------------------------
    # Memory

    def offload(self) -> None:
        """Free gradients and offload optimizer state; parameters stay on the device."""
        assert self.is_onloaded, f"rank {self.device.rank}: training memory is offloaded already"
        self.memory.offload()
        for adapters in self._adapters:
            adapters.release()
        self.is_onloaded = False

    def onload(self) -> None:
        """Restore gradients and optimizer state."""
        assert not self.is_onloaded, f"rank {self.device.rank}: training memory is onloaded already"
        self.memory.onload()
        self.is_onloaded = True

    # ----------------------------------------------------------------------------------------------
    # Passes

    def forward_backward(
        self,
        batch: Batch,
        passes: Passes = NONE_MADE,
        *,
        loss: PolicyLoss = policy_loss,
        first: bool = True,
        on_micro_batch: Callable[[], None] = lambda: None,
        on_scores: OnScores = lambda *_: None,
    ) -> Mapping[str, Any]:
        """Compute the gradients of `batch`, reduced over data-parallel ranks. All ranks must call.

        Each micro-batch's loss is a sum over its tokens divided by the update's global denominator;
        micro-batches and data-parallel ranks add up without another division.

        Args:
            batch: this rank's share.
            passes: what earlier passes found for its micro-batches.
            loss: of a micro-batch.
            first: this is the step's first update.
            on_micro_batch: called after the forward of each micro-batch.
            on_scores: called on the last pipeline stage with a micro-batch's number, this rank's
                tokens of it and their log-probabilities.

        Returns:
            This rank's partials of metrics. The gradients are in the gradient buffers.
        """
        assert self.is_onloaded, f"rank {self.device.rank}: an update needs the training memory"
        for chunk in self.wrapped:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        seen: list[dict[str, torch.Tensor]] = []

        def loss_of(number: int, tokens: MicroBatch, scores_2N: torch.Tensor) -> torch.Tensor:
            logprobs_N, entropy_N = scores_2N
            on_scores(number, tokens, logprobs_N.detach())
            share, stats = loss(
                self.config,
                tokens,
                self.mesh.cp,
                logprobs_N,
                passes,
                number=number,
                entropy_N=entropy_N,
            )
            seen.append(
                stats
                | {
                    "mask": tokens.loss_mask_N,
                    "compared": tokens.loss_mask_N * tokens.current_N,
                    "entropy": entropy_N.detach(),
                    "loss": share.detach(),
                    "logprobs": logprobs_N.detach(),
                    "rollout_logprobs": tokens.rollout_logprobs_N,
                    "positions": tokens.positions_N,
                }
            )
            return share

        mode = self._mode("replay" if self.config.replays else "live")
        with self.replay.schedule(mode, training=True) as ledger_of:
            self._run_schedule(
                batch,
                loss_of,
                forward_only=False,
                recorded_routes=passes.recorded,
                on_forward=on_micro_batch,
            )
            ledger = ledger_of()
        for parameter in self._untrained:
            parameter.main_grad.zero_()
        own_is_old = all(logprobs is None for logprobs in passes.old or ())
        return self._metrics(seen, ledger, panel=first and own_is_old)

    def step(self, total_updates: int) -> Update:
        """Clip the gradients and make one optimizer step. All ranks must call.

        Args:
            total_updates: updates of the whole run, for the learning-rate schedule.

        Raises:
            FloatingPointError: on every rank: a gradient is not finite. The weights are lost.
        """
        lr = learning_rate(self.update_number, total_updates, self.config.train)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
            group["weight_decay"] = self.config.train.weight_decay * group.get("wd_mult", 1.0)
        router_grad_norm = self._router_grad_norm()
        # Without gradient Adam changes nothing, but weight decay does.
        decays = self._untrained if self.config.train.weight_decay else ()
        kept = [parameter.detach().clone() for parameter in decays]
        with cuda_type_names():
            _, grad_norm, _ = self.optimizer.step()
        for parameter, values in zip(decays, kept, strict=True):
            parameter.data.copy_(values)
        self.merge_adapters()
        # Megatron checks this only with a loss scaler, which can retry.
        if not math.isfinite(grad_norm):
            raise FloatingPointError(
                f"update {self.update_number}: the gradient norm is {grad_norm:g} and the weights "
                "are lost. Start the run again: it resumes from its newest checkpoint"
            )
        self.update_number += 1
        return Update(grad_norm=float(grad_norm), router_grad_norm=router_grad_norm, lr=lr)

    # ----------------------------------------------------------------------------------------------
    # Metrics

    @property
    def reports(self) -> bool:
        """Whether this rank reports token metrics.

        The last pipeline stage has the scores, and all of its tp ranks have the same.
        """
        return self.mesh.tp.rank == 0 and self.mesh.pp.rank == self.mesh.pp.size - 1

    def _metrics(
        self, seen: Sequence[Mapping[str, torch.Tensor]], ledger: ReplayLedger, *, panel: bool
    ) -> dict[str, Any]:
        # Every rank compared other slots: its layers (pp) and its rows (dp, cp and, under sequence
        # parallelism, tp).
        routing = routing_metrics(ledger) | consumed_rows(ledger, len(self.shape.moe_layers))
        routing |= load_metrics(ledger)
        if not self.reports or not seen:
            return routing
        column = {name: torch.cat([s[name].reshape(-1) for s in seen]) for name in seen[0]}
        mask, count = column["mask"], float(column["mask"].sum())

        def mean(name: str) -> Mean:
            return Mean(total=float((column[name] * mask).sum()), count=count)

        partials: dict[str, Any] = {
            # Ranks and micro-batches add up to the update's loss. The mean is over the updates.
            "loss/total": Mean(float(column["loss"].sum()), float(self.mesh.dp_cp.rank == 0)),
            "policy/entropy": mean("entropy"),
        }
        if self.config.learns_rows:  # nothing was sampled to be clipped or compared
            total = -float((column["logprobs"] * mask).sum())
            return partials | {"loss/nll": Mean(total=total, count=count)} | routing
        partials |= {key: mean(name) for name, key in _OF_LOSS.items() if name in column}
        # The first update's own forward is at the rollout's weights.
        if panel:
            panel_metrics = mismatch(
                *(column[key] for key in ("logprobs", "rollout_logprobs", "compared", "positions"))
            )
            partials |= {f"mismatch/{name}": value for name, value in panel_metrics.items()}
        return partials | routing

    def _router_grad_norm(self) -> float:
        """Return the norm of the routers' gradients before clipping. All ranks must call.

        Each data-parallel rank has the reduced gradient of its own range of every parameter.
        """
        squares = torch.zeros((), dtype=torch.float64, device=self.device.torch)
        for optimizer in chained(self.optimizer):
            for parameter in getattr(optimizer, "model_param_gbuf_map", ()):
                if getattr(parameter, "is_router", False):
                    owned = optimizer._get_model_param_range_map(parameter)["param"]
                    own = parameter.main_grad.view(-1)[owned.start : owned.end]
                    squares += own.double().square().sum()
        self.mesh.dp_cp.all_reduce(squares)
        self.mesh.pp.all_reduce(squares)
        return float(squares.sqrt())


# What `policy_loss` may return -> its metric.
_OF_LOSS = {
    "clipped": "loss/clip_frac",
    "kl": "loss/kl_ref",
    "kl_teacher": "loss/kl_teacher",
    "weight": "correction/weight_mean",
    "cut": "correction/cut_frac",
    "kl_old": "policy/kl_old",
}


def consumed_rows(ledger: ReplayLedger, num_layers: int) -> dict[str, Any]:
    """Return the policy's side of the route ledger: rows replayed, routed live and filled."""
    if ledger.consumed is None:
        return {}
    names = ("routing/rows_replayed", "routing/rows_live", "routing/rows_filler")
    return {
        name: PerLayer(slots=slots, layers=num_layers)
        for name, slots in zip(names, ledger.consumed.tolist(), strict=True)
    }


def learning_rate(update: int, total_updates: int, train: TrainConfig) -> float:
    """Return the learning rate of update number `update`, from 0.

    Linear warm-up, then constant or a decay that ends at `min_lr` with the last update.
    """
    if update < train.warmup_updates:
        return train.lr * (update + 1) / train.warmup_updates
    if train.lr_schedule == "constant":
        return train.lr
    span = max(1, total_updates - 1 - train.warmup_updates)
    progress = min(1.0, (update - train.warmup_updates) / span)
    shape = (
        1.0 - progress
        if train.lr_schedule == "linear"
        else 0.5 * (1.0 + math.cos(math.pi * progress))
    )
    return train.min_lr + (train.lr - train.min_lr) * shape
