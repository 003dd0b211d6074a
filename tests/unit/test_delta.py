"""Gated delta layers: the rule token by token in float64, and sequences that never mix."""

import pytest
import torch
from torch.nn import functional

from r3.backends import CHUNK, causal_convolution, gated_delta, unit

LENGTHS = (3, CHUNK + 6, 2 * CHUNK + 1, 1)


def inputs(dtype: torch.dtype) -> list[torch.Tensor]:
    """Queries, keys, values, decays and betas of packed sequences: two heads of 16 and 24."""
    generator = torch.Generator().manual_seed(0)
    count = sum(LENGTHS)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(count, 2, *shape, generator=generator, dtype=torch.float64)

    made = [unit(normal(16)), unit(normal(16)), normal(24), -3 * normal().abs(), normal().sigmoid()]
    return [x.to(dtype).requires_grad_() for x in made]


def token_by_token(*parts: torch.Tensor) -> torch.Tensor:
    """The recurrence as it is defined."""
    (query, key, value, decay, beta), out = parts, []
    for start, length in zip((0, *torch.tensor(LENGTHS).cumsum(0).tolist()), LENGTHS, strict=False):
        state = value.new_zeros(2, 16, 24)
        for t in range(start, start + length):
            state = decay[t].exp()[:, None, None] * state
            correction = beta[t][:, None] * (value[t] - torch.einsum("hkv,hk->hv", state, key[t]))
            state = state + key[t][:, :, None] * correction[:, None]
            out.append(torch.einsum("hkv,hk->hv", state, query[t]) / 4)
    return torch.stack(out)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    # Measured: 3e-15, and 3.4e-6 for the decays, whose gradients are sums that cancel.
    [(torch.float64, 1e-13), (torch.float32, 2e-5)],
)
def test_values_and_gradients_are_those_of_the_recurrence(
    dtype: torch.dtype, tolerance: float
) -> None:
    ours = inputs(dtype)
    theirs = [x.detach().double().requires_grad_() for x in ours]
    found, expected = gated_delta(*ours, LENGTHS), token_by_token(*theirs)
    assert (found - expected).abs().max() <= tolerance
    weight = torch.randn(found.shape, dtype=torch.float64)
    got = torch.autograd.grad((found * weight.to(dtype)).sum(), ours)
    wanted = torch.autograd.grad((expected * weight).sum(), theirs)
    for one, other in zip(got, wanted, strict=True):
        assert (one - other).abs().max() <= tolerance * other.abs().max()


def test_a_strong_decay_does_not_overflow() -> None:
    query, key, value, decay, beta = inputs(torch.float32)
    out = gated_delta(query, key, value, 60 * decay, beta, LENGTHS)  # exp(60 * 64 * 3) is infinite
    gradients = torch.autograd.grad(out.sum(), [query, key, value, decay, beta])
    assert all(x.isfinite().all() for x in (out, *gradients))


def test_packed_sequences_do_not_mix() -> None:
    parts = inputs(torch.float64)
    parts[3] = 0.01 * parts[3]  # a state that lasts
    x_NC = torch.randn(sum(LENGTHS), 8, dtype=torch.float64)
    weight_CK = torch.randn(8, 4, dtype=torch.float64)
    together = gated_delta(*parts, LENGTHS)
    convolved = causal_convolution(x_NC, weight_CK, LENGTHS)
    # An error of one token in a border would be of the size of the values, 1.
    alone = [
        gated_delta(*(x[start : start + length] for x in parts), (length,))
        for start, length in zip((0, 3, 73, 202), LENGTHS, strict=True)
    ]
    torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=1e-13)
    padded = [functional.pad(part.t()[None], (3, 0)) for part in x_NC.split(LENGTHS)]
    each = [functional.conv1d(part, weight_CK[:, None], groups=8)[0].t() for part in padded]
    torch.testing.assert_close(convolved, torch.cat(each), rtol=0, atol=1e-13)
    mixed = gated_delta(*parts, (sum(LENGTHS),))
    assert (mixed - together).abs().max() > 0.1, "the control: one long sequence is another result"
