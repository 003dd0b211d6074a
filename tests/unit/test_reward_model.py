"""A reward model scores many conversations at once as it scores each by itself, in a thread beside
others' work.
"""

import json
import random
import shutil
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from r3.config import ConfigError, RewardConfig
from r3.judges import Batches, RewardModel
from r3.rewards.scorer import RewardError, make_scorer
from r3.types import Rollout
from tests.families import CLASSIFIER_CONTEXT, CLASSIFIER_TOLERANCE, classifier
from tests.memory import CPU
from tests.tiny import QUESTION as PROMPT
from tests.tiny import edit_json, responded


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> RewardConfig:
    path = classifier(tmp_path_factory.mktemp("classifier"))
    of_model: dict[str, Any] = dict(model_dtype="float32", model_batch=8, model_wait_s=0.02)
    return RewardConfig(function=("model",), model_path=str(path), **of_model)


@pytest.fixture(scope="module")
def model(settings: RewardConfig) -> RewardModel:
    return RewardModel(settings)


def rollouts(count: int) -> list[Rollout]:
    """Conversations of many lengths."""
    generator = random.Random(0)
    words = ("3", "+", "so", "apples", "####", "7")
    sizes = (generator.randint(1, 60) for _ in range(count))
    return [responded(" ".join(generator.choices(words, k=size))) for size in sizes]


def test_a_row_may_name_the_reward_model(settings: RewardConfig, model: RewardModel) -> None:
    settings = replace(settings, function=("row",), row_functions=("exact", "model"))
    (rollout,) = rollouts(1)
    named = [replace(PROMPT, metadata={"verifier": name}) for name in settings.row_functions]
    with closing(make_scorer(settings, model=model)) as scorer:
        scores = [scorer(rollout, prompt) for prompt in named]
    # A batch of one on both sides: the same arithmetic.
    assert scores == [0.0, model.score(rollout.response, PROMPT)]


PADDING = {
    "the tokenizer names no padding token": (None, None),
    "the model names the end token": ("<|im_end|>", 2),
    "only the tokenizer names one, the end token": ("<|im_end|>", None),
}


@pytest.mark.parametrize("case", PADDING)
def test_scores_are_those_of_transformers_alone(
    settings: RewardConfig, tmp_path: Path, case: str
) -> None:
    """One conversation per call and no padding there. A template that ends with the padding token
    is what chat models without a padding token of their own have.
    """
    of_tokenizer, of_model = PADDING[case]
    path = edited(settings, tmp_path, pad_token_id=of_model)
    edit_json(path / "tokenizer_config.json", pad_token=of_tokenizer)
    template = (path / "chat_template.jinja").read_text()
    (path / "chat_template.jinja").write_text(template.rstrip() + "<|im_end|>")
    model = RewardModel(replace(settings, model_path=str(path)))
    alone = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32)
    conversations = [model.encode(each.response, PROMPT) for each in rollouts(7)]
    assert all(each[-1] == 2 for each in conversations)
    assert alone.config.pad_token_id == of_model
    with torch.no_grad():
        expected = [alone(torch.tensor([each])).logits.item() for each in conversations]
    for size in (7, 1):
        batches = [conversations[i : i + size] for i in range(0, 7, size)]
        scores = [score for batch in batches for score in model.score_encoded(batch)]
        assert scores == pytest.approx(expected, abs=CLASSIFIER_TOLERANCE)
    # The score of the token before the last is another one.
    with torch.no_grad():
        before = [alone(torch.tensor([each[:-1]])).logits.item() for each in conversations]
    differs = [abs(a - b) for a, b in zip(before, expected, strict=True)]
    assert min(differs) > 10 * CLASSIFIER_TOLERANCE or of_model == 2


def edited(settings: RewardConfig, folder: Path, **facts: Any) -> Path:
    """A copy of the model's folder with other facts in config.json."""
    path = shutil.copytree(settings.model_path, folder / "edited")
    edit_json(path / "config.json", **facts)
    return path


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda name, one: {}, "files have no score.weight, which would be random"),
        (lambda name, one: {name: one.repeat(2, 1)}, "files have another shape of score.weight"),
        (lambda name, one: {"value_head.weight": one}, ""),
    ],
)
def test_a_head_is_in_the_files_under_a_known_name(
    settings: RewardConfig, model: RewardModel, tmp_path: Path, change: Any, rule: str
) -> None:
    path, name = edited(settings, tmp_path), "score.weight"
    tensors = load_file(path / "model.safetensors")
    tensors |= change(name, tensors.pop(name))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    settings = replace(settings, model_path=str(path))
    if not rule:
        assert RewardModel(settings).score("7", PROMPT) == model.score("7", PROMPT)
        return
    tensors = {name: tensor for name, tensor in tensors.items() if ".layers.1." not in name}
    with pytest.raises(ConfigError, match=rule):
        RewardModel(settings)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"layers.1.mlp.gate_proj.weight and \d more tensors"):
        RewardModel(settings)


