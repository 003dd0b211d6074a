"""What each rank does in the tests of this folder. Every part is the real one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from r3.config import Config
from r3.handover.rollouts import PackingSpec, distribute
from r3.models.hf_checkpoint import CheckpointReader
from r3.models.shape import ModelShape
from r3.policy import Policy
from r3.policy.build import use_fused_adam
from r3.policy.weights import load
from r3.rollout.scored import Scored
from r3.run import checkpoint
from r3.run.resume import Found
from r3.runtime.device import Device
from r3.runtime.mesh import Mesh, build_mesh
from r3.types import Batch, Rollout
from tests.tiny import random_rollouts, tiny_config

LENGTHS = (37, 12, 50, 9, 23, 31, 44, 18)


def build(device: Device, config: Config) -> tuple[Mesh, Policy]:
    """The mesh and the policy of a config."""
    mesh = build_mesh(device, config.parallel)
    return mesh, Policy(config, device, mesh, ModelShape.read(config.model.path))


def batches_of(
    mesh: Mesh,
    shape: ModelShape,
    lengths: Sequence[int] = LENGTHS,
    *,
    micro_batch_tokens: int = 128,
    **kwargs: Any,
) -> list[Batch]:
    """Random rollouts, dealt out as in a step: every rank generates some, every rank trains on
    others.
    """
    num_updates = kwargs.pop("num_updates", 1)
    layers = kwargs.pop("layers", None)
    rollouts = random_rollouts(shape, lengths, **kwargs)
    advantages = np.random.default_rng(5).standard_normal(len(rollouts)).tolist()
    mine = [
        Scored(index=index, rollout=rollout, advantage=advantage)
        for index, (rollout, advantage) in enumerate(zip(rollouts, advantages, strict=True))
        if rollout.group % mesh.world.size == mesh.world.rank
    ]
    batches, _ = distribute(
        mine,
        mesh,
        shape,
        PackingSpec(
            num_updates=num_updates,
            micro_batch_tokens=micro_batch_tokens,
            on_missing="live",
            layers=layers,
        ),
    )
    return batches


def full_gradients(policy: Policy) -> dict[str, tuple[str, int, torch.Tensor]]:
    """Reduced gradients of this rank's tensors under global Megatron names, each with how and where
    it is cut.
    """
    found: dict[str, tuple[str, int, torch.Tensor]] = {}
    buffers = [
        b for chunk in policy.wrapped for b in (*chunk.buffers, *chunk.expert_parallel_buffers)
    ]
    whole = []
    for buffer in buffers:
        group = buffer.data_parallel_group
        gathered = torch.empty_like(buffer.grad_data)
        for (
            bucket
        ) in buffer.buckets:  # each data-parallel rank owns one contiguous part of every bucket
            part = bucket.grad_data.numel() // group.size()
            mine = bucket.grad_data[group.rank() * part : (group.rank() + 1) * part].clone()
            parts = [torch.empty_like(mine) for _ in range(group.size())]
            dist.all_gather(parts, mine, group=group)
            gathered[bucket.offset : bucket.offset + bucket.grad_data.numel()] = torch.cat(parts)
        whole.append(gathered)
    for slot in policy.slots:
        for buffer, gradient in zip(buffers, whole, strict=True):
            offset, rest = divmod(
                slot.tensor.data_ptr() - buffer.param_data.data_ptr(),
                buffer.param_data.element_size(),
            )
            if rest == 0 and 0 <= offset <= gradient.numel() - slot.tensor.numel():
                value = (
                    gradient[offset : offset + slot.tensor.numel()].view(slot.tensor.shape).clone()
                )
                found[slot.name] = (slot.kind, slot.index, value)
                break
    return found


def logits(device: Device, *, model: str, ep: int = 1) -> float:
    """Largest |difference| of the shard's logits from transformers', over ragged packed
    sequences.
    """
    from transformers import AutoModelForCausalLM

    from r3.policy.modules import packed_params

    config = tiny_config(model, parallel={"ep": ep})
    mesh, policy = build(device, config)
    generator = torch.Generator().manual_seed(
        10 + mesh.dp.rank
    )  # every data-parallel rank has other sequences
    sequences = [torch.randint(3, 400, (n,), generator=generator) for n in (33, 7, 64)]
    borders = np.cumsum([0, *(len(s) for s in sequences)]).tolist()
    with torch.no_grad():
        ours = policy.chunks[0](
            torch.cat(sequences)[None],
            torch.cat([torch.arange(len(s)) for s in sequences])[None],
            None,
            packed_seq_params=packed_params(borders, device.torch),
        )[0]
        reference = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32, attn_implementation="eager"
        )
        theirs = torch.cat([reference(s[None]).logits[0] for s in sequences])
    return float((ours - theirs).abs().max())


def gradients(
    device: Device,
    *,
    model: str,
    out: str,
    parallel: dict[str, Any] | None = None,
    micro_batch_tokens: int = 128,
    experts: str = "grouped",
    recompute: str = "none",
    algo: dict[str, Any] | None = None,
    padded: bool = False,
    chunk: int = 32,
    dtype: str = "float32",
    replay: str = "r3",
) -> dict[str, Any]:
    """Loss and gradients of one batch with replayed random routes, then the gradient norm and
    weights after a step.
    """
    config = tiny_config(
        model,
        parallel=parallel or {},
        model={"experts": experts, "recompute": recompute, "dtype": dtype},
        replay={"mode": replay},
        algo={"correction": "token_tis"} | (algo or {}),
        train={"logprob_chunk_tokens": chunk},
    )
    mesh, policy = build(device, config)
    with CheckpointReader(model) as reader:
        load(policy.slots, reader.read, policy.heads)  # as the policy did, and counted
        held = [slot.tensor.nbytes for slot in policy.slots]
        loaded = {
            "read": reader.bytes_read / sum(held),
            "largest_read": reader.largest_read / max(held),
            "share": reader.bytes_read / sum(prod(shape) * 4 for shape in reader.shapes.values()),
        }
    (batch,) = batches_of(
        mesh, policy.shape, micro_batch_tokens=micro_batch_tokens, layers=policy.replay.layers
    )
    metrics = padded_backward(policy, batch) if padded else policy.forward_backward(batch)
    loss = metrics["loss/total"].total if "loss/total" in metrics else 0.0
    losses = mesh.world.all_reduce(torch.tensor(loss, dtype=torch.float64))
    torch.save(full_gradients(policy), Path(out) / f"rank_{device.rank}.pt")
    update = policy.update(batch, total_updates=10)
    updated = {slot.name: (slot.kind, slot.index, slot.tensor) for slot in policy.slots}
    torch.save(updated, Path(out) / f"updated_{device.rank}.pt")
    return {
        "loss": float(losses),
        "grad_norm": update.grad_norm,
        "router_grad_norm": update.router_grad_norm,
        "micro_batches": len(batch.micro_batches),
        "agreement_slots": update.metrics["routing/agreement"].count
        if policy.replay.taps and replay == "r3"
        else 0,
        "by_layer": {
            key.removeprefix("routing/agreement_layer/"): [part.total, part.count]
            for key, part in update.metrics.items()
            if key.startswith("routing/agreement_layer/")
        },
        **loaded,
    }


def second_update(
    device: Device, *, model: str, out: str, parallel: dict[str, Any], resume: bool
) -> dict[str, float]:
    """The second update's figures: after the first one and a checkpoint, or from that
    checkpoint.
    """
    mesh, policy = build(device, tiny_config(model, parallel=parallel))
    (batch,) = batches_of(mesh, policy.shape, micro_batch_tokens=96)
    if resume:
        checkpoint.load(Found(folder=Path(out) / "step_000001", step=1), policy, device, mesh)
    else:
        policy.update(batch, total_updates=4)
        checkpoint.save(Path(out), policy, device, mesh, step=1, keep=0)
    update = policy.update(batch, total_updates=4)
    loss = update.metrics["loss/total"].total if "loss/total" in update.metrics else 0.0
    total = mesh.world.all_reduce(torch.tensor(loss, dtype=torch.float64))
    return {
        "loss": float(total),
        "grad_norm": update.grad_norm,
        "router_grad_norm": update.router_grad_norm,
    }


def fused_adam(device: Device, *, out: str) -> dict[str, Any]:
    """The first update of torch's default AdamW and of the fused one; then the fused one straight
    on and from a checkpoint.

    Only the first is compared: where a gradient is next to nothing, Adam turns its rounding into
    whole steps later on.
    """

    config = tiny_config(model={"dtype": "bfloat16"})
    mesh, plain = build(device, config)
    (batch,) = batches_of(mesh, plain.shape, micro_batch_tokens=96)

    def another() -> Policy:
        policy = Policy(config, device, mesh, plain.shape)
        use_fused_adam(policy.optimizer)
        return policy

    def mains(policy: Policy) -> dict[str, torch.Tensor]:
        return {
            key: tensor.clone()
            for key, tensor in policy.memory.optimizer_tensors()
            if "/main/" in key
        }

    fused = another()
    began = mains(plain)
    plain.update(batch, total_updates=4)
    fused.update(batch, total_updates=4)
    expected, found = mains(plain), mains(fused)
    saved = checkpoint.save(Path(out), fused, device, mesh, step=1, keep=0)
    resumed = another()
    checkpoint.load(Found(folder=saved, step=1), resumed, device, mesh)
    for _ in range(2):
        fused.update(batch, total_updates=4)
        resumed.update(batch, total_updates=4)
    straight, again = mains(fused), mains(resumed)
    return {
        "moved": max(float((expected[key] - began[key]).abs().max()) for key in began),
        "apart": max(float((expected[key] - found[key]).abs().max()) for key in began),
        "resumed": all(torch.equal(straight[key], again[key]) for key in began),
    }


def padded_backward(policy: Policy, batch: Batch) -> dict[str, Any]:
    """The same loss from one padded dense forward: an independent path through attention, packing
    and log-probabilities.
    """
    from r3.metrics.reduce import Mean
    from r3.policy.layout import local_tokens
    from r3.policy.objective import policy_loss

    for chunk in policy.wrapped:
        chunk.zero_grad_buffer()
    policy.optimizer.zero_grad()
    total = 0.0
    with policy.replay.schedule("replay", training=True):
        for micro_batch in batch.micro_batches:
            borders = list(zip(micro_batch.cu_seqlens, micro_batch.cu_seqlens[1:], strict=False))
            longest = max(end - start for start, end in borders)
            tokens = torch.zeros(len(borders), longest, dtype=torch.int64)
            for row, (start, end) in enumerate(borders):
                tokens[row, : end - start] = micro_batch.tokens_N[start:end]
            routes = padded_rows(micro_batch.routed_experts_NLK, micro_batch.cu_seqlens)
            captured = (routes >= 0).flatten(1).all(1)
            policy.replay.load(routes, captured, rows=int(captured.sum()))
            positions = torch.arange(longest).expand(len(borders), longest)
            logits_bsV = policy.wrapped[0](tokens, positions, None)
            logits_NV = torch.cat(
                [logits_bsV[row, : end - start] for row, (start, end) in enumerate(borders)]
            )
            logprobs_N = logits_NV.log_softmax(-1).gather(-1, micro_batch.targets_N[:, None])[:, 0]
            tokens_N = local_tokens(micro_batch, policy.mesh, policy.device.torch)
            loss, _ = policy_loss(
                policy.config, batch, tokens_N, policy.mesh.cp, logprobs_N, logprobs_N.detach()
            )
            loss.backward()
            total += float(loss)
    for chunk in policy.wrapped:
        chunk.finish_grad_sync()
    return {"loss/total": Mean(total, 1.0)}


def padded_rows(values_N: torch.Tensor, cu_seqlens: Sequence[int]) -> torch.Tensor:
    """Values of packed tokens as the rows that a router sees of the same sequences padded: s-major,
    -1 where nothing is.
    """
    borders = list(pairwise(cu_seqlens))
    longest = max(end - start for start, end in borders)
    padded = torch.full((longest, len(borders), *values_N.shape[1:]), -1, dtype=values_N.dtype)
    for row, (start, end) in enumerate(borders):
        padded[: end - start, row] = values_N[start:end]
    return padded.flatten(0, 1)


def digest(rows: Iterable[tuple[int, int, int, list[int]]]) -> int:
    """Of a set of (rollout, position, layer, sorted experts), in any order: digests of disjoint
    sets add up modulo 2^64.
    """
    total = 0
    for row in rows:
        total += int.from_bytes(
            hashlib.blake2b(repr(row).encode(), digest_size=8).digest(), "little"
        )
    return total % 2**64


def digest_of_rollouts(rollouts: Sequence[Rollout], layers: Sequence[int]) -> int:
    """What the routers of any layout must have done with these rollouts."""
    return digest(
        (index, position, layer, sorted(experts))
        for index, rollout in enumerate(rollouts)
        for position, row in enumerate(rollout.routed_experts.tolist())
        for layer, experts in zip(layers, row, strict=True)
    )


def routes_used(
    device: Device,
    *,
    model: str,
    parallel: dict[str, Any],
    micro_batch_tokens: int = 96,
    padded: bool = False,
) -> dict[str, int]:
    """Read back at every router which experts each token really went to, and compare with the
    routes it was given.

    Then a recording pass, and its routes replayed: `apart` counts the log-probabilities that are
    not the same, bit for bit.
    """
    from r3.policy.layout import local_tokens

    mesh, policy = build(device, tiny_config(model, parallel=parallel))
    layers = policy.replay.layers
    (batch,) = batches_of(mesh, policy.shape, micro_batch_tokens=micro_batch_tokens, layers=layers)
    used: dict[int, list[torch.Tensor]] = {}
    for chunk in policy.chunks:
        for layer in chunk.decoder.layers:
            number = layer.layer_number - 1
            if number in layers:
                used[number] = []
                layer.mlp.router.register_forward_hook(
                    lambda _m, _i, out, n=number: used[n].append(out[1])
                )
    if padded:
        padded_backward(policy, batch)
    else:
        policy.score(batch.micro_batches, mode="replay")
    slots = wrong = 0
    seen: list[tuple[int, int, int, list[int]]] = []
    for i, micro_batch in enumerate(batch.micro_batches):
        # Which token a router's row is of: cut, or padded, as the routes are.
        lengths = torch.tensor([end - start for start, end in pairwise(micro_batch.cu_seqlens)])
        rollout_N = torch.tensor(micro_batch.rollout_ids).repeat_interleave(lengths)
        names_N = torch.where(
            micro_batch.captured_N, rollout_N * 1000 + micro_batch.positions_N, -1
        )
        if padded:
            names = padded_rows(names_N, micro_batch.cu_seqlens)
            routes_NLK = padded_rows(micro_batch.routed_experts_NLK, micro_batch.cu_seqlens)
        else:
            named = replace(micro_batch, routed_experts_NLK=names_N[:, None, None])
            names = local_tokens(named, mesh, device.torch).routes_NLK[:, 0, 0]
            routes_NLK = local_tokens(micro_batch, mesh, device.torch).routes_NLK
        captured = names >= 0
        for position, number in enumerate(layers):
            rows = routes_NLK[:, position].long()[captured]
            given = torch.zeros(len(rows), policy.shape.num_experts, dtype=torch.bool).scatter(
                1, rows, True
            )
            found = used[number][i][captured]
            slots += len(found)
            wrong += int((found != given).any(-1).sum())
            for name, row in zip(names[captured].tolist(), found, strict=True):
                seen.append((*divmod(name, 1000), number, row.nonzero().flatten().tolist()))
    recorded = policy.score(batch.micro_batches, mode="record")
    # As in replay mode r2, where micro-batches have no routes and a batch takes its part of what
    # was recorded.
    bare = [
        replace(one, routed_experts_NLK=one.routed_experts_NLK[:, :0, :0])
        for one in batch.micro_batches
    ]
    replayed = policy.score(
        bare, mode="replay", recorded_routes=recorded.ledger.recorded[: len(bare)]
    )
    apart = sum(
        int((one != other).sum())
        for one, other in zip(recorded.logprobs, replayed.logprobs, strict=True)
    )
    rollouts = random_rollouts(policy.shape, LENGTHS)
    late = replace(rollouts[3], routed_experts=np.roll(rollouts[3].routed_experts, 1, axis=0))
    return {
        "slots": slots,
        "wrong": wrong,
        "apart": apart,
        "micro_batches": len(batch.micro_batches),
        "digest": digest(seen),
        "expected": digest_of_rollouts(rollouts, policy.shape.moe_layers),
        "one rollout late by a token": digest_of_rollouts(
            [*rollouts[:3], late, *rollouts[4:]], policy.shape.moe_layers
        ),
    }


def replay_guards(device: Device, *, model: str) -> list[str]:
    """Provoke every refusal of the replay owner; returns the messages."""
    from megatron.core.transformer.moe.router_replay import RouterReplay

    mesh, policy = build(device, tiny_config(model))
    (batch,) = batches_of(mesh, policy.shape)
    micro_batch = batch.micro_batches[0]
    messages = [
        f"instances in the class-level list: {len(RouterReplay.global_router_replay_instances)}"
    ]

    def provoke(action: Any) -> None:
        try:
            action()
            messages.append("nothing was raised")
        except AssertionError as error:
            messages.append(str(error))

    def load() -> None:
        captured = micro_batch.captured_N
        policy.replay.load(micro_batch.routed_experts_NLK, captured, rows=int(captured.sum()))

    def never_used() -> None:
        with policy.replay.schedule("replay", training=False):
            load()

    def loaded_twice() -> None:
        with policy.replay.schedule("replay", training=False):
            load()
            load()

    def not_loaded() -> None:
        with policy.replay.schedule("replay", training=False), torch.no_grad():
            policy.chunks[0](micro_batch.tokens_N[None], micro_batch.positions_N[None], None)

    def too_few_rows() -> None:
        with policy.replay.schedule("replay", training=False), torch.no_grad():
            policy.replay.load(
                micro_batch.routed_experts_NLK[:-3], micro_batch.captured_N[:-3], rows=1
            )
            policy.chunks[0](micro_batch.tokens_N[None], micro_batch.positions_N[None], None)

    for action in (never_used, loaded_twice, not_loaded, too_few_rows):
        provoke(action)
    policy.score(
        batch.micro_batches, mode="replay"
    )  # state was cleared each time: an ordinary pass still works
    messages.append("still works")
    broken = replace(micro_batch, advantages_N=micro_batch.advantages_N * float("nan"))
    try:
        policy.update(
            replace(batch, micro_batches=(broken, *batch.micro_batches[1:])), total_updates=10
        )
        messages.append("nothing was raised")
    except FloatingPointError as error:
        messages.append(str(error))
    return messages
