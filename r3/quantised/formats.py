"""Quantised checkpoints: which ones are read, and how their tensors are stored.

fp8    X with one byte per value, and X_scale_inv, one factor per block of 128 x 128; experts may
       be joined in one tensor, whose first dimension has no blocks
mxfp4  X_blocks, two values per byte in groups of 32, and X_scales, one exponent per group;
       X is [experts, inputs, outputs], and they are [experts, outputs, groups of inputs, ...]
int4   X_packed, eight values of a row per int32; X_scale, one factor per group of a row; X_shape;
       and X_zero_point, one value per group, eight rows per int32, if zero is not the middle

R3 reads them as bfloat16 (`r3.quantised.values`), and trains and exports that. In all of them, the
files say which matrices are quantised: those that have such tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from r3.models.hf_config import HfConfig, ShapeError
from r3.models.sizes import Quantised

BLOCK, GROUP = 128, 32
_FP8_FORMATS = ("e4m3", "float8_e4m3fn", None)  # of DeepSeek and Qwen, of MiniMax, of others
PER_INT = 8  # values of int4 in an int32

# Data type in the files -> endings of the names that may have it.
_STORED_TYPES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "fp8": {"F8_E4M3": ("",)},
    "mxfp4": {"U8": ("_blocks", "_scales")},
    "int4": {"I32": ("_packed", "_zero_point", "_shape"), "I64": ("_shape",)},
}


def quantised_by(hf: HfConfig, *, stacks_alternate: bool) -> Quantised | None:
    """Return how a checkpoint is quantised; None = it is not. Other ways are a fault.

    Args:
        stacks_alternate: `MoeNames.alternates` of the family, whose layout mxfp4 has.
    """
    settings = hf.values.get("quantization_config")
    if not settings:
        return None
    keys = settings if isinstance(settings, Mapping) else {}
    method, block = keys.get("quant_method"), keys.get("weight_block_size")
    if method == "mxfp4" and stacks_alternate:
        return Quantised(method="mxfp4")
    why = f"quant_method {method!r}"
    if method == "compressed-tensors":
        result = _int4(keys)
        if isinstance(result, Quantised):
            return result
        why += f" and {result}"
    elif method == "fp8" and block != [BLOCK, BLOCK]:
        why += f" and weight_block_size {block!r}"
    elif method == "fp8" and keys.get("fmt") not in _FP8_FORMATS:
        why += f" and fmt {keys['fmt']!r}"
    elif method == "fp8" and stacks_alternate:
        why += " and experts whose gate and up alternate in one tensor"
    elif method == "fp8":
        return Quantised(method="fp8")
    hf.faults.append(
        f"quantization_config is not supported with {why}: R3 reads fp8 in blocks of [{BLOCK}, "
        f"{BLOCK}], mxfp4 of gpt-oss, int4 that compressed-tensors packed, and plain weights"
    )
    return None


def _int4(keys: Mapping[str, Any]) -> Quantised | str:
    """Return how compressed-tensors packed the weights, or the key that R3 does not read."""
    groups = keys.get("config_groups")
    schemes = list(groups.values()) if isinstance(groups, Mapping) else []
    if len(schemes) != 1 or not isinstance(schemes[0], Mapping):
        return f"{len(schemes)} config_groups"
    weights = schemes[0].get("weights")
    if not isinstance(weights, Mapping):
        return f"weights {weights!r}"
    # A transform rotates the weights, and actorder "group" permutes their columns.
    sparsity = keys.get("sparsity_config") or {"format": "dense"}
    for name, value, known in (
        ("format", schemes[0].get("format") or keys.get("format"), ("pack-quantized",)),
        ("sparsity_config", sparsity, ({"format": "dense"},)),
        ("transform_config", keys.get("transform_config"), (None, {})),
        ("input_activations", schemes[0].get("input_activations"), (None,)),
        ("num_bits", weights.get("num_bits"), (4,)),
        ("type", weights.get("type", "int"), ("int",)),
        ("strategy", weights.get("strategy"), ("group", "channel")),
        ("actorder", weights.get("actorder"), (None, False, "weight", "static")),
    ):
        if value not in known:
            return f"{name} {value!r}"
    group = weights.get("group_size") if weights["strategy"] == "group" else 0
    if type(group) is not int or group < (weights["strategy"] == "group"):
        return f"group_size {group!r}"
    has_zero_points = not weights.get("symmetric", True)
    return Quantised(method="int4", group=group, has_zero_points=has_zero_points)


def may_have(quantised: Quantised, name: str, dtype: str) -> bool:
    """Whether such a checkpoint may have a tensor of this name in this type, beside plain ones."""
    return name.endswith(_STORED_TYPES[quantised.method].get(dtype, ()))


def stored_types(quantised: Quantised) -> tuple[str, ...]:
    """Types that tensors of such a checkpoint may have, beside those of plain ones."""
    return tuple(_STORED_TYPES[quantised.method])


def refuse_unpaired(types: Mapping[str, str]) -> None:
    """Raise ShapeError for bytes without factors, and for factors of what is not in bytes.

    Args:
        types: name -> data type of every tensor.
    """
    for name, dtype in types.items():
        has_factors, is_fp8 = f"{name}_scale_inv" in types, dtype == "F8_E4M3"
        if is_fp8 and not has_factors:
            raise ShapeError(f"tensor {name} has data type F8_E4M3 and no {name}_scale_inv")
        if has_factors and not is_fp8:
            raise ShapeError(f"tensor {name} has {name}_scale_inv and is not of type F8_E4M3")


def stored_shapes(
    quantised: Quantised, plain: Mapping[str, tuple[int, ...]], names: Collection[str]
) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of the tensors that a checkpoint with these names has for `plain`."""
    method, shapes = quantised.method, dict[str, tuple[int, ...]]()
    for name, size in plain.items():
        if method == "mxfp4" and f"{name}_blocks" in names:
            experts, inputs, outputs = size
            grid = (experts, outputs, -(-inputs // GROUP))
            shapes |= {f"{name}_blocks": (*grid, GROUP // 2), f"{name}_scales": grid}
            continue
        if method == "int4" and f"{name}_packed" in names and len(size) == 2:
            rows, columns = size
            groups = -(-columns // (quantised.group or columns))
            shapes |= {
                f"{name}_packed": (rows, -(-columns // PER_INT)),
                f"{name}_scale": (rows, groups),
                f"{name}_shape": (2,),
            }
            if quantised.has_zero_points:
                shapes[f"{name}_zero_point"] = (-(-rows // PER_INT), groups)
            continue
        shapes[name] = size
        if method == "fp8" and len(size) > 1 and f"{name}_scale_inv" in names:
            blocks = (-(-n // BLOCK) for n in size[-2:])
            shapes[f"{name}_scale_inv"] = (*size[:-2], *blocks)
    return shapes
