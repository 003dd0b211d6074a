"""Quantised checkpoints: which ones are read, and how their tensors are stored.

fp8    X with one byte per value, and X_scale_inv, one factor per block of 128 x 128
mxfp4  X_blocks, two values per byte in groups of 32, and X_scales, one exponent per group;
       X is [experts, inputs, outputs], and they are [experts, outputs, groups of inputs, ...]

R3 reads them as bfloat16 (`r3.models.dequantise`), and trains and exports that.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal

from r3.models.hf_config import HfConfig

Quantised = Literal["", "fp8", "mxfp4"]
BLOCK, GROUP = 128, 32


def quantised_by(hf: HfConfig, *, stacks_alternate: bool) -> Quantised:
    """Return how a checkpoint is quantised; empty = it is not. Other ways are a fault.

    Args:
        stacks_alternate: `MoeNames.alternates` of the family, whose layout mxfp4 has.
    """
    settings = hf.values.get("quantization_config")
    if not settings:
        return ""
    keys = settings if isinstance(settings, Mapping) else {}
    method, block = keys.get("quant_method"), keys.get("weight_block_size")
    if method == "mxfp4" and stacks_alternate:
        return "mxfp4"
    if method == "fp8" and block == [BLOCK, BLOCK] and keys.get("fmt", "e4m3") == "e4m3":
        return "fp8"
    hf.faults.append(
        f"quantization_config is not supported with quant_method {method!r} and weight_block_size "
        f"{block!r}: R3 reads fp8 in blocks of [{BLOCK}, {BLOCK}], and mxfp4 of gpt-oss"
    )
    return ""


def quantised_shapes(
    method: Quantised, plain: Mapping[str, tuple[int, ...]], found: Collection[str]
) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of the tensors that a checkpoint with these names has for `plain`."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, size in plain.items():
        if method == "mxfp4" and f"{name}_blocks" in found:
            experts, inputs, outputs = size
            groups = (experts, outputs, -(-inputs // GROUP))
            shapes |= {f"{name}_blocks": (*groups, GROUP // 2), f"{name}_scales": groups}
            continue
        shapes[name] = size
        if method == "fp8" and f"{name}_scale_inv" in found:
            shapes[f"{name}_scale_inv"] = tuple(-(-n // BLOCK) for n in size)
    return shapes
