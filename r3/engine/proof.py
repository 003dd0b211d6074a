"""Check that the engine's kernels read exactly the policy's weights, element by element.

Comparing the log-probabilities of a few tokens needs a tolerance for rounding: in bfloat16 the
effect of a stale tensor or of two swapped experts can stay below it. This comparison has none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from r3.engine.direct_weights import (
    DERIVED,
    Piece,
    StackedExperts,
    as_made,
    expert_leaves,
    part_of_rank,
    pieces_of,
    plain_experts,
)
from r3.models.tensors import Experts

if TYPE_CHECKING:
    from vllm import LLM

    from r3.models.shape import ModelShape


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What comparing an engine's weights with the policy's found.

    Attributes:
        equal: checkpoint tensors whose part on this rank equals the engine's.
        different: names of those that do not.
        uncompared: engine parameters in a layout that cannot be read back. With the kernels that R3
            asks for there are none.
    """

    equal: int
    different: list[str]
    uncompared: list[str]


def compare(
    llm: LLM, weights: Iterable[tuple[str | Experts, torch.Tensor]], shape: ModelShape
) -> Comparison:
    """Compare full tensors with the parameters of this rank's engine. Changes nothing.

    Args:
        weights: all tensors, under their Hugging Face names or of neighbouring experts.
    """

    def look(worker: Any) -> Comparison:
        from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

        model = worker.model_runner.get_model()
        rank = worker.vllm_config.parallel_config.rank % _tp_size(worker)
        equal, different = 0, []
        parameters: dict[str, torch.Tensor] = {}
        pieces: dict[str, list[Piece]] = {}
        experts: dict[int, tuple[StackedExperts, Callable[[torch.Tensor], torch.Tensor]]] = {}
        uncompared: list[str] = []
        modules = dict(model.named_modules())
        for name, parameter in model.named_parameters():
            path, _, leaf = name.rpartition(".")
            module = modules[path]
            if leaf in DERIVED:
                if not torch.equal(parameter, _latent(module, leaf)):
                    different.append(f"{name} (made of kv_b_proj)")
                continue
            if isinstance(module, RoutedExperts):
                is_weight = leaf in expert_leaves(shape).values()
                stacked = plain_experts(module, shape) if is_weight else "not a weight"
                if isinstance(stacked, str):
                    uncompared.append(name)
                else:
                    layer = int(name.split(".layers.")[1].split(".")[0])
                    experts[layer] = (stacked, _packing(module))
                continue
            parameters[name] = (
                _effective(module, parameter.data) if leaf == "weight" else parameter.data
            )
            plain = getattr(module, "_cpu_unpacked_conv_weight", None)
            if leaf == "weight" and plain is not None and not _holds(plain, parameters[name]):
                different.append(f"{name} (its unpacked copy)")
            for source, piece in pieces_of(name, len(parameters[name]), module, shape):
                pieces.setdefault(source, []).append(piece)

        seen: set[str] = set()
        with torch.no_grad():
            for key, full in weights:
                if isinstance(key, Experts):
                    if key.layer in experts:
                        wrong = _different(key, full, *experts[key.layer], shape)
                        equal += len(key.names(shape)) - len(wrong)
                        different += wrong
                    continue
                filled = pieces.get(key, [])
                same = bool(filled) and all(
                    _same(full, parameters[piece.parameter], piece, rank, _tp_size(worker))
                    for piece in filled
                )
                seen |= {piece.parameter for piece in filled}
                equal += same
                if not same:
                    different.append(key)
        uncompared += sorted(parameters.keys() - seen)
        return Comparison(equal=equal, different=different, uncompared=uncompared)

    return llm.collective_rpc(look)[0]


def _tp_size(worker: Any) -> int:
    return int(worker.vllm_config.parallel_config.tensor_parallel_size)


