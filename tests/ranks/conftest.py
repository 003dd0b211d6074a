"""The checkpoints that most tests of this folder use."""

from __future__ import annotations

import pytest

from tests.families import random_checkpoint


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random Qwen3-MoE: 3 layers, 16 experts top-4."""
    return str(random_checkpoint(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="session")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random Qwen3-MoE: 4 layers, one of them dense, 16 experts top-4, tied embeddings."""
    folder = tmp_path_factory.mktemp("other")
    return str(random_checkpoint(folder, tied=True, mlp_only_layers=[1], num_hidden_layers=4))
