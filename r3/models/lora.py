"""Which matrices of a model have low-rank adapters, and of what rank: `lora` and `train.freeze`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from r3.config import ConfigError, LoraConfig, ParallelConfig, Problem
from r3.models.freeze import frozen_tensors
from r3.models.rules import conversion_rules
from r3.models.shape import ModelShape

# The start of Megatron's name inside a layer -> the target.
_OF_LAYER = {
    "self_attention.": "attention",
    "mlp.linear_fc": "dense",
    "mlp.shared_experts.linear_fc": "shared",
    "mlp.router.weight": "router",
}


def adapted_tensors(
    shape: ModelShape, lora: LoraConfig, freeze: Sequence[str] = ()
) -> dict[str, int]:
    """Return the rank of the adapter of each Hugging Face tensor that has one.

    Raises:
        ConfigError: a target is not a part of this model, or every target is frozen.
    """
    if not lora.rank:
        return {}
    rules = conversion_rules(shape)
    layer = {
        part: target
        for suffix, rule in rules.layer.items()
        for start, target in _OF_LAYER.items()
        if suffix.startswith(start)
        for part in rule.hf
    }
    expert = [part for rule in rules.expert.values() for part in rule.hf]
    found = {
        f"model.layers.{n}.{part}": layer[part] for n in range(shape.num_layers) for part in layer
    }
    found |= {
        f"model.layers.{n}.{part.format(e=e)}": "experts"
        for n in shape.moe_layers
        for e in range(shape.num_experts)
        for part in expert
    }
    if not shape.tied:
        found |= dict.fromkeys(rules.top["output_layer.weight"].hf, "head")
    sizes = shape.tensor_shapes
    of_target = {name: target for name, target in found.items() if len(sizes.get(name, ())) == 2}
    for target in lora.targets:
        # The default names the matrices of every kind of model.
        if target not in of_target.values() and lora.targets != LoraConfig().targets:
            rule = f"include {target}, which this model does not have"
            if target == "head" and shape.tied:
                rule = "include head, which is the embedding too in this model (tied)"
            there = [name for name in dict.fromkeys(of_target.values()) if name in lora.targets]
            raise _refusal(lora.targets, rule, f"use {' '.join(there) or 'attention'}")
    frozen = frozen_tensors(shape, freeze)
    adapted = {
        name: lora.rank_of(target)
        for name, target in of_target.items()
        if target in lora.targets and name not in frozen
    }
    if not adapted:
        rule = "leave nothing to train beside train.freeze" if lora.targets else "is empty"
        raise _refusal(lora.targets, rule, "add a target, such as attention")
    return adapted


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


def _refusal(targets: Sequence[str], rule: str, fix: str) -> ConfigError:
    return ConfigError([Problem("lora.targets", tuple(targets), rule, fix)])
