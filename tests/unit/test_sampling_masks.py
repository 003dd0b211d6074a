"""Sampling masks on their way: packed, cut, suspended, and refused if they are of other tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from r3.algo.packing import pack
from r3.algo.sampling_mask import of_rows
from r3.engine import CaptureSpec, Sampled, Transcript
from r3.models.shape import ModelShape
from r3.tools import part_of
from r3.types import MicroBatch, Rollout, SamplingMask
from tests.tiny import MOE, QUESTION, coded_rollout, tiny_config


def mask_of(sets: list[list[int]]) -> SamplingMask:
    ids = np.array([token for each in sets for token in each], np.int32)
    return SamplingMask(counts_T=np.array([len(each) for each in sets], np.int32), token_ids=ids)


SETS: list[list[int]] = [[], [], [12, 3], [13], [1, 14, 7]]
CUT = replace(mask_of(SETS), token_ids=np.zeros(5, np.int32))
RIGHT = replace(coded_rollout([10, 11, 12, 13, 14], 3), sampling_mask=mask_of(SETS))


def sets_of(packed: MicroBatch) -> list[list[int]]:
    return [each.tolist() for each in packed.kept_ids.split(packed.kept_counts_N.tolist())]


def test_each_target_has_the_tokens_that_it_was_drawn_from() -> None:
    other = replace(coded_rollout([5, 6], 1, seed=1), sampling_mask=mask_of([[], [6, 5]]))
    free = coded_rollout([5, 6], 1, seed=2)  # the whole vocabulary
    packed = pack([RIGHT, other, free], [0, 1, 2], **MOE, multiple=12)
    own = [[], [12, 3], [13], [1, 14, 7], []]
    assert sets_of(packed) == [*own, [6, 5], [], [], [], [], [], []]
    part, rows = part_of(packed, 3, multiple=3, turn=1)
    assert (rows, sets_of(part)) == (slice(5, 8), [[6, 5], [], []])


def test_rows_of_ragged_sets_equal_a_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    counts_N = torch.randint(0, 4, (40,), generator=generator, dtype=torch.int32)
    ids = torch.arange(int(counts_N.sum()), dtype=torch.int32)
    sets = ids.split(counts_N.tolist())
    picked: list[Any] = [torch.randperm(40, generator=generator)[:17], slice(3, 30), slice(None)]
    for rows in picked:
        counts, found = of_rows(counts_N, ids, rows)
        wanted = [sets[row] for row in torch.arange(40)[rows].tolist()]
        assert counts.tolist() == [len(each) for each in wanted]
        assert torch.equal(found, torch.cat(wanted))


def with_sets(sets: list[list[int]]) -> Rollout:
    return replace(RIGHT, sampling_mask=mask_of(sets))


@pytest.mark.parametrize(
    ("rollout", "fault"),
    [
        (replace(RIGHT, sampling_mask=None), "it has no sampling mask, and rollout.top_k"),
        (with_sets([[], [12, 3], [13], [1, 14, 7], []]), "token 1, not sampled, .* 11, it kept 2"),
        (with_sets([[], [], [13], [1, 14, 7], [9]]), r"token 2, sampled, .* 12, it kept 1: \[13\]"),
        (with_sets([[], [], [12], [], [14]]), r"token 3, sampled, .* it kept 0: \[\]"),
        (with_sets([[], [], [12, 12], [13], [14]]), "token 2, sampled"),
        (replace(RIGHT, sampling_mask=CUT), "counts 6 tokens and has 5"),
    ],
)
def test_masks_of_other_tokens_are_refused(rollout: Rollout, fault: str) -> None:
    with pytest.raises(ValueError, match=rf"rollout 4 \(prompt0/0\): .*{fault}"):
        pack([rollout], [4], **MOE, restricted=True)


def test_a_mask_has_a_count_for_each_token() -> None:
    with pytest.raises(AssertionError, match=r"sampling mask have .* 4"):
        with_sets(SETS[1:])


def test_a_conversation_keeps_its_masks_when_it_is_resumed() -> None:
    shape = ModelShape.read(tiny_config().model.path)
    spec = CaptureSpec(policy_version=0, captures=False, on_missing="error", shape=shape)

    def said(tokens: list[int], kept: list[list[int]]) -> Sampled:
        facts: dict[str, Any] = dict(routed_experts=None, first_row=0, finish_reason="stop")
        facts |= {"logprobs_T": [-1.0] * len(tokens)}
        sets = [np.array(each, np.int32) for each in kept]
        return Sampled(key=0, tokens_T=tokens, kept=sets, **facts)

    def rollout(transcript: Transcript) -> Rollout:
        facts: dict[str, Any] = dict(group=0, sample_index=0, finish_reason="stop", response="")
        return transcript.rollout(QUESTION, **facts)

    def go_on(transcript: Transcript) -> Rollout:
        transcript.observe([8, 9])
        transcript.append_sample(said([4], [[4, 7, 1]]))
        return rollout(transcript)

    whole = Transcript(spec, [1, 2], who="whole")
    whole.append_sample(said([3, 5], [[3], [5, 6]]))
    suspended = rollout(whole)
    for found in (go_on(whole), go_on(Transcript.resumed(spec, suspended, who="resumed"))):
        assert found.sampling_mask is not None
        assert found.sampling_mask.counts_T.tolist() == [0, 0, 1, 2, 0, 0, 3]
        assert found.sampling_mask.token_ids.tolist() == [3, 5, 6, 4, 7, 1]
