"""Parameters that are not trained: `train.freeze`."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from r3.config import ConfigError, Problem
from r3.models.rules import conversion_rules
from r3.models.shape import ModelShape


def frozen_tensors(shape: ModelShape, patterns: Sequence[str]) -> frozenset[str]:
    """Return the Hugging Face names of the tensors that `train.freeze` matches.

    Raises:
        ConfigError: a pattern matches nothing, a part of what training holds as one tensor is left
            out, or nothing is left to train.
    """
    if not patterns:
        return frozenset()
    names = {name for unit in _units(shape) for name in unit}
    frozen = {name for name in names if any(fnmatchcase(name, each) for each in patterns)}

    def refuse(value: object, rule: str, fix: str) -> ConfigError:
        return ConfigError([Problem("train.freeze", value, rule, fix)])

    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            example = "*.mlp.gate.weight" if shape.moe_layers else "model.embed_tokens.weight"
            fix = f"use names of the checkpoint's tensors with * and ?, such as {example}"
            raise refuse(pattern, "matches no parameter of the model", fix)
    for unit in _units(shape):
        outside = [name for name in unit if name not in frozen]
        if outside and len(outside) < len(unit):
            inside = next(name for name in unit if name in frozen)
            rule = f"freezes {inside} and not {outside[0]}, which training holds as one tensor"
            raise refuse(tuple(patterns), rule, "freeze both or none of them")
    if frozen == names:
        raise refuse(tuple(patterns), "freezes every parameter", "leave some to train")
    return frozenset(frozen)


def _units(shape: ModelShape) -> list[tuple[str, ...]]:
    """Tensors that are frozen together: q, k and v; gate and up; all experts of a layer."""
    rules = conversion_rules(shape)
    units = [tuple(rule.hf) for rule in rules.top.values()]
    for number, layer in enumerate(rules.layers):
        prefix = f"model.layers.{number}."
        units += [tuple(prefix + part for part in rule.hf) for rule in layer.values()]
        if number in shape.moe_layers:
            experts = range(shape.num_experts)
            units += [
                tuple(prefix + part.format(e=e) for e in experts for part in rule.hf)
                for rule in rules.expert.values()
            ]
    return units
