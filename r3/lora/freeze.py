"""Which parameters a run leaves as they are (`train.freeze`), without torch."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from r3.errors import Problem
from r3.models.sizes import ModelSizes
from r3.models.tensors import conversion_rules


def frozen_tensors(shape: ModelSizes, patterns: Sequence[str]) -> frozenset[str]:
    """Return the Hugging Face names of the tensors that patterns of `train.freeze` match.

    Raises:
        Problem: a pattern matches nothing, a part of what training holds as
            one tensor is left out, or nothing is left to train.
    """
    if not patterns:
        return frozenset()
    names = {name for unit in _units(shape) for name in unit}
    frozen = {name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)}
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            example = "*.mlp.gate.weight" if shape.moe_layers else "model.embed_tokens.weight"
            fix = f"use names of the checkpoint's tensors with * and ?, such as {example}"
            raise Problem(value=pattern, rule="matches no parameter of the model", fix=fix)
    for unit in _units(shape):
        outside = [name for name in unit if name not in frozen]
        if outside and len(outside) < len(unit):
            inside = next(name for name in unit if name in frozen)
            rule = f"freezes {inside} and not {outside[0]}, which training holds as one tensor"
            raise Problem(value=tuple(patterns), rule=rule, fix="freeze both or none of them")
    if frozen == names:
        rule, fix = "freezes every parameter", "leave some to train"
        raise Problem(value=tuple(patterns), rule=rule, fix=fix)
    return frozenset(frozen)


def _units(shape: ModelSizes) -> list[tuple[str, ...]]:
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
