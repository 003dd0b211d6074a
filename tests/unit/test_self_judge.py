"""The policy as a judge of its own responses, without an engine: the test writes the replies."""

import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from r3 import checks, extras
from r3.config import RewardConfig
from r3.data import Renderer
from r3.engine import Sampled, Turn
from r3.rewards.scorer import RewardError, RewardResult, Scorer, make_scorer
from r3.rollout import read_task
from tests.settings import changed, found
from tests.tiny import FEW_ROWS, responded, tiny_config, tokenizer_with
from tests.tiny import QUESTION as PROMPT

TOKENIZER = tokenizer_with()


def scorer_of(*functions: str, **settings: Any) -> Scorer:
    config = RewardConfig(function=functions or ("self_judge",), **settings)
    return make_scorer(config, renderer=Renderer(TOKENIZER, {}))


def reply_to(turn: Turn, text: str) -> Sampled:
    """A reply that ends in "..." has run out of tokens."""
    return Sampled(
        key=turn.key,
        tokens_T=TOKENIZER(text.removesuffix("..."), add_special_tokens=False)["input_ids"],
        logprobs_T=[],
        routed_experts=None,
        first_row=turn.first_row,
        finish_reason="length" if text.endswith("...") else "stop",
    )


def judged(
    scorer: Scorer, replies: dict[str, str], *, max_model_len: int = 500
) -> tuple[dict[Any, RewardResult], dict[str, Turn]]:
    """Score the responses that have these replies; return results and turns by response."""
    judging = extras.questions(scorer.judge, max_model_len)
    for number, response in enumerate(replies):
        scorer.submit(response, responded(response, number), PROMPT)
    turns, finished = judging.with_questions([], 3)
    assert finished == 3
    asked = {}
    for turn in turns:
        text = TOKENIZER.decode(turn.tokens_T)
        response = next(each for each in replies if f"<{each}>" in text)
        asked[response] = turn
        reply = replies[response]
        assert judging.takes(reply_to(turn, reply))
    return {each.key: each for each in scorer.poll()}, asked


@pytest.fixture
def template(tmp_path: Path) -> str:
    path = tmp_path / "judge.txt"
    path.write_text("{question} {answer} <{response}>")
    return str(path)


def test_replies_become_scores_and_what_holds_none_has_the_set_value(template: str) -> None:
    replies = {"good": '{"score": 0.75}', "last": '{"score": 1} no: {"score": 0.5}'}
    replies |= {"words": "it is right, 1 of 1", "thought": '<think>{"score": 1}', "mute": ""}
    replies |= {"endless": '{"score": NaN}', "cut": '{"score": 1}...'}
    scorer = scorer_of(prompt_file=template, no_verdict=-0.25)
    results, _ = judged(scorer, replies)
    rewards = {name: result.reward for name, result in results.items()}
    none = dict.fromkeys(("words", "thought", "endless", "cut", "mute"), -0.25)
    assert rewards == {"good": 0.75, "last": 0.5} | none
    for name, result in results.items():
        assert result.metrics["reward/no_verdict_frac"] == float(name in none)
        assert not result.failure


def test_a_pattern_finds_the_score_and_a_cut_number_is_none(template: str) -> None:
    scorer = scorer_of(prompt_file=template, pattern=r"Score: (\d+)")
    results, _ = judged(scorer, {"a": "Score: 7", "b": "Score: 1...", "c": "7"})
    assert {name: result.reward for name, result in results.items()} == {"a": 7, "b": 0, "c": 0}


def test_the_question_is_greedy_in_the_policys_chat_template(template: str) -> None:
    scorer = scorer_of(prompt_file=template, max_tokens=9)
    results, turns = judged(scorer, {"r": ""})
    message = {"role": "user", "content": "3 + 4? #### 7 <r>"}
    options = {"add_generation_prompt": True, "return_dict": False}
    expected = TOKENIZER.apply_chat_template([message], **options)
    turn = turns["r"]
    assert list(turn.tokens_T) == expected and turn.max_tokens == 9 and turn.key < 0
    assert turn.sampling.temperature == 0.0 and turn.sampling.stop_tokens
    assert results["r"].metrics["reward/question_tokens_mean"] == len(expected)


