"""Sweeps: the same claim for many cases, of which `make test` runs some."""

import re
from collections.abc import Collection, Iterable
from typing import Any

import pytest


def layout_of(name: str) -> dict[str, int]:
    """Sizes of the axes that the name of a case has, as in tp2-ep2-full-recompute."""
    axes = re.findall(r"\b(tp|etp|pp|vpp|cp|ep)(\d+)\b", name)
    return {axis: int(size) for axis, size in axes}


def sweep(names: Iterable[str], kept: Collection[str]) -> list[Any]:
    """Mark the cases of a sweep `large`, except those that `make test` keeps.

    Args:
        names: all cases.
        kept: those without the mark.

    Raises:
        AssertionError: a case that is kept does not exist.
    """
    names = list(names)
    assert set(kept) <= set(names), f"no such case: {set(kept) - set(names)}"
    return [name if name in kept else pytest.param(name, marks=pytest.mark.large) for name in names]
