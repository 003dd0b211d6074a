"""The contract of a model family: compute, differentiate, load and export like transformers."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from r3.config import Config
from r3.engine.direct_weights import matrices
from r3.layers import packed_params, zigzag_rows
from r3.models import Experts, joined
from r3.models.shape import ModelShape
from r3.policy import Policy, chained
from r3.run import load_checkpoint
from r3.runtime.device import Device
from r3.runtime.mesh import Mesh, build_mesh, cuda_type_names
from r3.sync import WeightStream
from r3.types import MicroBatch
from tests.families import as_ling, transformers_model
from tests.policies import (
    batches_of,
    buffers_of,
    export_policy,
    gathered,
    one_update,
    policy_of,
    require_planned,
    save_checkpoint,
)
from tests.tiny import tiny_config

LENGTHS = (33, 7, 64)


def contracts(
    device: Device, *, folders: Mapping[str, str], out: str, parallel: dict[str, int]
) -> dict[str, SimpleNamespace]:
    """Try every checkpoint; with one rank a failure of one does not stop the others.

    Returns:
        One checkpoint on one rank, against transformers.
        error: traceback, if it failed.
        logits: largest difference of logits; on several stages or with divided sequences, of
            log-probabilities and entropies.
        gradients: largest relative difference of a gradient, see `differences`.
        grad_norm: relative difference of the gradient norm.
        round_trip: tensors that the export does not give back bit for bit.
        decayed: tensors of the checkpoint with weight decay that are vectors, and matrices without.
        The rest not on several stages or with divided sequences.
        layer_by_layer: the weight stream yields whole layers in order.
        shared: the buffers are in shared memory.
        router_gradients: largest gradient of every router.
        selective: gradients with selective recomputation have the same bits, or it was not tried:
            embeddings are tied, or there are several ranks.
    """
    mesh = build_mesh(device, tiny_config(parallel=parallel).parallel)
    found = {}
    for name, folder in folders.items():
        try:
            one = pipeline_contract if mesh.pp.size * mesh.cp.size > 1 else contract
            found[name] = one(device, mesh, folder, Path(out) / name, parallel)
            found[name].error = ""
        except Exception:
            if mesh.world.size > 1:
                # The other ranks wait in a collective.
                raise
            found[name] = SimpleNamespace(error=traceback.format_exc()[-2000:])
    return found


def require_whole(stream: WeightStream, shape: ModelShape, mesh: Mesh) -> None:
    """Require every tensor once, in blocks of experts too. All ranks must call."""
    single = list(stream.read())
    assert len(single) == len(stream.shapes), "a tensor is read twice, or not at all"
    blocks = list(stream.read_blocks())
    found: list[tuple[str, torch.Tensor]] = []
    for key, full in blocks:
        found += [(key, full)] if isinstance(key, str) else matrices(key, full, shape)
    assert [name for name, _ in found] == [name for name, _ in single]
    for (name, block), (_, tensor) in zip(found, single, strict=True):
        assert torch.equal(block, tensor), name
    count = sum(isinstance(key, Experts) for key, _ in blocks)
    parts = 4 if shape.has_biases else 2
    assert count == parts * mesh.ep.size * len(shape.moe_layers), "w1 and w2 of a rank and layer"


def exported(device: Device, mesh: Mesh, config: Config, out: Path) -> tuple[Policy, WeightStream]:
    """A policy that has loaded a checkpoint as planned and exported it, and its weight stream."""
    policy = policy_of(device, mesh, config)
    require_planned(policy)
    stream = WeightStream(policy, device, mesh)
    require_whole(stream, policy.shape, mesh)
    mesh.world.barrier()
    export_policy(out, stream, policy)
    return policy, stream


def contract(
    device: Device, mesh: Mesh, folder: str, out: Path, parallel: dict[str, int]
) -> SimpleNamespace:
    """Try one checkpoint."""
    config = tiny_config(folder, parallel=parallel)
    policy, stream = exported(device, mesh, config, out)
    order = [
        int(name.split(".")[2]) for name, _ in stream.read() if name.startswith("model.layers.")
    ]
    mesh.world.barrier()
    shared = [buffer.is_shared() for buffer in policy.shared_buffers()]
    router_gradients = gradients_of_routers(policy, mesh)
    # Under several ranks test_layout.py has it.
    tries = mesh.world.size == 1 and not policy.shape.tied
    selective = not tries or selective_is_equal(device, mesh, config, policy)
    reference = transformers_model(folder)
    compared = differences(policy, mesh, stream, reference, out.with_name(f"{out.name}.gradients"))
    return SimpleNamespace(
        **compared,
        layer_by_layer=order == sorted(order),
        shared=all(shared) if mesh.world.size > 1 else any(shared),
        round_trip=compare_files(Path(folder), out) if device.rank == 0 else [],
        router_gradients=router_gradients,
        num_moe_layers=len(policy.shape.moe_layers),
        selective=selective,
        decayed=wrongly_decayed(policy),
    )


def wrongly_decayed(policy: Policy) -> list[str]:
    """Tensors of the checkpoint with weight decay that are vectors, and matrices without."""
    decays = {
        parameter.data_ptr(): each.optimizer.param_groups[group]["wd_mult"] > 0
        for each in chained(policy.optimizer)
        for parameter, (group, _) in each.model_param_group_index_map.items()
    }
    slots = (slot for slot in policy.slots if slot.tensor.data_ptr() in decays)
    return [
        name
        for slot in slots
        for name in slot.hf
        if decays[slot.tensor.data_ptr()] != (len(policy.shape.tensor_shapes[name]) > 1)
    ]


def selective_is_equal(device: Device, mesh: Mesh, config: Config, without: Policy) -> bool:
    """Whether gradients with selective recomputation equal those of a policy that has just made
    the same pass without, bit for bit.
    """
    setting = replace(config, model=replace(config.model, recompute="selective"))
    policy = policy_of(device, mesh, setting)
    (batch,) = batches_of(mesh, policy.shape)
    policy.forward_backward(batch)
    buffers = (one.memory.gradient_buffers() for one in (without, policy))
    return all(torch.equal(one, other) for one, other in zip(*buffers, strict=True))


def pipeline_contract(
    device: Device, mesh: Mesh, folder: str, out: Path, parallel: dict[str, int]
) -> SimpleNamespace:
    """Try one checkpoint on several stages, or with sequences divided over ranks.

    No rank computes logits of all layers by itself, so the policy's own passes are compared, with
    live routes.
    """
    config = tiny_config(folder, parallel=parallel, replay={"mode": "off"})
    policy, stream = exported(device, mesh, config, out)
    (batch,) = batches_of(mesh, policy.shape)
    reference = transformers_model(folder)
    theirs: list[torch.Tensor] = []
    entropies: list[torch.Tensor] = []
    for micro_batch in batch:
        rows = [
            reference(micro_batch.tokens_N[None, start:end], use_cache=False)
            .logits[0]
            .log_softmax(-1)
            for start, end in pairwise(micro_batch.cu_seqlens)
        ]
        rows_NV = torch.cat(rows)
        theirs.append(rows_NV.gather(-1, micro_batch.targets_N[:, None]).squeeze(-1))
        entropies.append(-(rows_NV.exp() * rows_NV).sum(-1))
    weighted = [
        (logprobs_N * micro_batch.advantages_N * micro_batch.loss_mask_N).sum()
        for logprobs_N, micro_batch in zip(theirs, batch, strict=True)
    ]
    (-torch.stack(weighted).sum() / batch[0].num_loss_tokens).backward()
    scored = policy.score(batch, mode="live")
    ours, expected = [*scored.logprobs, *scored.entropy], [*theirs, *entropies]
    pairs = zip(ours, expected, batch * 2, strict=True) if policy.reports else ()
    largest = max(
        (float((a - b.detach()[rows_of(each, mesh)]).abs().max()) for a, b, each in pairs),
        default=0.0,
    )
    policy.forward_backward(batch)
    scratch = out.with_name(f"{out.name}.gradients")
    return SimpleNamespace(
        logits=largest,
        **gradient_differences(policy, stream, reference, scratch),
        round_trip=compare_files(Path(folder), out) if device.rank == 0 else [],
        decayed=wrongly_decayed(policy),
    )


def rows_of(micro_batch: MicroBatch, mesh: Mesh) -> torch.Tensor | slice:
    """Rows of a micro-batch that this rank has."""
    if mesh.cp.size == 1:
        return slice(None)
    return zigzag_rows(micro_batch.cu_seqlens, mesh.cp.rank, mesh.cp.size)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint folder."""
    files = folder.glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def compare_files(one: Path, other: Path) -> list[str]:
    """Names of tensors that are not bit for bit the same in the files of two folders."""
    tensors = [tensors_of(folder) for folder in (one, other)]
    names = sorted(tensors[0].keys() | tensors[1].keys())

    def same(name: str) -> bool:
        a, b = (side.get(name) for side in tensors)
        return a is not None and b is not None and a.dtype == b.dtype and torch.equal(a, b)

    return [name for name in names if not same(name)]


