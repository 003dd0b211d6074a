"""The Triton kernels against plain torch, some of them against float64: errors.

TRITON_INTERPRET=1 python -m tests.unit.kernel_cases      on CPU, one program after the other
python -m tests.unit.kernel_cases compile                 for an H100, on any machine
python -m tests.unit.kernel_cases cuda                    compiled, on a GPU
"""

import json
import sys
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch

from r3.backends import expert_kernels
from r3.layers import kernels

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Slots, width of an expert, hidden size, tokens, K: nothing fits a block, and one block is too few.
SIZES = [(11, 24, 40, 5, 3), (1, 7, 9, 1, 1), (5, 1030, 1500, 3, 8), (0, 8, 16, 4, 2)]


def drawing(dtype: torch.dtype, device: str) -> tuple[torch.Generator, Callable[..., torch.Tensor]]:
    """A generator, and what draws tensors from it."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(kind).to(device)

    return generator, draw


def inputs(size: tuple[int, ...], dtype: torch.dtype, device: str) -> dict[str, tuple[Any, ...]]:
    """Arguments by kernel. Some places stand for no row."""
    slots, width, hidden, tokens, topk = size
    generator, draw = drawing(dtype, device)
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
    rounded = results(expert_kernels, name, arguments)
    if device != "cpu":
        return rounded
    wide = tuple(one.float() if one.dtype == torch.bfloat16 else one for one in arguments)
    return [
        (exact.contiguous().view(torch.int32) >> 16 << 16).view(torch.float32).bfloat16()
        if one.dtype == torch.bfloat16
        else one
        for one, exact in zip(rounded, results(expert_kernels, name, wide), strict=True)
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
    from r3.backends.cuda import triton_kernels

    for kind, size in product(DTYPES, SIZES):
        for name, arguments in inputs(size, DTYPES[kind], device).items():
            exact = expected(name, arguments, device)
            yield {
                "kernel": name,
                "dtype": kind,
                "size": size,
                "errors": errors(results(triton_kernels, name, arguments), exact),
                "wrong": errors(results(triton_kernels, name, wrong(name, arguments)), exact),
            }


# Tokens, rows of the output weight, and how many of them are no padding: one block and several.
LOGITS = [(2, 3001, 2990), (2, 9000, 9000), (2, 7, 5), (2, 6, 0)]
SCALE = 1 / 0.7


def output_layer(device: str) -> Iterator[dict[str, Any]]:
    """Errors of the output layer's sums and gradients against float64, by kernel and by torch."""
    from r3.backends.cuda import triton_kernels

    for kind, (count, width, columns) in product(DTYPES, LOGITS):
        generator = torch.Generator().manual_seed(0)
        values_NV = torch.randn(count, width, generator=generator) * 4
        # The largest moves from block to block, and its exponential alone would overflow.
        values_NV = (values_NV + torch.linspace(90, 110, width)).to(DTYPES[kind]).to(device)
        index = torch.randint(width, (count,), generator=generator).to(device)
        rows = torch.randn(4, count, generator=generator, dtype=torch.float64).to(device)
        top, total, *_ = kernels.logit_sums(values_NV.double(), index, columns, SCALE)
        # Other ranks have values_NV too, so that none of the largest is padding.
        numbers = [top.clamp_min(100.0), total, *rows]
        cases: dict[str, tuple[Any, ...]] = {
            "sums": (),
            "gradient": (*numbers[:4], None, None, False),
            "gradient with entropy": (*numbers, False),
            "gradient in halves": (*numbers, True),
        }
        for name, more in cases.items():
            given, mistaken = (
                (values_NV, at, columns, more) for at in (index, (index + 1) % width)
            )
            exact, wide = _computed(kernels, torch.float64, *given), torch.float32
            yield {
                "case": name,
                "dtype": kind,
                "size": (count, width, columns),
                "error": _relative(_computed(triton_kernels, wide, *given), exact),
                "plain": _relative(_computed(kernels, wide, *given), exact),
                "wrong": _relative(_computed(triton_kernels, wide, *mistaken), exact),
            }


def _computed(module: Any, kind: torch.dtype, *given: Any) -> torch.Tensor:
    """Sums, or the gradient if there is `more`, from numbers per token of one type.

    With float64, logits are float64 too, and nothing is divided into halves.
    """
    values_NV, index, columns, more = given
    exact = kind == torch.float64
    given_NV = values_NV.to(kind) if exact else values_NV.clone()
    if not more:
        sums: torch.Tensor = module.logit_sums(given_NV, index, columns, SCALE)
        return sums.double()
    *numbers, halves = [one.to(kind) if torch.is_tensor(one) else one for one in more]
    in_halves = bool(halves and not exact)
    result = module.logit_gradient(given_NV, index, columns, SCALE, *numbers, in_halves)
    return result.double().view(-1, *values_NV.shape).sum(0)


