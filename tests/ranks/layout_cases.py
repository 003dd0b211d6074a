"""Logits, loss, gradients and updates of one policy under many layouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from r3 import extras
from r3.backends import KnownShapes
from r3.lora import frozen_tensors
from r3.metrics import DEPTHS
from r3.models import CheckpointReader
from r3.models.shape import ModelShape
from r3.policy import Policy, chained
from r3.policy.build import transformer_config
from r3.policy.weight_slots import load
from r3.run import load_checkpoint
from r3.runtime.device import Device
from r3.runtime.mesh import Mesh, build_mesh
from r3.types import Batch
from tests.errors import message_of
from tests.policies import (
    Watched,
    batches_of,
    build,
    build_with_batch,
    by_expert,
    experts_as_on_cuda,
    full_gradients,
    one_update,
    padded_backward,
    require_planned,
    same_state,
    save_checkpoint,
)
from tests.tiny import tiny_config


def gradients(
    device: Device,
    *,
    model: str,
    out: str,
    parallel: dict[str, Any] | None = None,
    micro_batch_tokens: int = 128,
    experts: str = "auto",
    recompute: str = "none",
    algo: dict[str, Any] | None = None,
    padded: bool = False,
    chunk: int = 32,
    dtype: str = "float32",
    replay: str = "r3",
    exchange: bool = False,
) -> SimpleNamespace:
    """Compute loss and gradients of one batch with replayed random routes, then update once.

    `agreement_slots` are those in which routes were compared on this rank; `by_layer` has the slots
    that agree, and all, by metric; `bytes_read` is the ratio of bytes read from the checkpoint to
    those of this rank's tensors, `largest_read` the same for the largest.

    Ranges of positions are so short here that every sequence is in all.

    The gradients are written to `rank_N.pt` in `out`, the updated weights to `updated_N.pt`.
    `exchange`: pipeline stages make two passes more, with and without Megatron's exchange of
    shapes, which must be equal.
    """
    config = tiny_config(
        model,
        parallel=parallel or {},
        model={"experts": experts_as_on_cuda(experts), "recompute": recompute, "dtype": dtype},
        replay={"mode": replay},
        algo={"correction": "token_tis"} | (algo or {}),
        train={"logprob_chunk_tokens": chunk},
    )
    DEPTHS.update({"1-4k": 4, "4-16k": 8, "16k_up": 12})
    mesh, policy = build(device, config)
    require_planned(policy)
    with CheckpointReader(model) as reader:
        load(policy.slots, reader.read, policy.shape)  # as the policy did, and counted
        sizes = [slot.tensor.nbytes for slot in policy.slots]
        bytes_read, largest_read = reader.bytes_read / sum(sizes), reader.largest_read / max(sizes)
    (batch,) = batches_of(
        mesh, policy.shape, micro_batch_tokens=micro_batch_tokens, layers=policy.replay.layers
    )
    metrics = padded_backward(policy, batch) if padded else policy.forward_backward(batch)
    loss = _whole_loss(mesh, metrics)
    gradients = full_gradients(policy)
    single = {
        name: (kind, index, tensor)
        for slot in policy.slots
        if slot.name in gradients
        for kind, index, value in [gradients[slot.name]]
        for name, tensor in by_expert(slot, value)
    }
    torch.save(single, Path(out) / f"rank_{device.rank}.pt")
    if exchange:
        _require_known_shapes(policy, batch)
    update, metrics = one_update(policy, batch, total_updates=10)
    updated = {
        name: (slot.kind, slot.index, tensor)
        for slot in policy.slots
        for name, tensor in by_expert(slot, slot.tensor)
    }
    torch.save(updated, Path(out) / f"updated_{device.rank}.pt")
    compared = policy.replay.taps and replay == "r3"
    return SimpleNamespace(
        loss=loss,
        grad_norm=update.grad_norm,
        router_grad_norm=update.router_grad_norm,
        agreement_slots=metrics["routing/agreement"].count if compared else 0.0,
        by_layer={
            key: [part.total, part.count]
            for key, part in metrics.items()
            if key.startswith(("routing/agreement_layer/", "routing/agreement_depth/"))
        },
        bytes_read=bytes_read,
        largest_read=largest_read,
    )


class SentShapes(KnownShapes):
    """Megatron's exchange of shapes. What arrives is compared with what was known."""

    exchanges: ClassVar[int] = 0

    def _communicate_shapes(self, *tensors_and_flags: Any) -> Any:
        known = super()._communicate_shapes(*tensors_and_flags)
        arrived = P2PCommunicator._communicate_shapes(self, *tensors_and_flags)
        assert tuple(map(tuple, arrived)) == known, f"{arrived} arrived in place of {known}"
        SentShapes.exchanges += 1
        return arrived