def gradients_of_routers(policy: Policy, mesh: Mesh) -> dict[str, float]:
    """Largest entry of every router's gradient after a batch with replayed random routes."""
    (batch,) = batches_of(mesh, policy.shape)
    policy.forward_backward(batch)
    return {
        name: float(parameter.main_grad.abs().max())
        for name, parameter in policy.chunks[0].named_parameters()
        if name.endswith("router.weight")
    }


def differences(
    policy: Policy, mesh: Mesh, stream: WeightStream, reference: Any, scratch: Path
) -> dict[str, float]:
    """Compare logits, and the gradients of a random function of them and their norm.

    A tensor's difference is relative to its own largest gradient, or to 1e-3 of the largest of all
    if that is more: some gradients are zero except for rounding (a bias on all keys changes no
    softmax). All ranks have the same sequences.

    Overwrites the weights of both models: gradients go through the weight stream and through
    `save_pretrained`, which give both sides the names on disk.
    """
    generator = torch.Generator().manual_seed(11)
    sequences = [torch.randint(3, 400, (n,), generator=generator) for n in LENGTHS]
    weights_NV = torch.randn(sum(LENGTHS), policy.shape.vocab_size, generator=generator)
    theirs_NV = torch.cat(
        [reference(sequence[None], use_cache=False).logits[0] for sequence in sequences]
    )
    (theirs_NV * weights_NV).sum().backward()

    borders = [0, *torch.tensor(LENGTHS).cumsum(0).tolist()]
    (wrapped,) = policy.wrapped
    wrapped.zero_grad_buffer()
    ours_NV = wrapped(
        torch.cat(sequences)[None],
        torch.cat([torch.arange(n) for n in LENGTHS])[None],
        None,
        packed_seq_params=packed_params(borders, policy.device.torch),
    )[0]
    (ours_NV * weights_NV.chunk(mesh.tp.size, -1)[mesh.tp.rank]).sum().backward()
    policy.megatron.finalize_model_grads_func([wrapped])
    whole_NV = ours_NV.detach()
    if mesh.tp.size > 1:
        parts = [torch.empty_like(whole_NV) for _ in range(mesh.tp.size)]
        dist.all_gather(parts, whole_NV.contiguous(), group=mesh.tp.group)
        whole_NV = torch.cat(parts, -1)

    return {
        "logits": float((whole_NV - theirs_NV).abs().max()),
        **gradient_differences(policy, stream, reference, scratch, scale=1 / mesh.dp.size),
    }


