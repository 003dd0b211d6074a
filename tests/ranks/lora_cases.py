"""Low-rank adapters against transformers' own model with W + s B A, under several layouts."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from r3.config import Config
from r3.layers import local_tokens
from r3.lora import (
    Adapter,
    adapted_tensors,
    adapter_config,
    adapter_fault,
    factors,
    quantised_tensors,
    write_adapter,
)
from r3.policy import NONE_MADE, Policy, learning_rate, policy_loss
from r3.run import load_checkpoint
from r3.runtime.device import Device
from r3.runtime.mesh import build_mesh
from r3.sync import WeightStream
from r3.types import Batch
from tests.policies import (
    batches_of,
    build,
    experts_as_on_cuda,
    export_policy,
    one_update,
    policy_of,
    same_state,
    save_checkpoint,
)
from tests.tiny import tiny_config
from tests.world import forget_mesh

TOTAL = 4  # updates of the schedule


TARGETS = ("attention", "experts", "shared", "dense", "router", "head")


def settings(path: str, targets: tuple[str, ...], **sections: dict[str, Any]) -> Config:
    """Adapters of two ranks with a scale that is not 1; routers choose on both sides."""
    lora = {"rank": 4, "expert_rank": 2, "alpha": 6.0, "targets": targets}
    own: dict[str, Any] = {"lora": lora, "replay": {"mode": "off"}, "train": {"lr": 1e-2}}
    merged = {name: own.get(name, {}) | sections.get(name, {}) for name in own | sections}
    return tiny_config(path, **merged)


@torch.no_grad()
def fill_b(policy: Policy) -> None:
    """Set every B, so that A has a gradient, to values that no layout changes."""
    for each in adapters(policy):
        rows = policy.shape.tensor_shapes[each.name.format(e=0)][0]
        experts = policy.shape.num_experts if each.is_expert else 1
        generator = torch.Generator().manual_seed(len(each.name) + each.part)
        full = 0.02 * torch.randn(experts, rows, each.b.shape[-1], generator=generator)
        if each.is_expert:
            full = full.chunk(policy.mesh.ep.size)[policy.mesh.ep.rank]
        if each.shards["b"] is not None:
            full = full.chunk(each.axis.size, -2)[each.axis.rank]
        each.b.copy_(full if each.is_expert else full[0])
    policy.merge_adapters()


def adapters(policy: Policy) -> list[Adapter]:
    """All pairs of this rank."""
    return [each for chunk in policy.chunks for each in chunk.lora.adapters]


def oracle(device: Device, *, model: str, targets: tuple[str, ...], out: str) -> SimpleNamespace:
    """One update of a single rank and of transformers.

    Returns:
        Relative errors (Frobenius) against autograd through transformers with W + s B A.
        gradient: of the worst factor.
        moved: of what one AdamW step adds, over all factors.
        norm: of the gradient norm.
        pairs: matrices with adapters.
        buffers, state: values in gradient buffers and in the optimizer.
        values: values of all factors.
        base_kept: tensors without an adapter, and the base, have not changed.
        started: a policy that starts from the exported adapter has the weights of this one, and so
            has its reference policy after an update.
    """
    config = settings(model, tuple(targets))
    mesh, policy = build(device, config)
    began = {slot.name: slot.tensor.clone() for slot in policy.slots}
    fill_b(policy)
    (batch,) = batches_of(mesh, policy.shape)
    pairs = {
        name: (a.clone().requires_grad_(), b.clone().requires_grad_())
        for chunk in policy.chunks
        for name, a, b in factors(chunk.lora)
    }
    loss = transformers_loss(config, policy, batch, pairs)
    loss.backward()
    policy.forward_backward(batch)
    ours = {
        name: (a.clone(), b.clone())
        for name, a, b in _each(policy, lambda tensor: tensor.main_grad)
    }
    errors = [
        float((mine - theirs.grad).norm() / theirs.grad.norm())
        for name, pair in pairs.items()
        for mine, theirs in zip(ours[name], pair, strict=True)
        if theirs.grad.norm() > 1e-6  # an expert without tokens has none
    ]
    leaves = [leaf for pair in pairs.values() for leaf in pair]
    before = [leaf.detach().clone() for leaf in leaves]
    norm = torch.nn.utils.clip_grad_norm_(leaves, config.train.clip_grad)
    train = config.train
    torch.optim.AdamW(
        leaves,
        lr=learning_rate(0, TOTAL, train),
        betas=(train.beta1, train.beta2),
        eps=1e-8,
        weight_decay=train.weight_decay,
    ).step()
    update, _ = one_update(policy, batch, total_updates=TOTAL)
    moved = [x for _, a, b in _each(policy, lambda tensor: tensor.detach()) for x in (a, b)]
    expected = [leaf.detach() - old for leaf, old in zip(leaves, before, strict=True)]
    found = [new - old for new, old in zip(moved, before, strict=True)]
    off = torch.cat([(x - y).flatten() for x, y in zip(found, expected, strict=True)])
    whole = torch.cat([x.flatten() for x in expected])
    with policy.reference_weights():
        kept = all(torch.equal(slot.tensor, began[slot.name]) for slot in policy.slots)
    return SimpleNamespace(
        gradient=max(errors),
        moved=float(off.norm() / whole.norm()),
        norm=abs(update.grad_norm / float(norm) - 1),
        pairs=len(pairs),
        buffers=sum(buffer.numel() for buffer in policy.memory.gradient_buffers()),
        state=sum(tensor.numel() for _, tensor in policy.memory.optimizer_tensors()),
        values=sum(x.numel() for x in moved),
        base_kept=kept,
        started=_starts_from(policy, batch, config, Path(out)),
    )


def _starts_from(policy: Policy, batch: Batch, config: Config, folder: Path) -> bool:
    ranks = adapted_tensors(policy.shape, config.lora)
    facts = adapter_config(policy.shape, config.lora, ranks, config.model.path)
    write_adapter(folder, factors(policy.chunks[0].lora), facts, config.lora)
    lora = replace(config.lora, start=str(folder))
    assert adapter_fault(lora.start, policy.shape, ranks) == ""
    assert "is no folder of" in adapter_fault(str(folder / "x"), policy.shape, ranks)
    config = replace(config, lora=lora)
    lean = Policy(config, policy.device, policy.mesh, policy.shape)
    with pytest.raises(AssertionError, match="no reference"), lean.reference_weights():
        pass  # it has no copy of the adapter
    config = replace(config, algo=replace(config.algo, kl_coef=0.1, kl_in="reward"))
    then = Policy(config, policy.device, policy.mesh, policy.shape)

    def same() -> bool:
        slots = zip(policy.slots, then.slots, strict=True)
        return all(torch.equal(x.tensor, y.tensor) for x, y in slots)

    began = same()
    one_update(then, batch, total_updates=TOTAL)
    moved = not same()
    with then.reference_weights():
        return began and moved and same()


def _each(policy: Policy, of: Any) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """(matrix of the checkpoint, what `of` takes of A, of B), experts one by one."""
    found = []
    for each in adapters(policy):
        a, b = of(each.a), of(each.b)
        if each.is_expert:
            found += [(each.name.format(e=e), a[e], b[e]) for e in range(len(a))]
        else:
            found.append((each.name, a, b))
    return found


def transformers_loss(
    config: Config, policy: Policy, batch: Batch, pairs: dict[str, Any]
) -> torch.Tensor:
    """The loss of transformers' model with W + s B A in place of W."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
    names = policy.shape.moe_names

    def product(name: str) -> torch.Tensor:
        a, b = pairs[name]
        return config.lora.scale(len(a)) * (b @ a)

    weights: dict[str, torch.Tensor] = {}
    for name, value in model.named_parameters():
        value = value.detach()
        last, prefix = name.rpartition(".")[2], ".".join(name.split(".")[:3])
        if name in pairs:
            weights[name] = value + product(name)
        elif last in ("gate_up_proj", "down_proj"):  # experts as one tensor
            parts = names.gate_up_down[:2] if last == "gate_up_proj" else names.gate_up_down[2:]
            weights[name] = value + torch.stack(
                [
                    torch.cat([product(f"{prefix}.{expert}.{part}.weight") for part in parts])
                    for expert in (names.expert.format(e=e) for e in range(len(value)))
                ]
            )
        else:
            weights[name] = value
    total = torch.zeros(())
    for micro_batch in batch:
        tokens = local_tokens(micro_batch, policy.mesh.cp, policy.device.torch)
        borders = micro_batch.cu_seqlens
        rows = [
            torch.func.functional_call(model, weights, (tokens.tokens_N[None, start:end],))
            .logits[0]
            .div(config.rollout.temperature)
            .log_softmax(-1)
            for start, end in pairwise(borders)
        ]
        logprobs_N = torch.cat(rows).gather(-1, tokens.targets_N[:, None])[:, 0]
        loss, _ = policy_loss(config, tokens, policy.mesh.cp, logprobs_N, NONE_MADE)
        total = total + loss
    return total


