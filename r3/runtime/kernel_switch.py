"""Which kernels are used: all of them, or those named in the environment variable R3_KERNELS.

    R3_KERNELS=none torchrun ... train.py PRESET       plain torch
    R3_KERNELS=triton torchrun ... train.py PRESET     one of them

Everything else asks `is_on`, and nobody else decides. Imports nothing heavy.
"""

from __future__ import annotations

import os
from functools import cache

from r3.config import ConfigError, Problem

VARIABLE = "R3_KERNELS"
KERNELS = ("triton",)
REMOVED = ("sampled_attention", "sampled_experts")
"""Kernels of earlier versions. Their names have no effect, and a note says so."""


@cache
def chosen(value: str) -> frozenset[str]:
    """Return the names in a value of R3_KERNELS: all, none, or names with commas between them.

    Raises:
        ConfigError: a word is not the name of a kernel.
    """
    names = [word.strip() for word in value.split(",")]
    if names in (["all"], [""]):
        return frozenset(KERNELS)
    unknown = [name for name in names if name not in KERNELS + REMOVED]
    if names != ["none"] and unknown:
        known = ", ".join(KERNELS)
        rule = f"{', '.join(map(repr, unknown))}: no kernel has this name"
        raise ConfigError.of(VARIABLE, value, rule, f"use all, none or some of {known}")
    return frozenset(names) & frozenset(KERNELS)


def is_on(name: str) -> bool:
    """Whether a kernel may be used. Its module says which inputs it can compute."""
    assert name in KERNELS, name
    return name in chosen(os.environ.get(VARIABLE, "all"))


def switch_notes() -> list[str]:
    """Names in R3_KERNELS that have no effect."""
    names = [word.strip() for word in os.environ.get(VARIABLE, "").split(",")]
    return [
        f"{VARIABLE} names {name}: this kernel was removed, and vLLM's kernel computes"
        for name in REMOVED
        if name in names
    ]


def switch_problems() -> list[Problem]:
    """What is wrong with the value of R3_KERNELS."""
    try:
        chosen(os.environ.get(VARIABLE, "all"))
    except ConfigError as error:
        return list(error.problems)
    return []
