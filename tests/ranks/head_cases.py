"""The output layer in chunks, and a policy in bfloat16: what each rank does in test_head.py."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from r3.algo.packing import with_advantages
from r3.models.shape import ModelShape
from r3.policy import Policy
from r3.policy.logprobs import Head, logprobs_and_entropy
from r3.runtime.device import Device
from r3.runtime.mesh import Axis, build_mesh
from tests.policies import LENGTHS, Watched, batches_of, build_with_batch, full_gradients
from tests.tiny import tiny_config

TOKENS, WIDTH, VOCABULARY, TEMPERATURE = 23, 16, 37, 0.7


Errors = dict[str, float]
"""Largest difference of each output and gradient, relative to its largest value."""


def oracle(device: Device, *, masked: bool = False) -> dict[str, Errors]:
    """Compare with plain log_softmax in float64, for types and sizes of chunk.

    The world is the tp axis. 37 tokens of vocabulary do not divide by two: the last rank's slice is
    padded, with rows that would win if they counted.

    Args:
        masked: tokens have sampling masks: of a fifth of the vocabulary, some of all, one of the
            target alone, one of tokens of one slice.
    """
    axis = Axis.of("tp", dist.group.WORLD)
    rows = -(-VOCABULARY // axis.size)
    generator = torch.Generator().manual_seed(3)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    hidden_ND = normal(TOKENS, WIDTH).bfloat16().double()
    weight_VD = normal(VOCABULARY, WIDTH).bfloat16().double()
    targets_N = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    share_N, bonus_N = normal(TOKENS), normal(TOKENS)

    true = [hidden_ND.clone().requires_grad_(), weight_VD.clone().requires_grad_()]
    is_kept_NV = torch.rand(TOKENS, VOCABULARY, generator=generator) < (0.2 if masked else 2)
    is_kept_NV[3], targets_N[5], is_kept_NV[5, rows:] = False, 2, False
    is_kept_NV[7:10] = True
    is_kept_NV[torch.arange(TOKENS), targets_N] = True
    counts_N = is_kept_NV.sum(-1)
    counts_N[8:10] = 0  # the same as all
    ids = is_kept_NV[counts_N > 0].nonzero()[:, 1].int()
    kept = (counts_N.int(), ids) if masked else None

    logits_NV = true[0] @ true[1].t() / TEMPERATURE
    if masked:
        logits_NV = logits_NV.masked_fill(~is_kept_NV, -torch.inf)
    all_NV = logits_NV.log_softmax(-1)
    logprobs_N = all_NV.gather(-1, targets_N[:, None])[:, 0]
    entropy_N = -(all_NV.exp() * all_NV.masked_fill(all_NV.isinf(), 0.0)).sum(-1)
    policy_loss, bonus = (logprobs_N * share_N).sum(), (entropy_N * bonus_N).sum()
    gradients = {
        "": torch.autograd.grad(policy_loss, true, retain_graph=True),
        " of both": torch.autograd.grad(policy_loss + bonus, true),
    }
    expected = {"logprobs": logprobs_N.detach(), "entropy": entropy_N.detach()}
    for name, (hidden_grad, weight_grad) in gradients.items():
        expected |= {f"hidden{name}": hidden_grad, f"weight{name}": weight_grad}

    def errors(dtype: torch.dtype, chunk: int, fp32: bool) -> Errors:
        return found(dtype, chunk, fp32, False) | found(dtype, chunk, fp32, True)

    def found(dtype: torch.dtype, chunk: int, fp32: bool, with_bonus: bool) -> Errors:
        head = Head(
            axis=axis,
            vocab_size=VOCABULARY,
            temperature=TEMPERATURE,
            chunk_tokens=chunk,
            fp32=fp32,
            entropy_gradient=with_bonus,
        )
        padded_VD = torch.cat([weight_VD, torch.full((rows * axis.size - VOCABULARY, WIDTH), 50.0)])
        hidden = hidden_ND.to(dtype, copy=True).requires_grad_()
        weight = padded_VD.chunk(axis.size)[axis.rank].to(dtype, copy=True).requires_grad_()
        logprobs_N, entropy_N = logprobs_and_entropy(hidden, weight, targets_N, head, kept)
        assert entropy_N.requires_grad == with_bonus
        total = (logprobs_N * share_N.to(logprobs_N.dtype)).sum()
        if with_bonus:
            total = total + (entropy_N * bonus_N.to(logprobs_N.dtype)).sum()
        total.backward()
        assert hidden.grad is not None and weight.grad is not None
        slices = [torch.empty_like(weight.grad) for _ in range(axis.size)]
        dist.all_gather(slices, weight.grad)
        whole_VD = torch.cat(slices)
        assert not whole_VD[VOCABULARY:].any(), "padding learns nothing"
        of = " of both" if with_bonus else ""
        values = {
            "logprobs": logprobs_N.detach(),
            "entropy": entropy_N.detach(),
            f"hidden{of}": axis.all_reduce(hidden.grad.double()),
            f"weight{of}": whole_VD[:VOCABULARY],
        }
        return {
            name: float((value.double() - expected[name]).abs().max() / expected[name].abs().max())
            for name, value in values.items()
        }

    return {
        f"{str(dtype).removeprefix('torch.')}{' fp32' * fp32}, {chunk}": errors(dtype, chunk, fp32)
        for dtype, fp32 in (
            (torch.float64, False),
            (torch.float32, False),
            (torch.bfloat16, False),
            (torch.bfloat16, True),
        )
        for chunk in (0, 1, 5, TOKENS)
    }


def peak(device: Device, *, model: str, parallel: dict[str, int]) -> SimpleNamespace:
    """Score and train with and without chunks, and watch every tensor.

    Returns:
        Rows of logits in one tensor, and what chunks change.
        tokens: of the largest micro-batch.
        arrived: gradients of the output weight.
        rows_whole: most rows of logits in one tensor without chunks: scoring, training.
        rows_chunks: the same in chunks.
        scores: largest difference between the two.
        gradients: largest difference between the two, relative to the largest gradient.
        added: the same where products add to Megatron's buffer, as on CUDA.
        forgotten: the same if the head did not know whether its weight is the embedding.
    """
    config = tiny_config(model, parallel=parallel)
    mesh = build_mesh(device, config.parallel)
    policy = Policy(config, device, mesh, ModelShape.read(model))
    (batch,) = batches_of(mesh, policy.shape, LENGTHS * 2, micro_batch_tokens=256)
    model_chunk = policy.chunks[0]
    weight = (
        model_chunk.shared_embedding_or_output_weight()
        if policy.shape.tied
        else model_chunk.output_layer.weight
    )
    arrived: list[str] = []  # what Megatron's gradient hook on the output weight is called with
    weight.register_hook(lambda gradient: arrived.append(str(gradient.dtype)))
    whole, width = model_chunk.head, policy.shape.vocab_size // mesh.tp.size
    wide: list[int] = []  # rows of each tensor that any operation makes, if as wide as that

    def watch(_func: Any, _args: Any, made: Any) -> None:
        tensors = (each for each in tree_leaves(made) if isinstance(each, torch.Tensor))
        wide.extend(each.numel() // width for each in tensors if width in each.shape)

    rows: dict[str, list[int]] = {}
    seen: dict[str, tuple[torch.Tensor, list[torch.Tensor]]] = {}
    for name, chunk in (("whole", 0), ("chunks", 48)):
        model_chunk.head = replace(whole, chunk_tokens=chunk)
        wide.clear()
        with Watched(watch):
            scores = policy.score(batch, mode="replay")
            rows[name] = [max(wide)]
            wide.clear()
            policy.forward_backward(batch)
            rows[name].append(max(wide))
        gradients = [gradient for _, _, gradient in full_gradients(policy).values()]
        seen[name] = torch.stack([torch.cat(scores.logprobs), torch.cat(scores.entropy)]), gradients
    count = len(arrived)
    for name, tied in (("added", whole.is_embedding), ("forgotten", not whole.is_embedding)):
        model_chunk.head = replace(whole, adds_to_main_grad=True, is_embedding=tied)
        policy.forward_backward(batch)
        seen[name] = seen["whole"][0], [each for _, _, each in full_gradients(policy).values()]
    largest = max(float(gradient.abs().max()) for gradient in seen["whole"][1])

    def difference(name: str) -> float:
        pairs = zip(seen["whole"][1], seen[name][1], strict=True)
        return max(float((one - other).abs().max()) for one, other in pairs) / largest

    return SimpleNamespace(
        tokens=max(micro_batch.num_tokens for micro_batch in batch),
        micro_batches=len(batch),
        arrived=count,
        rows_whole=rows["whole"],
        rows_chunks=rows["chunks"],
        scores=float((seen["whole"][0] - seen["chunks"][0]).abs().max()),
        gradients=difference("chunks"),
        added=difference("added"),
        forgotten=difference("forgotten"),
    )


def bonus(device: Device, *, model: str, parallel: dict[str, int]) -> SimpleNamespace:
    """Step along the gradient of a loss that is the entropy bonus alone, and measure entropy.

    Returns:
        The entropy bonus alone.
        measured: change of the mean entropy along the loss's gradient, per unit of length.
        promised: what the gradient says it is.
    """
    coef = 0.5
    config = tiny_config(model, parallel=parallel, algo={"entropy_coef": coef})
    mesh, policy, batch = build_with_batch(device, config)
    # Without advantages only the bonus is left.
    batch = with_advantages(batch, torch.zeros(len(LENGTHS)))
    metrics = policy.forward_backward(batch)
    gradients = {name: gradient for name, (_, _, gradient) in full_gradients(policy).items()}
    # A replicated weight has the same gradient on all ranks and counts once.
    squares = sum(
        float(gradients[slot.name].double().square().sum())
        for slot in policy.slots
        if slot.kind != "replicated" or mesh.tp.rank == 0
    )
    norm = float(mesh.tp.all_reduce(torch.tensor(squares)).sqrt())

    def entropy_at(step: float) -> float:
        """Mean entropy after a step along the gradient; the weights are put back."""
        for sign in (1.0, -1.0):
            for slot in policy.slots:
                slot.tensor.add_(gradients[slot.name], alpha=sign * step / norm)
            if sign > 0:
                scores = policy.score(batch, mode="replay")
        masks = torch.cat(scores.loss_mask).double()
        return float((torch.cat(scores.entropy).double() * masks).sum() / masks.sum())

    step, entropy = 0.01, entropy_at(0.0)
    return SimpleNamespace(
        # One rank of tp reports it.
        loss=metrics["loss/total"].total if policy.reports else -coef * entropy,
        entropy=entropy,
        measured=(entropy_at(step) - entropy_at(-step)) / (2 * step),
        promised=-norm / coef,
    )


def bfloat16(device: Device, *, model: str) -> dict[str, SimpleNamespace]:
    """Score and train in float32, in bfloat16, and in bfloat16 with a float32 head.

    Returns:
        A policy against the float32 one with the same weights and routes.
        logprobs: mean difference.
        loss: relative difference.
        cosine: between the gradients.
        norm: ratio of the gradients' norms.
        weights, states, router, scores, gradient: dtypes of these tensors.
    """
    figures: dict[str, SimpleNamespace] = {}
    true: tuple[torch.Tensor, torch.Tensor, float] | None = None
    mesh = build_mesh(device, tiny_config(model).parallel)
    for name, dtype, fp32_head in (
        ("float32", "float32", False),
        ("bfloat16", "bfloat16", False),
        ("bfloat16, float32 head", "bfloat16", True),
    ):
        config = tiny_config(
            model, model={"dtype": dtype, "fp32_head": fp32_head}, algo={"correction": "token_tis"}
        )
        policy = Policy(config, device, mesh, ModelShape.read(model))
        for buffer in policy.parameter_buffers():
            buffer.copy_(buffer.bfloat16())  # the same weights in all three
        (batch,) = batches_of(mesh, policy.shape)
        types: dict[str, set[str]] = {"router": set(), "states": set()}

        def look(_module: Any, inputs: Any, output: Any, types: Any = types) -> None:
            types["states"].add(str(inputs[0].dtype))
            types["router"] |= {str(output[0].dtype)}

        for layer in policy.chunks[0].decoder.layers:
            if hasattr(layer.mlp, "router"):
                layer.mlp.router.register_forward_hook(look)
        scores = policy.score(batch, mode="replay")
        metrics = policy.forward_backward(batch)
        mask_N = torch.cat(scores.loss_mask) > 0
        logprobs_N = torch.cat(scores.logprobs)[mask_N]
        found = full_gradients(policy)
        gradient = torch.cat([found[key][2].flatten() for key in sorted(found)])
        loss = metrics["loss/total"].total
        if true is None:
            true = logprobs_N, gradient, loss
        figures[name] = SimpleNamespace(
            logprobs=float((logprobs_N - true[0]).abs().mean()),
            loss=abs(loss - true[2]) / abs(true[2]),
            cosine=float(torch.cosine_similarity(gradient.double(), true[1].double(), dim=0)),
            norm=float(gradient.norm() / true[1].norm()),
            weights=str(policy.parameter_buffers()[0].dtype),
            states=sorted(types["states"]),
            router=sorted(types["router"]),
            scores=str(logprobs_N.dtype),
            gradient=str(gradient.dtype),
        )
    return figures