def quantised(
    device: Device, *, model: str, out: str, rows: dict[str, Any]
) -> list[SimpleNamespace]:
    """Compare policies with quantised bases, one row after the other."""
    return [
        _quantised(
            device, settings(model, TARGETS, model=row, replay={"mode": "r3"}), Path(out) / name
        )
        for name, row in rows.items()
    ]


def _quantised(device: Device, config: Config, out: Path) -> SimpleNamespace:
    """Compare a policy with a quantised base with one that starts from its exported weights.

    Returns:
        What of both agrees.
        same: gradients, norm and weights after an update are the same bit for bit.
        from_model: gradients are the same as those of the unquantised model.
        reference: weights of the reference policy are the exported ones, and the policy's are the
            same bit for bit afterwards.
        error: of the exported weights of layers, relative to the model's (Frobenius).
        resident: bytes of the policy's matrices of layers after an offload, per byte of `dtype`.
    """
    mesh, policy = build(device, config)
    stream = WeightStream(policy, device, mesh)
    export_policy(out, stream, policy)
    exported = dict(stream.read())

    def updated(then: Policy) -> list[torch.Tensor]:
        fill_b(then)
        (batch,) = batches_of(mesh, then.shape)
        then.forward_backward(batch)
        found = [x.clone() for _, a, b in _each(then, lambda x: x.main_grad) for x in (a, b)]
        update, _ = one_update(then, batch, total_updates=TOTAL)
        after = WeightStream(then, device, mesh).read()
        return [*found, torch.tensor(update.grad_norm), *(x.clone() for _, x in after)]

    plain = policy_of(device, mesh, replace(config, model=replace(config.model, base="dtype")))
    copied = replace(plain.config, model=replace(plain.config.model, path=str(out)))
    ours, other = updated(policy), updated(plain)
    same = updated(policy_of(device, mesh, copied))
    with plain.reference_weights():
        model = {name: tensor.clone() for name, tensor in WeightStream(plain, device, mesh).read()}
    with policy.reference_weights():
        reference = all(torch.equal(x, exported[name]) for name, x in stream.read())
    after = [tensor for _, tensor in stream.read()]
    names = quantised_tensors(policy.shape)
    off = sum(float((exported[name] - model[name]).float().square().sum()) for name in names)
    policy.offload()
    made = [made for chunk in policy.chunks for made in chunk.lora.bases if made.layer]
    held = sum(
        made.base.values.nbytes + made.base.scales.nbytes + made.weight.untyped_storage().nbytes()
        for made in made
    )
    forget_mesh()
    return SimpleNamespace(
        same=len(ours) == len(same) and all(map(torch.equal, ours, same)),
        from_model=all(map(torch.equal, ours, other)),
        reference=reference and all(map(torch.equal, after, ours[-len(after) :])),
        error=(off / sum(float(model[name].float().square().sum()) for name in names)) ** 0.5,
        resident=held / sum(made.weight.nbytes for made in made),
    )