@pytest.mark.parametrize("on_error", ["zero", "stop"])
def test_a_template_that_refuses_is_an_error_of_the_sample(
    settings: RewardConfig, tmp_path: Path, on_error: Any
) -> None:
    path = edited(settings, tmp_path)
    template = (path / "chat_template.jinja").read_text()
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    (path / "chat_template.jinja").write_text(refuses + template)
    settings = replace(settings, model_path=str(path), on_error=on_error, retries=0)
    system = replace(PROMPT, messages=({"role": "system", "content": "x"}, *PROMPT.messages))
    text = "the reward model's chat template refuses the conversation: no system"
    with closing(make_scorer(settings, model=RewardModel(settings))) as scorer:
        scorer.submit(0, rollouts(1)[0], system)
        if on_error == "stop":
            with pytest.raises(RewardError, match=text):
                scorer.poll(10.0)
        else:
            (result,) = scorer.poll(10.0)
            assert text in result.failure and result.reward == 0.0
            assert scorer(rollouts(1)[0], PROMPT) != 0.0


def test_the_model_sees_the_turns_and_tools_of_the_rollout(
    settings: RewardConfig, tmp_path: Path
) -> None:
    path = edited(settings, tmp_path)
    shows = "{{ tools | tojson }}{% for m in messages %}[{{ m.role }} {{ m.content }}]{% endfor %}"
    (path / "chat_template.jinja").write_text(shows)
    model = RewardModel(replace(settings, model_path=str(path)))
    tool = {"type": "function", "function": {"name": "f"}}
    spoken = [("user", "3 + 4?"), ("assistant", "f(3)"), ("tool", "3"), ("assistant", "7")]
    messages = tuple({"role": role, "content": content} for role, content in spoken)
    (made,) = rollouts(1)
    rollout = replace(made, messages=(*messages, {"role": "user", "content": "bye"}), response="7")
    with closing(make_scorer(settings, model=model)) as scorer:
        score = scorer(rollout, replace(PROMPT, tools=(tool,)))
    text = json.dumps([tool]) + "".join(f"[{role} {content}]" for role, content in spoken)
    tokens = model._tokenizer(text, add_special_tokens=False)["input_ids"]
    assert score == model.score_encoded([tokens])[0]


def test_padding_without_a_mask_changes_scores(model: RewardModel) -> None:
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

    limits = {"size": 4, "tokens": 100, "wait_s": 0.2} | limits
    return Batches(lambda n, _: [n] * n, score_many, **limits)


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
    with closing(batches(seen, size=100, wait_s=0.1)) as place:
        began = time.monotonic()
        place.start(0, len, (1, None))
        assert place.collect(10.0) == [(0, 1.0, None)]
        assert 0.1 <= time.monotonic() - began < 5.0


def test_a_conversation_that_does_not_fit_is_refused_and_not_cut(
    settings: RewardConfig, model: RewardModel
) -> None:
    with closing(make_scorer(settings, model=model)) as scorer:
        scorer.submit(0, replace(rollouts(1)[0], response="apples " * CLASSIFIER_CONTEXT), PROMPT)
        with pytest.raises(RewardError, match=f"the reward model's context {CLASSIFIER_CONTEXT}"):
            scorer.poll(10.0)


def test_a_model_that_cannot_run_ends_the_run() -> None:
    def broken(conversations: Any) -> list[float]:
        raise RuntimeError("out of memory")

    with closing(Batches(lambda n, _: [n], broken, size=4, tokens=100, wait_s=0.0)) as place:
        place.start(0, len, (1, None))
        with pytest.raises(RuntimeError, match="out of memory"):
            place.collect(10.0)


def test_on_cpu_the_model_stays_where_it_is(model: RewardModel) -> None:
    before = model.score("7", PROMPT)
    model.wake(CPU)
    model.sleep(CPU)
    assert model.score("7", PROMPT) == before
    assert model.nbytes > 4 * 512 * 64