def gradient_differences(
    policy: Policy, stream: WeightStream, reference: Any, scratch: Path, *, scale: float = 1.0
) -> dict[str, float]:
    """Compare the gradients of both models, the policy's times `scale`; see `differences`."""
    world = policy.mesh.world
    with cuda_type_names():
        policy.optimizer.prepare_grads()
        norm = policy.optimizer.get_grad_norm() * scale
    for own in buffers_of(policy):
        own.param_data.copy_(gathered(own) * scale)
    for frozen in policy.shared_buffers()[len(policy.parameter_buffers()) :]:
        frozen.zero_()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.copy_(parameter.grad if parameter.grad is not None else torch.zeros(()))
        for name, buffer in reference.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.zero_()
    if world.rank == 0:
        reference.save_pretrained(scratch)
        if policy.shape.renamed:
            as_ling(scratch)
    world.barrier()
    expected = {
        name: tensor
        for name, tensor in tensors_of(scratch).items()
        if not policy.shape.is_kept(name)
    }
    found = {name: tensor.clone() for name, tensor in joined(stream.read(), policy.shape)}
    assert found.keys() == expected.keys()
    world.barrier()
    sizes = {name: float(tensor.abs().max()) for name, tensor in expected.items()}
    least = 1e-3 * max(sizes.values())
    expected_norm = float(
        torch.stack([tensor.double().norm() for tensor in expected.values()]).norm()
    )
    return {
        "gradients": max(
            float((found[name] - expected[name]).abs().max()) / max(sizes[name], least)
            for name in found
        ),
        "grad_norm": abs(norm / expected_norm - 1),
    }


def expert_biases(device: Device, *, folder: str, out: str) -> None:
    """A bfloat16 policy's expert biases after updates, after a resume, and as exported."""
    mesh = build_mesh(device, tiny_config(parallel={"ep": 2}).parallel)
    config = tiny_config(folder, parallel={"ep": 2}, model={"dtype": "bfloat16"})
    policy = policy_of(device, mesh, config)
    stream = WeightStream(policy, device, mesh)
    on_disk = {
        name: tensor
        for name, tensor in tensors_of(Path(folder)).items()
        if name.endswith("e_score_correction_bias")
    }

    def same() -> bool:
        streamed = dict(stream.read())
        return all(
            streamed[name].dtype == torch.float32 and torch.equal(streamed[name], tensor)
            for name, tensor in on_disk.items()
        )

    assert len(on_disk) == 2, "the first of three layers is dense"
    assert same(), "loaded"
    (batch,) = batches_of(mesh, policy.shape)
    for _ in range(2):
        one_update(policy, batch, total_updates=4)
    assert same(), "trained"
    policy.forward_backward(batch)
    counts = [
        tensor
        for chunk in policy.chunks
        for name, tensor in chunk.named_buffers()
        if name.endswith("local_tokens_per_expert")
    ]
    assert len(counts) == len(on_disk) and not any(tensor.any() for tensor in counts)
    saved = save_checkpoint(Path(out) / "checkpoints", policy, step=2)
    for frozen in policy.shared_buffers()[len(policy.parameter_buffers()) :]:
        frozen.zero_()
    assert not same(), "overwriting them shows"
    mesh.world.barrier()
    load_checkpoint(saved, policy, device, mesh)
    assert same(), "resumed"
    export_policy(Path(out) / "export", stream, policy)
    tensors = tensors_of(Path(out) / "export")
    others = sorted(name for name, each in tensors.items() if each.dtype != torch.bfloat16)
    assert others == sorted(on_disk), "these alone are exported in float32"
