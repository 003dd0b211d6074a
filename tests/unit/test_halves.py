"""Gradients of a float32 output layer keep 16 bits on tensor cores."""

from __future__ import annotations

import pytest

from tests.halves import errors

pytestmark = pytest.mark.unit


def test_gradients_by_halves_keep_16_bits() -> None:
    found = errors("cpu")
    # Two halves leave 2^-17 of a value on average, and float32 sums of 3001 terms 2^-23 or so.
    assert max(found["halves"]) < 2**-16
    # One bfloat16 leaves 2^-9 or more.
    assert min(found["rounded"]) > 2**-10
