"""Nothing of the size of a micro-batch outlives its step: on CUDA it would pin freed memory."""

from __future__ import annotations

import pytest
import torch

from r3 import extras
from tests.ranks import memory_cases
from tests.world import run_world

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.large)])
def test_nothing_of_a_micro_batch_is_reachable_after_its_step(ranks: int) -> None:
    # "sorted" are the fused experts of CUDA. With recomputation Megatron's dispatcher, which
    # "grouped" experts use, would keep a graph.
    settings = [
        {"model": {"experts": "grouped", "recompute": "full"}},
        {"replay": {"mode": "r2"}},
        {"model": {"experts": "sorted"}, "algo": {"kl_coef": 0.1}},
    ]
    run_world(memory_cases.kept, ranks, ep=ranks, settings=settings)


def test_a_closed_policy_is_freed_with_its_last_reference() -> None:
    (found,) = run_world(memory_cases.alive_afterwards, 1)
    assert found["closed"] == [False, False]
    assert found["kept"] == [True, True], "the hooks of data parallelism keep what they know"


def test_experts_of_tokens_do_not_keep_a_row_of_all_experts() -> None:
    chosen_NK = extras.dispatch().first_set(torch.eye(64, dtype=torch.bool), 1)
    assert chosen_NK.flatten().tolist() == [*range(64)]
    assert chosen_NK.untyped_storage().nbytes() == chosen_NK.nbytes