def _require_known_shapes(policy: Policy, batch: Batch) -> None:
    """Make the same pass without and with the exchange of shapes. All ranks must call."""
    results, messages = [], []
    to_one_rank = (torch.ops.c10d.send.default, torch.ops.c10d.recv_.default)
    SentShapes.exchanges = 0
    for communicator in (KnownShapes, SentShapes):
        extras.stages().KnownShapes = communicator
        called: list[Any] = []
        with Watched(lambda func, *_, called=called: called.append(func)):
            metrics = policy.forward_backward(batch)
        messages.append(sum(func in to_one_rank for func in called))
        gradients = [buffer.clone() for buffer in policy.memory.gradient_buffers()]
        results.append((metrics.get("loss/total"), gradients))
    extras.stages().KnownShapes = KnownShapes
    (loss, gradients), (other_loss, others) = results
    assert loss == other_loss and all(map(torch.equal, gradients, others)), "bit for bit"
    assert messages[1] == 2 * messages[0] > 0 and SentShapes.exchanges > 0, messages


def wrong_shapes(device: Device) -> list[str]:
    """Errors of two stages with other lengths, of a tensor of another length than announced, and
    of one too many.
    """
    config = tiny_config(parallel={"pp": 2})
    mesh = build_mesh(device, config.parallel)
    megatron = transformer_config(config, ModelShape.read(config.model.path))

    def known(*lengths: int) -> KnownShapes:
        return KnownShapes(megatron, mesh, lengths, num_chunks=1)

    differ = message_of(lambda: known(8, 16 + 4 * mesh.pp.rank), AssertionError)
    stages, tensor = known(8, 16), torch.empty(16, 1, megatron.hidden_size)
    receives = (bool(mesh.pp.rank), not mesh.pp.rank)
    sends = (tensor, None) if mesh.pp.rank == 0 else (None, tensor)
    sent = message_of(
        lambda: stages._communicate_shapes(*sends, recv_prev=False, recv_next=False),
        AssertionError,
    )
    for _ in range(2):
        stages._communicate_shapes(None, None, *receives)
    received = message_of(lambda: stages._communicate_shapes(None, None, *receives), AssertionError)
    return [differ, sent, received]


def second_update(
    device: Device, *, model: str, out: str, parallel: dict[str, Any], resume: bool
) -> SimpleNamespace:
    """The second update: after the first one and a checkpoint, or resumed from that checkpoint."""
    mesh, policy = build(device, tiny_config(model, parallel=parallel))
    (batch,) = batches_of(mesh, policy.shape, micro_batch_tokens=96)
    if resume:
        load_checkpoint(Path(out) / "step_000001", policy, device, mesh)
    else:
        one_update(policy, batch, total_updates=4)
        save_checkpoint(Path(out), policy, step=1)
    update, metrics = one_update(policy, batch, total_updates=4)
    return SimpleNamespace(
        loss=_whole_loss(mesh, metrics),
        grad_norm=update.grad_norm,
        router_grad_norm=update.router_grad_norm,
    )


def _whole_loss(mesh: Mesh, metrics: Mapping[str, Any]) -> float:
    """The sum of the ranks' shares. All ranks must call."""
    own = metrics["loss/total"].total if "loss/total" in metrics else 0.0
    return float(mesh.world.all_reduce(torch.tensor(own, dtype=torch.float64)))


def fused_adam(device: Device) -> None:
    """Compare the first update of torch's default AdamW and of the fused one.

    Only the first update is compared: where a gradient is almost zero, Adam turns its rounding
    into whole steps in later updates.
    """
    config = tiny_config(model={"dtype": "bfloat16"})
    mesh, plain = build(device, config)
    for each in chained(plain.optimizer):
        for group in each.optimizer.param_groups:
            group["fused"] = False
    (batch,) = batches_of(mesh, plain.shape, micro_batch_tokens=96)

    def mains(policy: Policy) -> dict[str, torch.Tensor]:
        return {
            key: tensor.clone()
            for key, tensor in policy.memory.optimizer_tensors()
            if "/main/" in key
        }

    fused = Policy(config, device, mesh, plain.shape)
    began = mains(plain)
    one_update(plain, batch, total_updates=4)
    one_update(fused, batch, total_updates=4)
    expected, found = mains(plain), mains(fused)
    # One step of lr 1e-3 in float32: both round the last bits of numbers up to 1.
    moved = max(float((expected[key] - began[key]).abs().max()) for key in began)
    off = max(float((expected[key] - found[key]).abs().max()) for key in began)
    assert off <= 1e-6 < 5e-4 < moved, (off, moved)


