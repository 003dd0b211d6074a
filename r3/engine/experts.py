"""Copy expert weights directly into the stacked tensors of vLLM's MoE layers, past its reload.

vLLM's reload takes one matrix of one expert at a time, and for each compares its name with every
name of the layer and counts the elements it loads. A model of 48 layers and 128 experts has 18,432
such matrices: 5 to 7 seconds per weight sync, and all of them are kept until their layer is
complete. Here all experts of a layer that one policy rank has are one copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from r3.models.shape import ModelShape

# Kernels that read experts as they are loaded, and whose weights the copy below therefore makes.
_PLAIN_KERNELS = ("TRITON", "CPU")


@cache
def expert_matrices(shape: ModelShape) -> dict[str, tuple[int, int, int]]:
    """Map the name of every expert tensor to (decoder layer, expert, part).

    Parts are 0 gate, 1 up and 2 down, and their biases, if experts have some, 3, 4 and 5.
    """
    return {
        _name(shape, layer, expert, part): (layer, expert, part)
        for layer in shape.moe_layers
        for expert in range(shape.num_experts)
        for part in range(6 if shape.has_biases else 3)
    }


def expert_leaves(shape: ModelShape) -> tuple[str, ...]:
    """Names of the parameters that hold the experts of a layer in vLLM."""
    biases = ("w13_bias", "w2_bias") if shape.has_biases else ()
    return ("w13_weight", "w2_weight", *biases)


def _name(shape: ModelShape, layer: int, expert: int, part: int) -> str:
    names, (kind, piece) = shape.moe_names, divmod(part, 3)
    path = f"{names.expert.format(e=expert)}.{names.gate_up_down[piece]}"
    return f"model.layers.{layer}.{path}.{('weight', 'bias')[kind]}"


@dataclass(frozen=True, kw_only=True)
class ExpertBlock:
    """Full weights of neighbouring experts of one layer, as the policy has them.

    Attributes:
        layer: number in the decoder.
        first: number of the first expert.
        is_down: whether `tensor` is down `[n, D, F]`, or gate over up `[n, 2F, D]`.
    """

    layer: int
    first: int
    is_down: bool
    tensor: torch.Tensor

    @property
    def places(self) -> list[tuple[int, int]]:
        """(expert, part) of every matrix, in order."""
        parts = (2,) if self.is_down else (0, 1)
        experts = range(self.first, self.first + len(self.tensor))
        return [(expert, part) for expert in experts for part in parts]

    def names(self, shape: ModelShape) -> list[str]:
        """Hugging Face names of the matrices."""
        return [_name(shape, self.layer, *place) for place in self.places]

    def matrices(self, shape: ModelShape) -> Iterator[tuple[str, torch.Tensor]]:
        """Hugging Face names and matrices, as views."""
        parts = 1 if self.is_down else 2
        views = (part for full in self.tensor for part in full.chunk(parts))
        return zip(self.names(shape), views, strict=True)

    def fits(self, shape: ModelShape) -> bool:
        """Whether the tensor has the shape that `matrices` takes for granted."""
        width, hidden = shape.moe_ffn_size, shape.hidden_size
        each = (hidden, width) if self.is_down else (2 * width, hidden)
        return tuple(self.tensor.shape[1:]) == each


@dataclass(frozen=True, kw_only=True)
class StackedExperts:
    """The routed experts of one MoE layer on one rank of the engine.

    Attributes:
        w13: `[E, 2F/tp, D]`, this rank's rows of gate over its rows of up.
        w2: `[E, D, F/tp]`, this rank's columns of down.
        rank: number of this rank among the tp ranks of the engine.
        biases: of w13 `[E, 2F/tp]` and w2 `[E, D]`; None = experts have none. That of w2 is added
            by the first rank.
        alternates: rows of gate and up alternate.
        copied: the tensors that were copied, (expert, part).
    """

    w13: torch.Tensor
    w2: torch.Tensor
    rank: int
    biases: tuple[torch.Tensor, torch.Tensor] | None = None
    alternates: bool = False
    copied: set[tuple[int, int]] = field(default_factory=set)

    def copy(self, expert: int, part: int, full: torch.Tensor) -> None:
        """Copy this rank's part of a full tensor.

        Args:
            part: as of `expert_matrices`.
            full: `[F, D]` of gate or up, `[D, F]` of down; `[F]` and `[D]` of biases.
        """
        target = self.place(expert, part)
        target.copy_(self.local(full, part))
        self.copied.add((expert, part))

    def local(self, full: torch.Tensor, part: int) -> torch.Tensor:
        """Return this rank's part of a full tensor."""
        width = self.w2.shape[-1]
        if part == 5:
            return full if self.rank == 0 else torch.zeros_like(full)
        return full.narrow(1 if part == 2 else 0, self.rank * width, width)

    def place(self, expert: int, part: int) -> torch.Tensor:
        """Return where a tensor's part lies, as a view."""
        kind, piece = divmod(part, 3)
        both = (self.w13, self.w2) if kind == 0 else self.biases
        assert both is not None, "experts of this model have no biases"
        if piece == 2:
            return both[1][expert]
        return self._gate_and_up(both[0][expert], 0).select(0, piece)

    def rows_of(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of gate and up as they lie in `w13`."""
        return (
            torch.stack([gate, up], 1).flatten(0, 1) if self.alternates else torch.cat([gate, up])
        )

    def _gate_and_up(self, rows: torch.Tensor, dim: int) -> torch.Tensor:
        """View the rows of gate and up along `dim` as [..., 2, F/tp, ...]."""
        if self.alternates:
            return rows.unflatten(dim, (-1, 2)).transpose(dim, dim + 1)
        return rows.unflatten(dim, (2, -1))

    def copy_block(self, block: ExpertBlock) -> None:
        """Copy this rank's part of a block."""
        width, stop = self.w2.shape[-1], block.first + len(block.tensor)
        if block.is_down:
            target, full = self.w2, block.tensor
        else:
            target, full = self._gate_and_up(self.w13, 1), block.tensor.unflatten(1, (2, -1))
        # [n, D, F] and [n, 2, F, D]: the width that tp ranks share is dimension 2 of both.
        target[block.first : stop].copy_(full.narrow(2, self.rank * width, width))
        self.copied.update(block.places)

    @property
    def is_complete(self) -> bool:
        """Whether every tensor of every expert was copied."""
        return len(self.copied) == (6 if self.biases else 3) * len(self.w13)


def plain_experts(
    module: Any, shape: ModelShape, tensors: Mapping[str, torch.Tensor] | None = None
) -> StackedExperts | str:
    """The stacked tensors of vLLM's `RoutedExperts` if they have a plain layout, else why not.

    Args:
        tensors: the parameters that the kernels of `module` read, by their names there; None: those
            that it has.
    """
    if tensors is None:
        tensors = {leaf: getattr(module, leaf) for leaf in expert_leaves(shape)}
    method = module.quant_method
    backend = getattr(getattr(method, "unquantized_backend", None), "name", "unknown")
    if backend not in _PLAIN_KERNELS:
        return f"{type(method).__name__} with kernel {backend} has a weight layout of its own"
    parallel = module.moe_config.moe_parallel_config
    width = shape.moe_ffn_size // parallel.tp_size
    expected: dict[str, tuple[int, ...]] = {
        "w13_weight": (shape.num_experts, 2 * width, shape.hidden_size),
        "w2_weight": (shape.num_experts, shape.hidden_size, width),
    }
    if shape.has_biases:
        expected |= {
            "w13_bias": (shape.num_experts, 2 * width),
            "w2_bias": (shape.num_experts, shape.hidden_size),
        }
    # The router's bias is the gate's parameter, which is loaded there.
    own = {name: tensor for name, tensor in tensors.items() if name != "e_score_correction_bias"}
    actual = {name: tuple(tensor.shape) for name, tensor in own.items()}
    if actual != expected:
        return f"its parameters are {actual}, not {expected}"
    if not all(tensor.is_contiguous() for tensor in own.values()):
        return "its parameters are not contiguous"
    w13, w2, *biases = (tensors[leaf].data for leaf in expert_leaves(shape))
    return StackedExperts(
        w13=w13,
        w2=w2,
        rank=parallel.tp_rank,
        biases=(biases[0], biases[1]) if biases else None,
        alternates=shape.moe_names.alternates,
    )
