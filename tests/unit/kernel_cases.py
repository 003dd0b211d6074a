"""The Triton kernels of a MoE layer against plain torch: errors as JSON.

TRITON_INTERPRET=1 python -m tests.unit.kernel_cases      on CPU, one program after the other
python -m tests.unit.kernel_cases cuda                    compiled, on a GPU
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import torch

from r3.kernels import moe

# Slots, width of an expert, hidden size, tokens, K: nothing fits a block, and one block is too few.
SIZES = [(37, 24, 40, 13, 3), (1, 7, 9, 1, 1), (11, 1030, 1500, 5, 8), (0, 8, 16, 4, 2)]


def inputs(size: tuple[int, ...], dtype: torch.dtype, device: str) -> dict[str, tuple[Any, ...]]:
    """Arguments by kernel. Some places stand for no row."""
    slots, width, hidden, tokens, topk = size
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(kind).to(device)

    both, gates = draw(slots, 2 * width), draw(slots, kind=torch.float32)
    places = torch.randint(0, slots + 2, (tokens, topk), generator=generator).to(device)
    return {
        "weighted_swiglu": (both, gates),
        "weighted_swiglu_backward": (both, gates, draw(slots, width)),
        "sum_rows": (draw(slots, hidden), places),
    }


def wrong(name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same with a mistake: gate and up exchanged, or rows added in another order."""
    first, *rest = arguments
    if name == "sum_rows":
        return first, rest[0].flip(1)
    return torch.cat(first.chunk(2, -1)[::-1], -1), *rest


def results(module: Any, name: str, arguments: tuple[Any, ...]) -> list[torch.Tensor]:
    """What a kernel returns, as a list."""
    found = getattr(module, name)(*arguments)
    return [found] if isinstance(found, torch.Tensor) else list(found)


def expected(name: str, arguments: tuple[Any, ...], device: str) -> list[torch.Tensor]:
    """What plain torch returns. The interpreter rounds to bfloat16 by cutting bits off."""
    rounded = results(moe, name, arguments)
    if device != "cpu":
        return rounded
    wide = tuple(one.float() if one.dtype == torch.bfloat16 else one for one in arguments)
    return [
        (exact.contiguous().view(torch.int32) >> 16 << 16).view(torch.float32).bfloat16()
        if one.dtype == torch.bfloat16
        else one
        for one, exact in zip(rounded, results(moe, name, wide), strict=True)
    ]


def errors(found: list[torch.Tensor], exact: list[torch.Tensor]) -> list[float]:
    """Relative to the whole tensor."""
    assert [one.dtype for one in found] == [one.dtype for one in exact]
    return [
        float((one.double() - other.double()).norm()) / (float(other.double().norm()) or 1.0)
        for one, other in zip(found, exact, strict=True)
    ]


def compare(device: str) -> Iterator[dict[str, Any]]:
    """Errors of every kernel, size and type."""
    from r3.kernels import triton_moe

    for dtype in (torch.float32, torch.bfloat16):
        for size in SIZES:
            for name, arguments in inputs(size, dtype, device).items():
                exact = expected(name, arguments, device)
                yield {
                    "kernel": name,
                    "dtype": str(dtype).removeprefix("torch."),
                    "size": size,
                    "errors": errors(results(triton_moe, name, arguments), exact),
                    "wrong": errors(results(triton_moe, name, wrong(name, arguments)), exact),
                }


if __name__ == "__main__":
    print(json.dumps(list(compare(*sys.argv[1:] or ["cpu"]))))
