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

from r3.models.tensors import Experts

if TYPE_CHECKING:
    from r3.models.shape import ModelShape

# Kernels that read experts as they are loaded, and whose weights the copy below therefore makes.
_PLAIN_KERNELS = ("TRITON", "CPU")


def expert_leaves(shape: ModelShape) -> dict[str, str]:
    """The parameters in vLLM that hold the experts of a layer, by the part that fills them."""
    leaves = {"linear_fc1.weight": "w13_weight", "linear_fc2.weight": "w2_weight"}
    biases = {"linear_fc1.bias": "w13_bias", "linear_fc2.bias": "w2_bias"}
    return leaves | biases if shape.has_biases else leaves


@cache
def expert_layers(shape: ModelShape) -> dict[str, int]:
    """Map the name of every tensor of an expert in the checkpoint to its decoder layer."""
    return {
        name: layer
        for layer in shape.moe_layers
        for part in expert_leaves(shape)
        for name in Experts(layer=layer, first=0, count=shape.num_experts, part=part).names(shape)
    }


def matrices(
    experts: Experts, full: torch.Tensor, shape: ModelShape
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and tensors of single experts, as the checkpoint has them."""
    names = experts.names(shape)
    each = len(names) // experts.count
    yield from zip(names, (part for one in full for part in one.chunk(each)), strict=True)


@dataclass(frozen=True, kw_only=True)
class StackedExperts:
    """The routed experts of one MoE layer on one rank of the engine.

    Attributes:
        held: by part: `[E, 2F/tp, D]`, this rank's rows of gate over its rows of up; `[E, D,
            F/tp]`, its columns of down; and where experts have biases, `[E, 2F/tp]` and `[E, D]`,
            of which the first rank adds the second.
        rank: number of this rank among the tp ranks of the engine.
        alternates: rows of gate and up alternate.
        copied: what was copied, (part, expert).
    """

    held: Mapping[str, torch.Tensor]
    rank: int
    alternates: bool = False
    copied: set[tuple[str, int]] = field(default_factory=set)

    def copy(self, experts: Experts, full: torch.Tensor) -> None:
        """Copy this rank's part of a full tensor."""
        stop = experts.first + experts.count
        target = self.held[experts.part][experts.first : stop]
        if experts.part.startswith("linear_fc1"):
            split = (-1, 2) if self.alternates else (2, -1)
            target = target.unflatten(1, split)
            target = target.transpose(1, 2) if self.alternates else target
        target.copy_(self._own(experts.part, full))
        self.copied.update((experts.part, e) for e in range(experts.first, stop))

    def rows(self, part: str, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a full tensor as it lies in `held`."""
        own = self._own(part, full)
        if part.startswith("linear_fc1"):
            own = (own.transpose(1, 2) if self.alternates else own).flatten(1, 2)
        return own

    def _own(self, part: str, full: torch.Tensor) -> torch.Tensor:
        """This rank's part: `[n, 2, F/tp, ...]` of gate and up, `[n, D, F/tp]`, `[n, D]`."""
        if part == "linear_fc2.bias":
            return full if self.rank == 0 else torch.zeros_like(full)
        if part.startswith("linear_fc1"):
            full = full.unflatten(1, (2, -1))
        width = self.held["linear_fc2.weight"].shape[-1]
        return full.narrow(2, self.rank * width, width)

    @property
    def is_complete(self) -> bool:
        """Whether every tensor of every expert was copied."""
        return len(self.copied) == sum(map(len, self.held.values()))


def plain_experts(
    module: Any, shape: ModelShape, tensors: Mapping[str, torch.Tensor] | None = None
) -> StackedExperts | str:
    """The stacked tensors of vLLM's `RoutedExperts` if they have a plain layout, else why not.

    Args:
        tensors: the parameters that the kernels of `module` read, by their names there; None: those
            that it has.
    """
    if tensors is None:
        tensors = {leaf: getattr(module, leaf) for leaf in expert_leaves(shape).values()}
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
    return StackedExperts(
        held={part: tensors[leaf].data for part, leaf in expert_leaves(shape).items()},
        rank=parallel.tp_rank,
        alternates=shape.moe_names.alternates,
    )
