"""The same cases as on CPU, on a CUDA device: `pytest -m gpu`.

They need one GPU and vLLM's CUDA build; CI does not run them. Without a GPU the same command
rehearses them on CPU.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils._pytree import tree_leaves

from r3.backends import Attention, Flash, Plain, expert_kernels
from tests.e2e import precision_cases, push_cases, step_cases
from tests.families import random_checkpoint
from tests.halves import errors
from tests.ranks import memory_cases
from tests.world import run_world

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def routes() -> SimpleNamespace:
    """One step in bfloat16 on both sides."""
    (result,) = run_world(step_cases.step_routes, 1, ep=1, dtype="bfloat16", timeout_s=600.0)
    return result


def test_captured_routes_are_the_routes_used(routes: SimpleNamespace) -> None:
    assert routes.slots > 1000
    assert routes.wrong == 0


def test_engine_and_policy_agree_within_bfloat16(routes: SimpleNamespace) -> None:
    # 3e-5 on CPU, replayed or live: the routers of this model are decided. Wrong weights give 0.1.
    assert 0 < routes.k3["replay"] < 1e-3
    assert 0 < routes.k3["live"] < 1e-3


def test_push_makes_the_engine_equal_to_a_freshly_loaded_one(tmp_path: Path) -> None:
    folder = str(tmp_path / "export")
    (engine,) = run_world(push_cases.pushed, 1, out=folder, dtype="bfloat16", timeout_s=600.0)
    assert engine.before != engine.after, "the moved weights must sample something else"
    (fresh,) = run_world(push_cases.loaded, 1, model=folder, dtype="bfloat16", timeout_s=600.0)
    assert engine.after == fresh
    assert engine.slept == [fresh, fresh]
    assert engine.compared > 0


def test_the_policy_returns_its_memory_after_every_step(tmp_path: Path) -> None:
    # 100 million parameters: gradients and optimizer state take 1.5 GiB, in segments that a small
    # tensor would keep. On CPU the steps run, and nothing is measured.
    wide = {"hidden_size": 512, "moe_intermediate_size": 512, "num_experts": 32}
    wide |= {"num_hidden_layers": 4}
    sizes = wide if torch.cuda.is_available() else {}
    model = str(random_checkpoint(tmp_path / "model", **sizes))
    (found,) = run_world(memory_cases.fragments, 1, path=model, timeout_s=600.0)
    assert len(found) == 5 and max(found) < 0.3, found


def test_gradients_of_a_float32_head_keep_16_bits() -> None:
    found = errors("cuda" if torch.cuda.is_available() else "cpu")
    assert max(found["halves"]) < 2**-16, found


def test_windows_and_sinks_on_the_device_equal_plain_torch() -> None:
    lengths, on_gpu = (300, 64, 1, 129), torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    given = [torch.randn(sum(lengths), 4, 64).bfloat16() for _ in range(3)] + [torch.randn(4)]
    weight = torch.randn(sum(lengths), 4, 64)
    borders = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)

    def run(kernel: Plain | Flash, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
        tensors = [each.to(device, dtype).requires_grad_() for each in given]
        out = Attention.apply(*tensors, kernel)
        gradients = torch.autograd.grad((out.float() * weight.to(device)).sum(), tensors)
        return [each.detach().cpu().float() for each in (out, *gradients)]

    for window in (0, 8):
        plain = Plain(lengths=lengths, scale=0.125, window=window)
        flash = Flash(borders=borders, longest=max(lengths), scale=0.125, window=window)
        exact = run(plain, torch.float32, "cpu")
        found = run(flash, torch.bfloat16, device) if on_gpu else exact
        off = run(replace(plain, window=7), torch.float32, "cpu")
        for one, right, wrong in zip(found, exact, off, strict=True):
            # bfloat16 has 8 bits. A window off by one shows in every tensor.
            assert (one - right).norm() <= 2e-2 * right.norm()
            assert (wrong - right).norm() > 2e-2 * right.norm()


@pytest.mark.parametrize("name", ["weighted_swiglu", "weighted_swiglu_backward", "sum_rows"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_of_fused_experts_equal_plain_torch(name: str, dtype: torch.dtype) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    both, d_inner = torch.randn(101, 2 * 1030, dtype=dtype), torch.randn(101, 1030, dtype=dtype)
    given = {
        "weighted_swiglu": (both, torch.rand(101)),
        "weighted_swiglu_backward": (both, torch.rand(101), d_inner),
        "sum_rows": (both, torch.randint(0, 120, (33, 5))),
    }[name]
    found = getattr(torch.ops.r3, name)(*(one.to(device) for one in given))
    expected = getattr(expert_kernels, name)(*given)
    # Sums have the same order. The exponential differs in its last bits (2^-23), which seldom moves
    # a result to the next bfloat16 (2^-8).
    bound = 0.0 if name == "sum_rows" else 1e-6 if dtype == torch.float32 else 1e-3
    for one, other in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        assert (one.cpu() - other).float().norm() <= bound * other.float().norm()


def test_float32_head_is_computed_on_both_sides() -> None:
    (result,) = run_world(precision_cases.head, 1, fp32=True, timeout_s=600.0)
    assert (result.types, result.rounded) == (["torch.float32"], False)
    # Logits from bfloat16 operands multiplied in float32, against float64: rounding of the sums.
    assert result.policy_error <= 1e-4