def test_a_question_without_room_has_no_verdict() -> None:
    scorer = scorer_of(no_verdict=0.125)
    results, turns = judged(scorer, {"r": ""}, max_model_len=20)
    assert not turns and results["r"].reward == 0.125
    assert results["r"].metrics["reward/no_verdict_frac"] == 1.0


def test_a_question_that_the_template_refuses_is_a_failure() -> None:
    scorer = scorer_of()
    scorer.submit("r", responded("half a character: \ud800"), PROMPT)
    with pytest.raises(RewardError, match=r"refuses the judge's prompt.*half of a character"):
        scorer.poll()


def test_a_round_does_not_wait_for_its_own_engine() -> None:
    """Results cannot come before the engine has the question: `poll` returns at once."""
    with closing(scorer_of()) as scorer:
        scorer.submit("r", responded("r"), PROMPT)
        began = time.monotonic()
        assert scorer.poll(60.0) == [] and scorer.outstanding == 1
        assert time.monotonic() - began < 30.0


def test_it_is_part_of_a_sum_and_of_row(template: str) -> None:
    rows = {"row_functions": ("exact", "self_judge"), "weights": (2.0, 1.0)}
    scorer = scorer_of("row", "gsm8k", prompt_file=template, **rows)
    prompt = replace(PROMPT, metadata={"verifier": "self_judge"})
    judging = extras.questions(scorer.judge, 500)
    scorer.submit("r", responded("#### 7"), prompt)
    scorer.submit("other", responded("#### 7"), replace(prompt, metadata={"verifier": "exact"}))
    (turn,), _ = judging.with_questions([], 0)
    judging.takes(reply_to(turn, '{"score": 0.5}'))
    assert not judging.takes(replace(reply_to(turn, ""), key=0)), "of a conversation"
    results = {each.key: each for each in scorer.poll()}
    assert results["r"].parts == {"row": 0.5, "gsm8k": 1.0, "row_self_judge": 0.5}
    assert (results["r"].reward, results["other"].reward) == (2.0, 3.0)


def test_the_engine_has_room_for_the_longest_question(template: str) -> None:
    """A derived maximum counts the judge's prompt and reply, as long as the context allows."""
    few = {"path": (FEW_ROWS,)}
    plain = read_task(tiny_config(data=few)).max_model_len
    settings = {"prompt_file": template, "max_tokens": 32, "function": ("self_judge",)}
    asked = read_task(tiny_config(data=few, reward=settings)).max_model_len
    assert plain + 32 < asked < plain + 32 + 60
    fixed = tiny_config(data=few, reward=settings, engine={"max_model_len": 200})
    assert read_task(fixed).max_model_len == 200
    long = read_task(tiny_config(data=few, reward=settings | {"max_tokens": 10**6}))
    assert long.max_model_len == long.shape.max_position_embeddings


def test_settings_of_the_judge_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "judge.txt"
    path.write_text("{question}")
    own = {"reward.function": "self_judge"}
    assert found(own) == {}
    assert "no {response}" in found(own | {"reward.prompt_file": str(path)})["reward.prompt_file"]
    no_answers = own | {"data.answer_key": ""}
    for text, rule in (
        ("{{response}}", "has response in two pairs of braces"),
        ("{response} {{ answer }}", "has answer in two pairs of braces"),
        ("{response} {reference}", "has {reference}, which the judge would be shown as it is"),
    ):
        path.write_text(text)
        assert rule in found(own | {"reward.prompt_file": str(path)})["reward.prompt_file"]
    # Braces of JSON and of LaTeX, which are no places.
    path.write_text('{question} {response} {"score": 1} {{"score": 1}} \\frac{a}{b} x_{n} e^{x}')
    assert "reward.prompt_file" not in found(no_answers | {"reward.prompt_file": str(path)})
    path.write_text("{question} {response}")
    assert "reward.prompt_file" not in found(no_answers | {"reward.prompt_file": str(path)})
    twice = {"reward.function": ["row", "self_judge"], "reward.row_functions": ["self_judge"]}
    assert "would be judged twice" in found(twice)["reward.row_functions"]


def test_settings_of_self_judge_have_an_effect() -> None:
    given = {"reward.no_verdict": 1.0, "reward.function": "self_judge", "reward.max_tokens": 7}
    assert "reward." not in " ".join(checks.warnings(changed(given), 2))
