"""The loop for an engine's attention on CPU; tests/e2e compares it with vLLM's kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from r3.kernels import sampled_attention
from r3.kernels.sampled_attention import attend, attend_prompts
from r3.kernels.tiles import TILE
from tests.processor import needs_tiles

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("one_thread"), needs_tiles]

H, G = 6, 2
LENGTHS = (1, 31, 32, 33, 64, 100, 150)
N, BLOCKS, SCALE = len(LENGTHS), 40, 0.2
BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@dataclass(frozen=True)
class Step:
    """What `attend` takes, in its order."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    cache: torch.Tensor
    slots: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor
    scale: float = SCALE


def _step(dtype: torch.dtype = torch.float32, D: int = 32, block: int = 32) -> Step:
    """Conversations whose blocks are scattered; places without a token hold a NaN."""
    random = torch.Generator().manual_seed(0)
    tokens = torch.randn(N, (H + 2 * G) * D, generator=random).to(dtype)
    query, key, value = (each.view(N, -1, D) for each in tokens.split([H * D, G * D, G * D], dim=1))
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    width = -(-max(LENGTHS) // block)
    table = torch.randperm(BLOCKS, generator=random)[: N * width].view(N, width).int()
    last = lengths.long() - 1
    slots = table.long().gather(1, last[:, None] // block).squeeze(1) * block + last % block
    cache = torch.full((BLOCKS, G, block, 2 * D), torch.nan, dtype=dtype)
    step = Step(query, key, value, cache, slots, table, lengths)
    for n, length in enumerate(LENGTHS):
        for t in range(length):
            keys, values = _place(step, n, t)
            keys[:] = torch.randn(G, D, generator=random)
            values[:] = torch.randn(G, D, generator=random)
    return step


def _place(step: Step, n: int, t: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Key and value of a token in the cache, [G, D] each."""
    _, _, block, both = step.cache.shape
    of_block = step.cache[step.table[n, t // block]]
    keys, values = of_block.view(G, 2, -1).unbind(1)
    row = t % block
    return keys.view(G, both // 2, block)[:, :, row], values.view(G, block, both // 2)[:, row]


def _run(step: Step) -> torch.Tensor:
    return attend(*(getattr(step, name) for name in step.__dataclass_fields__))


@BOTH
@pytest.mark.parametrize(("D", "block"), [(32, 32), (64, 32), (32, 128), (96, 64)])
def test_each_new_token_looks_at_all_tokens_before_it(
    dtype: torch.dtype, D: int, block: int
) -> None:
    """Against the formula in float64. Float32: sums of up to 150 products of numbers of size 1,
    each rounded by 2^-24; an exponent's error of 1e-6. In bfloat16 the result is rounded by at
    most 2^-8 of itself. A token too many, or one that is missing, changes more."""
    step = _step(dtype, D, block)
    found = _run(step)
    assert found.dtype == dtype and found.shape == (N, H, D)
    for n, length in enumerate(LENGTHS):
        keys, values = (
            torch.stack(each, dim=1).double().repeat_interleave(H // G, dim=0)  # [H, tokens, D]
            for each in zip(*(_place(step, n, t) for t in range(length)), strict=True)
        )
        scores = SCALE * torch.einsum("hd,htd->ht", step.query[n].double(), keys)
        exact = torch.einsum("ht,htd->hd", scores.softmax(-1), values)
        bound = 1e-5 + (0 if dtype == torch.float32 else 2**-8) * exact.abs()
        assert ((found[n].double() - exact).abs() <= bound).all()


@BOTH
def test_new_keys_and_values_are_stored_in_their_place_only(dtype: torch.dtype) -> None:
    step = _step(dtype)
    before = step.cache.clone()
    _run(step)
    for n, length in enumerate(LENGTHS):
        keys, values = _place(step, n, length - 1)
        assert torch.equal(keys, step.key[n]) and torch.equal(values, step.value[n])
        old = replace(step, cache=before)
        for mine, new in zip(_place(old, n, length - 1), (step.key[n], step.value[n]), strict=True):
            assert not torch.equal(mine, new)
            mine[:] = new
    assert torch.equal(before.view(torch.uint8), step.cache.view(torch.uint8))


def test_slot_minus_one_stores_nothing() -> None:
    step = _step()
    before = step.cache.clone()
    _run(replace(step, slots=torch.full_like(step.slots, -1)))
    assert torch.equal(before.view(torch.uint8), step.cache.view(torch.uint8))


@BOTH
def test_a_conversation_has_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    step = _step(dtype)
    whole = _run(step)
    for rows in (slice(3, 4), slice(2, 6)):
        part = {
            name: getattr(step, name)[rows]
            for name in ("query", "key", "value", "slots", "table", "lengths")
        }
        assert torch.equal(_run(replace(step, **part)), whole[rows])


@BOTH
def test_tokens_of_a_prompt_have_the_bits_of_tokens_one_after_another(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one call and in calls of 7 rows, which divide prompts."""
    step, news = _step(dtype), (1, 4, 2, 33, 1, 7, 0)  # of each conversation; the last has none
    random = torch.Generator().manual_seed(1)
    starts = torch.tensor([0, *news]).cumsum(0).int()
    rows = int(starts[-1])
    tokens = torch.randn(rows, (H + 2 * G) * 32, generator=random).to(dtype)
    query, key, value = (each.view(rows, -1, 32) for each in tokens.split([H * 32, 64, 64], dim=1))
    of_N = torch.arange(N).repeat_interleave(torch.tensor(news))
    lengths = torch.cat(
        [torch.arange(length - new, length) for length, new in zip(LENGTHS, news, strict=True)]
    ).int()
    slots = step.table[of_N, lengths // 32].long() * 32 + lengths % 32

    one, by_step = step.cache.clone(), []
    for n in range(rows):
        row, table = slice(n, n + 1), step.table[of_N[n : n + 1]]
        new = query[row], key[row], value[row], one, slots[row], table, lengths[row] + 1
        by_step.append(attend(*new, SCALE))
    for most in (256, 7):
        monkeypatch.setattr(sampled_attention, "_ROWS_AT_ONCE", most)
        cache = step.cache.clone()
        where = slots, starts, step.table, step.lengths
        found = attend_prompts(query, key, value, cache, *where, SCALE)
        assert torch.equal(found, torch.cat(by_step))
        assert torch.equal(cache.view(torch.uint8), one.view(torch.uint8))
    no_tokens = query[:0], key[:0], value[:0], one, slots[:0], torch.zeros_like(starts)
    assert attend_prompts(*no_tokens, step.table, step.lengths, SCALE).shape == (0, H, 32)


def test_no_conversation_is_no_error() -> None:
    step = _step()
    none = {
        name: getattr(step, name)[:0]
        for name in ("query", "key", "value", "slots", "table", "lengths")
    }
    assert _run(replace(step, **none)).shape == (0, H, 32)


def test_a_number_that_is_not_one_stays_visible() -> None:
    step = _step()
    _place(step, 5, 50)[0][1, 3] = torch.nan  # a key of the second key head
    found = _run(step)
    assert found[5, H // G :].isnan().all()
    assert not found[:5].isnan().any() and not found[5, : H // G].isnan().any()


@pytest.mark.parametrize(
    ("field", "row", "value"),
    [
        ("lengths", 2, 0),
        ("lengths", 6, 161),
        ("slots", 0, BLOCKS * 32),
        ("table", 5, -1),
        ("table", 5, BLOCKS),
    ],
)
def test_places_that_the_cache_does_not_have_are_refused(field: str, row: int, value: int) -> None:
    """They would be the memory of something else."""
    step = _step()
    changed = getattr(step, field).clone()
    changed[row] = value
    with pytest.raises(IndexError, match="cache"):
        _run(replace(step, **{field: changed}))


def test_tensors_that_do_not_belong_together_are_refused() -> None:
    step = _step()
    gaps = torch.randn(N, H, 64)[..., ::2]
    for change, message in (
        ({"key": step.key[1:]}, "sizes"),
        ({"value": step.value[:, 1:]}, "sizes"),
        ({"query": step.query[:, :5]}, "sizes"),
        ({"slots": step.slots[1:]}, "sizes"),
        ({"lengths": step.lengths[1:]}, "sizes"),
        ({"table": step.table[1:]}, "sizes"),
        ({"cache": step.cache[..., :-2]}, "sizes"),
        ({"cache": step.cache[:, :, :-1].contiguous()}, f"multiple of {TILE}"),
        ({"query": step.query.bfloat16()}, "types"),
        ({"slots": step.slots.int()}, "types"),
        ({"table": step.table.long()}, "types"),
        ({"query": gaps}, "gaps"),
        ({"cache": step.cache.transpose(0, 1).contiguous().transpose(0, 1)}, "gaps"),
        ({"slots": step.slots.repeat_interleave(2)[::2]}, "gaps"),
    ):
        with pytest.raises(AssertionError, match=message):
            _run(replace(step, **change))
