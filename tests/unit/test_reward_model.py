"""A reward model scores many conversations at once as it scores each by itself, in a thread beside
others' work.
"""

from __future__ import annotations

import random
import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from r3 import assets
from r3.config import RewardConfig
from r3.models.shape import ModelShape
from r3.rewards.model import Batches, RewardModel
from r3.rewards.scorer import RewardError, make_scorer
from r3.runtime.device import Device
from r3.types import Prompt, Rollout
from tests.tiny import CLASSIFIER_CONTEXT, CLASSIFIER_TOLERANCE, classifier, random_rollouts

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> RewardConfig:
    path = classifier(tmp_path_factory.mktemp("classifier"))
    return RewardConfig(
        function=("model",),
        model_path=str(path),
        model_dtype="float32",
        model_batch=8,
        model_wait_s=0.02,
    )


@pytest.fixture(scope="module")
def model(settings: RewardConfig) -> RewardModel:
    return RewardModel(settings)


PROMPT = Prompt(
    id="rows.jsonl:7", messages=({"role": "user", "content": "3 + 4?"},), tokens_T=(1,), answer=""
)


def rollouts(count: int) -> list[Rollout]:
    """Conversations of many lengths."""
    generator = random.Random(0)
    made = random_rollouts(ModelShape.read(assets.TINY_MOE), [6] * count, group_size=1)
    words = ("3", "+", "so", "apples", "####", "7")
    return [
        replace(one, response=" ".join(generator.choices(words, k=generator.randint(1, 60))))
        for one in made
    ]


def test_a_row_may_name_the_reward_model(settings: RewardConfig, model: RewardModel) -> None:
    settings = replace(settings, function=("row",), row_functions=("exact", "model"))
    scorer = make_scorer(settings, model=model)
    (rollout,) = rollouts(1)
    scores = {
        name: scorer(rollout, replace(PROMPT, metadata={"verifier": name}))
        for name in ("exact", "model")
    }
    scorer.close()
    # A batch of one on both sides: the same arithmetic.
    assert scores == {"exact": 0.0, "model": model.score(rollout.response, PROMPT)}


def test_dynamic_batches_score_as_one_by_one(settings: RewardConfig, model: RewardModel) -> None:
    scorer = make_scorer(settings, model=model)
    answers = rollouts(50)
    for key, rollout in enumerate(answers):
        scorer.submit(key, rollout, PROMPT)
        if key % 17 == 16:
            time.sleep(0.05)  # some come late
    found: dict[Any, float] = {}
    while scorer.outstanding:
        found |= {reward_result.key: reward_result.reward for reward_result in scorer.poll(5.0)}
    single = [model.score(rollout.response, PROMPT) for rollout in answers]
    scorer.close()
    assert max(abs(found[key] - single[key]) for key in range(50)) <= CLASSIFIER_TOLERANCE
    assert max(single) - min(single) > 100 * CLASSIFIER_TOLERANCE  # they do differ
    # As transformers alone computes it, without any padding.
    (tokens,) = (torch.tensor([model.encode(answers[3].response, PROMPT)]),)
    with torch.no_grad():
        (expected,) = model._model(input_ids=tokens).logits[0].tolist()
    assert single[3] == pytest.approx(expected, abs=CLASSIFIER_TOLERANCE)


def test_padding_without_a_mask_changes_scores(
    model: RewardModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    short, long = (model.encode(text, PROMPT) for text in ("7", "so " * 60))
    right = model.score_encoded([short])[0]
    assert model.score_encoded([short, long])[0] == pytest.approx(right, abs=CLASSIFIER_TOLERANCE)
    padded = [*short, *[9] * (len(long) - len(short))]  # other tokens at its end, seen by the model
    assert abs(model.score_encoded([padded, long])[0] - right) > 100 * CLASSIFIER_TOLERANCE


def batches(seen: list[list[int]], **limits: Any) -> Batches:
    """Batches of bare numbers: a conversation of n tokens is [n] * n and scores n."""

    def score_many(conversations: Any) -> list[float]:
        seen.append([len(each) for each in conversations])
        time.sleep(0.05)
        return [float(len(each)) for each in conversations]

    return Batches(
        lambda n, _: [n] * n, score_many, **{"size": 4, "tokens": 100, "wait_s": 0.2} | limits
    )


def scored(place: Batches, lengths: list[int]) -> dict[int, float]:
    for token, length in enumerate(lengths):
        place.start(token, len, (length, None))
    found: dict[int, float] = {}
    while len(found) < len(lengths):
        found |= {token: value for token, value, _ in place.collect(5.0)}
    place.close()
    return found


def test_a_batch_closes_at_its_size_and_at_its_padded_tokens() -> None:
    seen: list[list[int]] = []
    assert scored(batches(seen), [1] * 10) == dict.fromkeys(range(10), 1.0)
    assert seen == [[1] * 4, [1] * 4, [1] * 2]
    seen.clear()
    # 3 * 30 fit into 100 and 4 * 30 do not; 40 beside 30 does, 90 and 200 stand alone, the latter
    # though it is too long.
    assert sum(scored(batches(seen), [30, 30, 30, 30, 40, 90, 200, 5]).values()) == 455
    assert seen == [[30, 30, 30], [30, 40], [90], [200], [5]]


def test_a_batch_closes_when_its_first_conversation_has_waited() -> None:
    seen: list[list[int]] = []
    place = batches(seen, size=100, wait_s=0.1)
    began = time.monotonic()
    place.start(0, len, (1, None))
    assert place.collect(10.0) == [(0, 1.0, None)]
    assert 0.1 <= time.monotonic() - began < 5.0
    place.close()


def test_a_conversation_that_does_not_fit_is_refused_and_not_cut(
    settings: RewardConfig, model: RewardModel
) -> None:
    scorer = make_scorer(settings, model=model)
    scorer.submit(0, replace(rollouts(1)[0], response="apples " * CLASSIFIER_CONTEXT), PROMPT)
    with pytest.raises(
        RewardError, match=f"tokens, the reward model's context {CLASSIFIER_CONTEXT}"
    ):
        scorer.poll(10.0)
    scorer.close()


def test_a_model_that_cannot_run_ends_the_run() -> None:
    def broken(conversations: Any) -> list[float]:
        raise RuntimeError("out of memory")

    place = Batches(lambda n, _: [n], broken, size=4, tokens=100, wait_s=0.0)
    place.start(0, len, (1, None))
    with pytest.raises(RuntimeError, match="out of memory"):
        place.collect(10.0)
    place.close()


def test_on_cpu_the_model_stays_where_it_is(model: RewardModel) -> None:
    device = Device(
        torch=torch.device("cpu"), is_cuda=False, rank=0, local_rank=0, world_size=1, host="here"
    )
    before = model.score("7", PROMPT)
    model.wake(device)
    model.sleep(device)
    assert model.score("7", PROMPT) == before
    assert model.nbytes > 4 * 512 * 64