def frozen(
    device: Device, *, dtype: str, parallel: dict[str, int], freeze: tuple[str, ...]
) -> None:
    """Update with and without frozen parameters."""
    train = {"lr": 1e-2, "weight_decay": 0.1, "clip_grad": 0.0}
    config = tiny_config(parallel=parallel, model={"dtype": dtype}, train=train)
    mesh, free, batch = build_with_batch(device, config, micro_batch_tokens=96)
    settings = replace(config, train=replace(config.train, freeze=freeze))
    policy = Policy(settings, device, mesh, free.shape)
    hf_names = frozen_tensors(free.shape, freeze)
    names = [slot.name for slot in policy.slots if hf_names.issuperset(slot.hf)]

    def weights(policy: Policy) -> dict[str, torch.Tensor]:
        return {slot.name: slot.tensor.clone() for slot in policy.slots}

    def differs(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], name: str) -> bool:
        return not torch.equal(one[name], other[name])

    began = weights(policy)
    one_update(free, batch, total_updates=4)
    update, _ = one_update(policy, batch, total_updates=4)
    expected, found = weights(free), weights(policy)
    policy.offload()
    policy.onload()
    for _ in range(2):
        one_update(policy, batch, total_updates=4)
    ended = weights(policy)
    trained = ended.keys() - set(names)
    assert min(len(names), len(trained)) > 2
    for name in names:
        assert differs(expected, began, name), f"{name}: the other policy leaves it, too"
        assert not differs(ended, began, name), f"{name} is frozen"
    for name in trained:
        # Gradients do not depend on what is frozen: the first update is the same to the bit.
        assert not differs(found, expected, name), name
        assert differs(ended, began, name), name
    assert update.router_grad_norm == 0.0


def streamed_optimizer(device: Device, *, out: str, dtype: str, parallel: dict[str, int]) -> None:
    """Update with the optimizer's state kept on the device, streamed in many parts, and where some
    of it stays on the device, streamed and not.

    After three updates one more with a resumed optimizer, and one after a change on the host.
    """
    extras.streamed().PART_VALUES = 20_000
    config = tiny_config(parallel=parallel, model={"dtype": dtype}, train={"optimizer": "kept"})
    mesh, resident, batch = build_with_batch(device, config, micro_batch_tokens=96)

    def streaming(place: str = "streamed", kept_gib: float = 0.0) -> Policy:
        train = replace(config.train, optimizer=place, optimizer_kept_gib=kept_gib)
        return Policy(replace(config, train=train), device, mesh, resident.shape)

    def nbytes(policy: Policy) -> int:
        tensors = policy.memory.optimizer_tensors()
        return sum(tensor.untyped_storage().nbytes() for _, tensor in tensors)

    room = 0.001
    every = [streaming(), streaming("streamed", room), streaming("resident", room)]
    streamed, in_part, _ = every
    for number in range(3):
        for policy in (resident, *every):
            if number:
                policy.onload()
            one_update(policy, batch, total_updates=8)
        assert all(same_state(resident, other) for other in every), f"update {number}"
        assert nbytes(streamed) == 0, "on the device between updates"
        for policy in (resident, *every):
            policy.offload()
    # What stays there while the engine has its turn: of two policies, what fits into the room. The
    # smallest tensors fill what the largest leave of it.
    kept, part, same = (nbytes(policy) / (room * 2**30) for policy in (resident, *every[1:]))
    assert kept > 1.5 and 0.9 < part <= 1 and part == same, (kept, part, same)
    for policy in (resident, *every):
        policy.onload()
    saved = save_checkpoint(Path(out), in_part, step=3)
    resumed = [streaming(), streaming("streamed", room)]
    for policy in resumed:
        load_checkpoint(saved, policy, device, mesh)
    assert nbytes(resumed[0]) == 0 and nbytes(resumed[1]) == nbytes(in_part), "after a resume"
    every += resumed
    for policy in (resident, *every):
        one_update(policy, batch, total_updates=8)
    assert all(same_state(resident, other) for other in every), "after the checkpoint"
    with streamed.memory.optimizer_on_device():
        moment = next(
            tensor for key, tensor in streamed.memory.optimizer_tensors() if key.endswith("exp_avg")
        )
        moment.view(-1)[:8].add_(1.0)
    for policy in (resident, streamed):
        one_update(policy, batch, total_updates=8)
    assert not same_state(resident, streamed), "changed moments must change the next update"
