"""The output layer on CUDA: 16 bits of its gradients on tensor cores, sums in Megatron's buffer."""

from typing import Any

import pytest
import torch

from r3.policy.logprobs import Head, logprobs_and_entropy
from r3.runtime.mesh import Axis
from tests.halves import errors


def test_gradients_by_halves_keep_16_bits() -> None:
    found = errors("cpu")
    # Two halves leave 2^-17 of a value on average, and float32 sums of 3001 terms 2^-23 or so.
    assert max(found["halves"]) < 2**-16
    # One bfloat16 leaves 2^-9 or more.
    assert min(found["rounded"]) > 2**-10


def head(vocabulary: int, **given: Any) -> Head:
    axis = Axis(name="tp", group=None, rank=0, size=1)
    return Head(axis=axis, vocab_size=vocabulary, temperature=1.0, **given)


@pytest.mark.parametrize("is_embedding", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_add_the_weights_gradient_to_a_float32_sum(
    dtype: torch.dtype, is_embedding: bool
) -> None:
    tokens, vocabulary, width = 24, 53, 16
    generator = torch.Generator().manual_seed(2)
    hidden_ND = torch.randn(tokens, width, generator=generator).to(dtype)
    targets_N = torch.randint(vocabulary, (tokens,), generator=generator)
    values_VD = torch.randn(vocabulary, width, generator=generator).to(dtype)
    before_VD = torch.randn(vocabulary, width, generator=generator)

    def passed(values: torch.Tensor, *, adds: bool) -> torch.nn.Parameter:
        """The weight after forward and backward. With float64 it is the exact one."""
        weight = torch.nn.Parameter(values.clone())
        weight.main_grad = before_VD.clone()
        given = {"chunk_tokens": 5, "fp32": dtype == torch.float32, "is_embedding": is_embedding}
        hidden, of = hidden_ND.to(values.dtype), head(vocabulary, adds_to_main_grad=adds, **given)
        logprobs_and_entropy(hidden, weight, targets_N, of)[0].sum().backward()
        return weight

    added, returned = (passed(values_VD, adds=adds) for adds in (True, False))
    assert added.grad is not None and returned.grad is not None
    exact = passed(values_VD.double(), adds=False).grad
    assert exact is not None

    def error(gradient: torch.Tensor) -> float:
        return float((gradient.double() - exact).norm() / exact.norm())

    # Buffer and gradient are summed in float32. In bfloat16 the gradient of each logit has 8 bits.
    bound = 1e-6 if dtype == torch.float32 else 2**-8
    assert error(added.main_grad.double() - before_VD.double()) <= bound
    assert torch.equal(returned.main_grad, before_VD)  # Megatron's hook would add what is returned
    assert error(returned.grad) <= bound + (dtype == torch.bfloat16) * 2**-8
    # Megatron adds the gradient of an embedding, and must not add this one twice.
    assert hasattr(added, "grad_added_to_main_grad") != is_embedding
    assert not (is_embedding and added.grad.any())


def test_one_sum_for_all_micro_batches_is_not_rounded_between_them() -> None:
    # 512 micro-batches with the same small gradient: in bfloat16 alone the sum would stand still.
    weight = torch.nn.Parameter(torch.zeros(7, 4).bfloat16())
    weight.main_grad = torch.zeros(7, 4)
    hidden, targets = torch.ones(512, 4).bfloat16(), torch.zeros(512, dtype=torch.int64)
    one_by_one = head(7, chunk_tokens=1, fp32=False, adds_to_main_grad=True)
    logprobs_and_entropy(hidden, weight, targets, one_by_one)[0].sum().backward()
    # Each token adds 1 - 1/7, which is 0.85546875 in bfloat16.
    assert weight.main_grad[0].tolist() == [512 * 0.85546875] * 4