def layouts(
    device: Device, *, model: str, targets: tuple[str, ...], out: str, rows: dict[str, Any]
) -> dict[str, SimpleNamespace]:
    """Train under several layouts, one after the other, and write the weights of each."""
    targets = tuple(targets)
    found: dict[str, SimpleNamespace] = {}
    last = None
    for name, row in rows.items():
        given = dict(row)
        given["model"] = {"experts": experts_as_on_cuda(given.pop("experts", "auto"))} | given.get(
            "model", {}
        )
        config = settings(model, targets, **given)
        found[name] = _in_layout(
            device, config, Path(out) / name, last if config.model.base == "dtype" else None
        )
        if config.lora.targets == targets and config.model.base == "dtype":
            last = Path(out) / name
        forget_mesh()
    return found


def _in_layout(device: Device, config: Config, out: Path, other: Path | None) -> SimpleNamespace:
    """Make two updates under one layout, of which the second is made by a resumed policy too.

    Returns:
        Two updates under one layout.
        grad_norm: of the first update.
        resumed: weights and optimizer are the same bit for bit after the second update.
        rewritten: the resumed policy has the weights of the saved one before that update.
        reference: after scoring with the reference policy, the weights are the same bit for bit.
        without_base: every tensor of the checkpoint is of an adapter or of the optimizer.
        from_other: largest |difference| of the weights after loading the checkpoint of the row
            before, from those of that row; its layout is another one.
    """
    mesh = build_mesh(device, config.parallel)
    policy = policy_of(device, mesh, config)
    fill_b(policy)
    (batch,) = batches_of(mesh, policy.shape, micro_batch_tokens=96)
    update, _ = one_update(policy, batch, total_updates=TOTAL)
    stream = WeightStream(policy, device, mesh)
    tensors = {name: tensor.clone() for name, tensor in stream.read()}
    mesh.world.barrier()
    if device.rank == 0:
        out.mkdir(parents=True)
        torch.save(tensors, out / "weights.pt")
    with policy.reference_weights():
        pass
    mesh.world.barrier()  # ranks read each other's weights
    reference = all(torch.equal(tensors[name], again) for name, again in stream.read())
    mesh.world.barrier()
    saved = save_checkpoint(out, policy, step=1)
    resumed = Policy(config, device, mesh, policy.shape)
    load_checkpoint(saved, resumed, device, mesh)
    rewritten = same_state(policy, resumed)
    for each in (policy, resumed):
        each.offload()
        each.onload()
        one_update(each, batch, total_updates=TOTAL)
    same = same_state(policy, resumed)
    from_other = 0.0
    if other:
        load_checkpoint(other / "step_000001", resumed, device, mesh)
        expected = torch.load(other / "weights.pt")
        again = WeightStream(resumed, device, mesh).read()  # waits for all ranks to be made
        from_other = max(float((x - expected[name]).abs().max()) for name, x in again)
        mesh.world.barrier()
    return SimpleNamespace(
        grad_norm=update.grad_norm,
        resumed=same,
        rewritten=rewritten,
        reference=reference,
        without_base=all(name.startswith(("lora.", "optimizer.")) for name in tensors_in(saved)),
        from_other=from_other,
    )


def tensors_in(saved: Path) -> list[str]:
    """Names of the tensors in a checkpoint."""
    found = FileSystemReader(saved).read_metadata().state_dict_metadata
    return [name for name, each in found.items() if isinstance(each, TensorStorageMetadata)]


def recomputed_stage(device: Device, *, model: str) -> int:
    """Replay over a quantised base, recomputed in a pipeline: rows of routes that were replayed."""
    model_settings = {"base": "int8", "recompute": "full"}
    config = settings(
        model, ("attention",), model=model_settings, parallel={"pp": 2}, replay={"mode": "r3"}
    )
    mesh = build_mesh(device, config.parallel)
    policy = policy_of(device, mesh, config)
    layers = policy.replay.layers
    (batch,) = batches_of(mesh, policy.shape, micro_batch_tokens=96, layers=layers)
    _, metrics = one_update(policy, batch, total_updates=TOTAL)
    return int(metrics["routing/rows_replayed"].slots)