def _relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Largest error of a row, relative to the row."""
    return float(((found - exact).norm(dim=-1) / exact.norm(dim=-1).clamp_min(1e-30)).max())


# Rows, their width, and heads of a row for the rotation: several tiles, and widths of no power of
# two. The 130 rows are more than two programs have at a time, and are summed in several turns.
ROWS = [(130, 128, 4), (3, 1500, 5), (0, 16, 2)]


def whole_rows(device: str) -> Iterator[dict[str, Any]]:
    """Errors of norms and rotations against plain torch in float64, by kernel and by torch."""
    from r3.backends.cuda import triton_kernels

    triton_kernels._PARTIAL_SUMS = 2
    for kind, (count, width, heads) in product(DTYPES, ROWS):
        _, draw = drawing(DTYPES[kind], device)
        x, gradient, weight = draw(count, width), draw(count, width), draw(width)
        x *= torch.linspace(0.01, 30.0, max(count, 1))[:count, None].to(x)
        scale = kernels.norm(x.float(), weight.float(), 1e-3)[1]
        angles = draw(count, 1, width // 2)
        sin_and_cos = angles.cos(), angles.sin()
        turned = width // 4 * 2
        cases: dict[str, tuple[Any, ...]] = {
            "norm": (x, weight, 1e-3),
            "norm_backward": (x, weight, scale, gradient),
            "turn": (
                draw(count, heads, width),
                *(torch.cat([one, one], -1)[..., :turned].clone() for one in sin_and_cos),
                1 if width > 100 else -1,
            ),
        }
        for name, given in cases.items():
            exact = results(kernels, name, tuple(map(_as_float64, given)))
            first, second, *more = given
            mistaken = (first, second * 1.5, *more)
            yield {
                "kernel": name,
                "dtype": kind,
                "size": (count, width, heads),
                "errors": _errors(results(triton_kernels, name, given), exact),
                "plain": _errors(results(kernels, name, given), exact),
                "wrong": _errors(results(triton_kernels, name, mistaken), exact),
            }


def _as_float64(one: Any) -> Any:
    return one.double() if torch.is_tensor(one) else one


def _errors(found: list[torch.Tensor], exact: list[torch.Tensor]) -> list[float]:
    """Relative to the whole tensor, whatever its type."""
    return errors([one.double() for one in found], exact)


# Types of the kernels' arguments by name; `*` begins those that have the type of the tensors.
ARGUMENTS = {
    "both inner d_inner d_both rows logits out x weight gradient d_x cos sin": "*",
    "gates d_gates sums tops totals grads at_targets entropy_grads excesses scales": "*fp32",
    "places index": "*i64",
    "count width columns turns half": "i32",
    "scale nowhere eps": "fp32",
}
CONSTANTS: dict[str, list[dict[str, Any]]] = {
    "_weighted_swiglu": [{"block": 1024}],
    "_weighted_swiglu_backward": [{"block": 1024}],
    "_sum_rows": [{"block": 1024, "topk": 8}],
    "_logit_sums": [{"block": 4096}],
    "_norm": [{"block": 128, "tile": 32}],
    "_norm_backward": [{"block": 128, "tile": 32}],
    "_turn": [{"block": 64, "tile": 32, "way": -1}],
    "_logit_gradient": [
        {"block": 1024, "has_entropy": entropy, "halves": halves}
        for entropy in (False, True)
        for halves in (False, True)
    ],
}


def compile_all() -> dict[str, int]:
    """Bytes of each kernel for an H100, for which no GPU is needed, by name, type and constants.

    The interpreter runs Python that the compiler refuses. A number that is 1 is a constant.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from r3.backends.cuda import triton_kernels

    types = {name: kind for names, kind in ARGUMENTS.items() for name in names.split()}
    sizes = {}
    for name, variants in CONSTANTS.items():
        kernel = getattr(triton_kernels, name)
        # Of rows in tiles, one alone is as many as any other number.
        numbers = (False,) if "tile" in variants[0] else (False, True)
        for kind, one, constants in product(("bf16", "fp32"), numbers, variants):
            if one and kind == "fp32":
                continue  # what a number is does not depend on the type
            given = constants | ({"count": 1} if one and "count" in kernel.arg_names else {})
            own = {argument: f"*{kind}" for argument, each in types.items() if each == "*"}
            known = types | own | dict.fromkeys(given, "constexpr")
            signature = {argument: known[argument] for argument in kernel.arg_names}
            if constants.get("halves"):
                signature["out"] = "*bf16"
            source = ASTSource(fn=kernel, signature=signature, constexprs=given)
            made = compile(source, target=GPUTarget("cuda", 90, 32))
            sizes[f"{name} {kind} {given}"] = len(made.asm["cubin"])
    return sizes


if __name__ == "__main__":
    word = sys.argv[1] if sys.argv[1:] else "cpu"
    if word == "compile":
        found: dict[str, Any] = compile_all()
    else:
        found = {
            "experts": list(compare(word)),
            "output layer": list(output_layer(word)),
            "rows": list(whole_rows(word)),
        }
    print(json.dumps(found))