def _different(
    key: Experts,
    full: torch.Tensor,
    stacked: StackedExperts,
    packed: Callable[[torch.Tensor], torch.Tensor],
    shape: ModelShape,
) -> list[str]:
    """Names of tensors of experts whose part on this rank is not the engine's."""
    held = stacked.held[key.part]
    own, names = stacked.rows(key.part, full).to(held.dtype), key.names(shape)
    per_expert = len(names) // key.count
    return [
        name
        for i, one in enumerate(own)
        if not torch.equal(one if one.dim() == 1 else packed(one), held[key.first + i])
        for name in names[i * per_expert : (i + 1) * per_expert]
    ]


def _same(full: torch.Tensor, held: torch.Tensor, piece: Piece, rank: int, ranks: int) -> bool:
    """Whether rows of a parameter are this rank's part of a full tensor, in its own type."""
    part = held[piece.start : piece.start + piece.rows]
    full = part_of_rank(full[piece.first : piece.end], part.shape, rank, ranks)
    return torch.equal(full.to(part.dtype), part[: len(full)])


def _effective(module: Any, weight: torch.Tensor) -> torch.Tensor:
    """The weight that the layer multiplies by.

    On CPU the weights of linear layers are packed, and vLLM drops its own copy or keeps one that is
    not used. The product of the layer with the identity is its weight, exactly.
    """
    if getattr(module, "quant_method", None) is None or weight.device.type != "cpu":
        return weight
    if not hasattr(module, "cpu_linear"):  # a convolution
        return _unpacked(module, weight)
    if type(module).__name__ == "VocabParallelEmbedding":  # looked up, not multiplied
        return weight
    names = ("input_size_per_partition", "input_size", "embedding_dim")
    inputs = next(getattr(module, name) for name in names if hasattr(module, name))
    dtype = getattr(module, "params_dtype", weight.dtype)
    with torch.no_grad():
        return module.quant_method.apply(module, torch.eye(inputs, dtype=dtype), None).t()


def _unpacked(module: Any, weight: torch.Tensor) -> torch.Tensor:
    """Undo what vLLM does to the weight of a convolution where the processor has avx512_bf16.

    It moves pairs of taps. Numbers of 32 bits in place of the pairs show where each one went. If
    pairs are not what it moves, the weight is returned as it is, and equals nothing.
    """
    made = as_made(module, "weight", weight)
    pairs = torch.arange(weight.nbytes // 4, dtype=torch.int32)
    probe = torch.nn.Module()
    probe.register_buffer("weight", pairs.view(made.dtype).view(made.shape))
    module.quant_method.process_weights_after_loading(probe)
    moved = probe.weight.view(torch.int32).flatten()
    if not torch.equal(moved.sort().values, pairs):
        return weight
    plain = torch.empty_like(pairs)
    plain[moved.long()] = weight.view(torch.int32).flatten()
    return plain.view(made.dtype).view(made.shape)


def _holds(copy: torch.Tensor, weight: torch.Tensor) -> bool:
    return torch.equal(copy.flatten(), weight.flatten())


def _latent(module: Any, leaf: str) -> torch.Tensor:
    """What decoding with latent attention reads in place of kv_b_proj, as vLLM makes it at the end
    of a load.
    """
    weight = _effective(module.kv_b_proj, module.kv_b_proj.weight.data)
    rows = weight.unflatten(
        0, (module.num_heads, -1)
    )  # of keys and values, [heads, P + V, latents]
    keys, values = rows.split([module.qk_nope_head_dim, module.v_head_dim], 1)
    made = {"W_UV": values.transpose(1, 2), "W_UK_T": keys, "W_UK": keys.permute(2, 0, 1)}
    return made[leaf]


def _packing(module: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what is done to one expert's matrix before kernels read it: on CPU it is packed."""
    isa = getattr(module.quant_method.moe_kernel.fused_experts, "isa", None)
    if isa is None:
        return lambda matrix: matrix
    from vllm._custom_ops import cpu_prepack_moe_weight

    return lambda matrix: cpu_prepack_moe_weight(matrix[None].contiguous(), isa)[0]
