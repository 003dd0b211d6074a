"""Which matrices of a model get low-rank adapters, and their ranks: `lora` and `train.freeze`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from r3.config import Config, LoraConfig, ParallelConfig
from r3.lora.freeze import frozen_tensors
from r3.models.files import header_of
from r3.models.hub import is_hub
from r3.models.shape import ModelShape, ShapeError
from r3.models.tensors import conversion_rules

BLOCK = 128
"""Values of a quantised base that share a factor."""

# The start of Megatron's name inside a layer -> the target.
_OF_LAYER = {
    "self_attention.": "attention",
    "mlp.linear_fc": "dense",
    "mlp.shared_experts.linear_fc": "shared",
    "mlp.router.weight": "router",
}


# Keys of PEFT's adapter_config.json for adapters that are not W + scale * B A, with tensors like
# those of plain ones.
_OTHER_METHODS = (
    *("use_dora", "use_qalora", "use_bdlora", "alora_invocation_tokens", "kasa_config"),
    *("monteclora_config", "arrow_config", "layer_replication"),
)
# Kinds of `init_lora_weights` that subtract from W what B A begins with. PEFT does so again when it
# loads such an adapter.
_CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


def matrices(shape: ModelShape) -> dict[str, str]:
    """Return the target of each Hugging Face tensor that may have an adapter."""
    rules = conversion_rules(shape)
    targets = {
        f"model.layers.{n}.{part}": target
        for n, layer in enumerate(rules.layers)
        for suffix, rule in layer.items()
        for start, target in _OF_LAYER.items()
        if suffix.startswith(start)
        for part, size in rule.hf.items()
        if len(size) == 2
    }
    targets |= {
        f"model.layers.{n}.{part.format(e=e)}": "experts"
        for n in shape.moe_layers
        for e in range(shape.num_experts)
        for rule in rules.expert.values()
        for part, size in rule.hf.items()
        if len(size) == 2
    }
    if not shape.tied:
        targets |= dict.fromkeys(rules.top["output_layer.weight"].hf, "head")
    return targets


def quantised_tensors(shape: ModelShape) -> set[str]:
    """Return the Hugging Face tensors that a quantised base has in one byte per value."""
    return {name for name, target in matrices(shape).items() if target not in ("router", "head")}


def adapted_tensors(
    shape: ModelShape, lora: LoraConfig, freeze: Sequence[str] = ()
) -> dict[str, int]:
    """Return the rank of the adapter of each Hugging Face tensor that has one.

    Raises:
        ValueError: rule and fix: a target is not a part of this model, or every target is frozen.
    """
    if not lora.rank:
        return {}
    of_target = matrices(shape)
    for target in lora.targets:
        # The default names the matrices of every kind of model.
        if target not in of_target.values() and lora.targets != LoraConfig().targets:
            rule = f"include {target}, which this model does not have"
            if target == "head" and shape.tied:
                rule = "include head, which is the embedding too in this model (tied)"
            there = [name for name in dict.fromkeys(of_target.values()) if name in lora.targets]
            raise ValueError(rule, f"use {' '.join(there) or 'attention'}")
    frozen = frozen_tensors(shape, freeze)
    adapted = {
        name: lora.rank_of(target)
        for name, target in of_target.items()
        if target in lora.targets and name not in frozen
    }
    if not adapted:
        if lora.targets:
            raise ValueError("leave nothing to train beside train.freeze", "freeze less")
        raise ValueError("is empty", "add a target, such as attention")
    return adapted


def ranks_of(config: Config, shape: ModelShape) -> dict[str, int]:
    """Return the ranks of `adapted_tensors` under the settings of a run; none without adapters."""
    return adapted_tensors(shape, config.lora, config.train.freeze)


def adapter_fault(folder: str, shape: ModelShape, ranks: Mapping[str, int]) -> str:
    """Why the adapter in a folder does not fit the model and these ranks; "" if it does."""
    place = Path(folder)
    try:
        config = json.loads((place / "adapter_config.json").read_bytes())
        tensors, _ = header_of(place / "adapter_model.safetensors")
    except (OSError, ValueError, ShapeError) as error:
        return f"is no folder of a PEFT adapter: {error}"
    if config.get("peft_type") != "LORA":
        return f"is no LoRA adapter, but {config.get('peft_type')}"
    if others := [key for key in _OTHER_METHODS if config.get(key)]:
        return f"is no plain LoRA adapter: it has {others[0]}"
    initial = str(config.get("init_lora_weights"))
    if initial.startswith(_CHANGE_THE_BASE):
        return f"belongs to other base weights: init_lora_weights {initial} changed the model's"
    expected: dict[str, tuple[int, int]] = {}
    for name, rank in ranks.items():
        rows, width = shape.tensor_shapes[name]
        a, b = factor_names(name)
        expected |= {a: (rank, width), b: (rows, rank)}
    differing = [
        name
        for name in sorted({**expected, **tensors})
        if name not in tensors or tuple(tensors[name]["shape"]) != expected.get(name)
    ]
    return f"differs in {len(differing)} tensors, such as {differing[0]}" if differing else ""


def other_base(folder: str, path: str) -> str:
    """Return the base that an adapter's file names if that is not the model; "" if it is.

    Copies of a model are told by the last part of their name, as far as one is not here.
    """
    config = json.loads((Path(folder) / "adapter_config.json").read_bytes())
    named = str(config.get("base_model_name_or_path") or "")
    if Path(named).is_dir() and Path(path).is_dir():
        return "" if Path(named).samefile(path) else named
    return "" if not named or _last_name(named) == _last_name(path) else named


def _last_name(model: str) -> str:
    """OWNER/Name, hub:OWNER/NAME@REVISION, a folder or a cache of the hub -> name."""
    cached = re.search(r"models--[^/]+?--([^/]+)/snapshots/", model)
    name = cached[1] if cached else Path(model).resolve().name
    return (name.partition("@")[0] if is_hub(model) else name).lower()


def scale_in(config: Mapping[str, Any], name: str) -> float:
    """What the product of a matrix is multiplied by, by the content of adapter_config.json."""
    module = name.removesuffix(".weight")

    def value(key: str, of_others: float) -> float:
        patterns = config.get(key) or {}
        matching = (x for part, x in patterns.items() if re.match(rf"(.*\.)?({part})$", module))
        return next(matching, of_others)

    rank = value("rank_pattern", config["r"])
    return value("alpha_pattern", config["lora_alpha"]) / (
        rank**0.5 if config.get("use_rslora") else rank
    )


def factor_names(name: str) -> tuple[str, str]:
    """Names of A and B in PEFT's file, given that of the checkpoint's matrix."""
    module = f"base_model.model.{name.removesuffix('.weight')}"
    return f"{module}.lora_A.weight", f"{module}.lora_B.weight"


def untrained_chunk(
    shape: ModelShape, parallel: ParallelConfig, adapted: Iterable[str]
) -> int | None:
    """Return the first chunk of the pipeline without an adapter; None if all have some."""
    layers = {
        name.split(".")[2] if name.startswith("model.layers.") else "head" for name in adapted
    }
    pieces = parallel.pieces(shape.num_layers)
    own = [{str(layer) for layer in piece} for piece in pieces]
    own[-1].add("head")
    return next((i for i, piece in enumerate(own) if layers.isdisjoint(piece)), None)
