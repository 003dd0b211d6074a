"""Attention with windows and sinks: the formula's values and gradients; sequences never mix."""

from itertools import pairwise

import pytest
import torch

from r3.backends import Attention, Flash, Plain

LENGTHS, HEADS, SIZE, SCALE = (5, 5, 17, 1), 3, 8, 0.4


def inputs() -> list[torch.Tensor]:
    """Queries, keys, values and sinks, float64."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(sum(LENGTHS), HEADS, SIZE)] * 3 + [(HEADS,)]
    return [
        torch.randn(size, generator=generator, dtype=torch.float64).requires_grad_()
        for size in sizes
    ]


def by_the_formula(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor, window: int
) -> torch.Tensor:
    """One token and head at a time."""
    out = torch.zeros_like(value)
    for start, end in pairwise([0, *torch.tensor(LENGTHS).cumsum(0).tolist()]):
        for token in range(start, end):
            first = max(start, token - window + 1) if window else start
            seen = slice(first, token + 1)
            for head in range(HEADS):
                scores = key[seen, head] @ query[token, head] * SCALE
                shares = torch.cat([scores, sinks[head, None]]).softmax(0)[:-1]
                out[token, head] = shares @ value[seen, head]
    return out


def attend(tensors: list[torch.Tensor], window: int) -> torch.Tensor:
    kernel = Plain(lengths=LENGTHS, scale=SCALE, window=window)
    out: torch.Tensor = Attention.apply(*tensors, kernel)
    return out


@pytest.mark.parametrize("window", [0, 4])
def test_values_and_gradients_are_those_of_the_formula(window: int) -> None:
    ours, theirs = inputs(), inputs()
    found, expected = attend(ours, window), by_the_formula(*theirs, window)
    assert (found - expected).abs().max() <= 1e-13  # float64
    weight = torch.randn(found.shape, dtype=torch.float64)
    got = torch.autograd.grad((found * weight).sum(), ours)
    wanted = torch.autograd.grad((expected * weight).sum(), theirs)
    for one, other in zip(got, wanted, strict=True):
        assert (one - other).abs().max() <= 1e-12
    # The comparison sees a window off by one, and one sink that is off.
    assert (found - by_the_formula(*theirs, 5)).abs().max() > 1e-2
    theirs[3] = theirs[3] + torch.tensor([0.0, 0.5, 0.0])
    assert (found - by_the_formula(*theirs, window)).abs().max() > 1e-2


def test_sequences_never_mix() -> None:
    tensors = inputs()
    before = attend(tensors, 4)
    with torch.no_grad():
        for tensor in tensors[:3]:
            tensor[5:10] += 1.0
    changed = (attend(tensors, 4) != before).flatten(1).any(1)
    assert changed.tolist() == [5 <= token < 10 for token in range(sum(LENGTHS))]


def test_flash_attention_has_the_arguments_that_it_is_given() -> None:
    """torch on CPU has the operations without a kernel: their schema is asked. GPU: tests/gpu."""
    kernel = Flash(borders=torch.tensor([0, 5]), longest=5, scale=SCALE, window=4)
    bf16 = [torch.zeros(5, HEADS, SIZE, dtype=torch.bfloat16) for _ in range(5)]
    for call, tensors in (
        (kernel.forward, bf16[:3]),
        (kernel.backward, [*bf16, torch.zeros(5, 3)]),
    ):
        with pytest.raises(NotImplementedError, match="'CPU' backend"):
            call(*tensors)
    assert kernel._options() == dict(scale=SCALE, window_size_left=3, window_size_right=0)
