"""Fixtures that several folders of tests use."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """The tokenizer of the embedded models."""
    from transformers import AutoTokenizer

    from r3 import assets

    return AutoTokenizer.from_pretrained(assets.TINY_MOE)
