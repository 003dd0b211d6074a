"""Rows that are too easy or too hard are passed over; sources keep their share of the places."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from r3.config import RewardConfig
from r3.data import Dataset, prompts_from
from r3.engine import Turn
from r3.mixture import Order, of_sources, source_names, verdict
from r3.rewards.scorer import make_scorer
from r3.rollout import ConversationSetup, RoundResult
from r3.types import Prompt
from tests.rounds import numbered, play_round
from tests.rows import write
from tests.settings import changed
from tests.tiny import tiny_config


def dataset(*, weights: tuple[float, ...] = (), **sizes: int) -> Dataset:
    sizes = sizes or {"a": 5, "b": 4}
    prompts = [
        Prompt(id=f"{label}:{i}", messages=(), tokens_T=(1,), answer="")
        for label, size in sizes.items()
        for i in range(size)
    ]
    return Dataset(prompts=tuple(prompts), weights=weights, read=tuple(sizes.items()))


def ids(order: Order, count: int) -> list[str]:
    return [each.id for each in order.take(count).prompts]


@pytest.mark.parametrize(
    ("right", "count", "bounds", "expected"),
    [
        (0, 8, (0.0, 1.0), "hard"),
        (8, 8, (0.0, 1.0), "easy"),
        (1, 8, (0.0, 1.0), ""),
        (7, 8, (0.0, 1.0), ""),
        (2, 8, (0.25, 0.75), "hard"),
        (6, 8, (0.25, 0.75), "easy"),
        (3, 8, (0.25, 0.75), ""),
        (0, 0, (0.0, 1.0), ""),  # all of its conversations were dropped
    ],
)
def test_a_row_is_judged_by_its_bounds(
    right: int, count: int, bounds: tuple[float, float], expected: str
) -> None:
    assert verdict(right, count, *bounds) == expected


@pytest.mark.parametrize("weights", [(), (3.0, 1.0), (0.1, 0.2)])
def test_without_verdicts_the_order_is_that_of_a_plain_run(weights: tuple[float, ...]) -> None:
    data = dataset(weights=weights)
    order = Order(data, 7)
    found = [*ids(order, 3), *ids(order, 20), *ids(order, 1)]
    assert found == [each.id for each in prompts_from(data, seed=7, start=0, count=24)]


def test_a_row_comes_back_after_its_epochs() -> None:
    order = Order(dataset(a=5), 0)
    order.judge({"a:2": "hard", "a:3": "easy", "a:0": ""}, 2)
    assert (order.count("hard"), order.count("easy")) == (1, 1)
    steps = [order.take(1) for _ in range(3 + 3 + 5)]
    assert sum(each.passed_over for each in steps) == 4
    assert sum(each.taken_back for each in steps) == 0
    first, last = steps[:6], steps[6:]
    assert {each.prompts[0].id for each in first} == {"a:0", "a:1", "a:4"}
    assert {each.prompts[0].id for each in last} == {f"a:{i}" for i in range(5)}
    assert not order.held


def test_sources_keep_their_share_whatever_is_held_back() -> None:
    order = Order(dataset(weights=(3.0, 1.0), a=20, b=20), 0)
    order.judge({f"a:{i}": "easy" for i in range(20)}, 3)  # all of it
    order.judge({f"b:{i}": "hard" for i in range(10)}, 3)
    counts: Counter[str] = Counter()
    for _ in range(25):
        step = ids(order, 8)
        assert Counter(each[0] for each in step) == {"a": 6, "b": 2}
        counts += Counter(each[0] for each in step)
    assert counts == {"a": 150, "b": 50}


def test_a_step_is_full_even_if_everything_is_held_back() -> None:
    order = Order(dataset(a=6), 0)
    order.judge({f"a:{i}": "easy" for i in range(6)}, 100)
    taken = order.take(4)
    assert len({each.id for each in taken.prompts}) == 4
    assert taken.taken_back == 4 and taken.passed_over == 6
    # Two of them rest: those that were taken are judged anew.
    assert len(order.held) == 2 and all(epochs == 99 for epochs, _ in order.held.values())


def test_no_row_is_taken_twice_while_one_is_held_back() -> None:
    order = Order(dataset(a=6), 3)
    order.judge({f"a:{i}": "hard" for i in range(2)}, 50)
    taken = order.take(6)
    assert sorted(each.id for each in taken.prompts) == [f"a:{i}" for i in range(6)]
    assert (taken.passed_over, taken.taken_back) == (2, 2)


def test_no_row_is_lost() -> None:
    """Every row is judged easy again and again: 400 places of 40 rows are 10 each."""
    order = Order(dataset(a=40), 1)
    counts: Counter[str] = Counter()
    for _ in range(100):
        step = ids(order, 4)
        counts += Counter(step)
        order.judge(dict.fromkeys(step, "easy"), 4)
    # Where a step ends in an epoch moves a row by a few epochs.
    assert len(counts) == 40 and min(counts.values()) >= 8 and max(counts.values()) <= 12


def test_the_order_continues_from_its_state() -> None:
    data = dataset(weights=(2.0, 1.0), a=9, b=7)

    def steps(order: Order, first: int, last: int) -> list[list[str]]:
        found = []
        for step in range(first, last):
            found.append(ids(order, 5))
            order.judge({found[-1][step % 5]: "easy", found[-1][(step + 2) % 5]: "hard"}, 2)
        return found

    whole = Order(data, 5)
    before, after = steps(whole, 0, 6), steps(whole, 6, 12)
    half, resumed = Order(data, 5), Order(data, 5)
    assert steps(half, 0, 6) == before
    resumed.load_state_dict(json.loads(json.dumps(half.state_dict())))
    assert steps(resumed, 6, 12) == after
    assert resumed.state_dict() == whole.state_dict()


def test_names_of_sources_fit_metrics() -> None:
    labels = ["rows.jsonl", "hub:openai/gsm8k:main:train", "rows.jsonl#2", "rows_jsonl:2", "a b"]
    names = source_names([*labels, "rows_jsonl/2"])
    assert names["rows.jsonl"] == "rows.jsonl" and names["a b"] == "a_b"
    assert names["hub:openai/gsm8k:main:train"] == "hub_openai_gsm8k_main_train"
    assert len(set(names.values())) == 6


CODE = """
class Guess:
    stop = ("?",)
    def reset(self, prompt):
        self.turns = 0
        return [{"role": "user", "content": f"Number {prompt.answer}"}]
    def step(self, message):
        self.turns += 1
        if int(self.turns) == 2:
            return [], 0.5, True, {"turns": self.turns, "two": 2}
        return [{"role": "user", "content": "Again."}], None, False

class Agent:
    async def run(self, task, model):
        for _ in range(3):
            await model.chat(list(task.messages))
        return float(task.answer), {"three": 3}

def length(response, prompt):
    return float(len(response))
"""


def outcomes(result: RoundResult) -> dict[Any, Any]:
    return {
        (one := each.rollout).key: (one.prompt_id, one.tokens_T.tolist(), one.response)
        + (each.reward, dict(each.parts), dict(one.metrics))
        for each in result.samples
    }


def test_a_round_of_four_environments_is_four_rounds(tokenizer: Any, tmp_path: Path) -> None:
    """Each conversation is what it is alone with its environment; metrics are added."""
    code = write(tmp_path, CODE.replace('"turns": self.turns, ', ""), name="env.py")
    envs = ["single_turn", "calculator", f"{code}:Guess", f"{code}:Agent"]
    labels = [f"{i}.jsonl" for i in range(4)]
    config = changed({"data.path": labels, "data.env": envs}, tiny_config())
    plain = ConversationSetup.of(config.env, tokenizer, "tiny")
    setup, _ = of_sources(config, config.data.path, plain, {})
    prompts = {i: replace(numbered(i), id=f"{i * 3 % 4}.jsonl:{i}") for i in range(12)}

    def says(turn: Turn) -> str:
        call = '<tool_call>{"name": "calc", "arguments": {"expression": "1+2"}}</tool_call>'
        return call if len(turn.tokens_T) % 3 == 0 else "yes #### 3"

    def play(setup: ConversationSetup, prompts: dict[int, Prompt]) -> RoundResult:
        scorer = make_scorer(RewardConfig(function=(f"{code}:length",)))
        return play_round(setup, tokenizer, prompts, says=says, samples=2, scorer=scorer)[0]

    mixed = play(setup, prompts)
    alone, expected = [], dict[Any, Any]()
    for label, env in zip(labels, config.environments, strict=True):
        own = {group: each for group, each in prompts.items() if each.id.startswith(label)}
        alone.append(play(ConversationSetup.of(env, tokenizer, "tiny"), own))
        expected |= outcomes(alone[-1])
    assert outcomes(mixed) == expected and len({key[:2] for key in expected}) == 24
    assert [each.rollout.key for each in mixed.samples] == sorted(expected)
    calls = [part.metrics["env/calls"].value for part in alone[1:]]
    assert mixed.metrics["env/calls"].value == sum(calls)
    turns = [part.metrics["env/turns_mean"] for part in alone[1:]]
    whole = mixed.metrics["env/turns_mean"]
    assert (whole.total, whole.count) == (sum(t.total for t in turns), sum(t.count for t in turns))
    # Of 24 conversations 6 have a workflow, and 6 a game of two turns, that give rewards.
    shares = {name: mixed.metrics[f"reward/by_{name}_frac"] for name in ("environment", "function")}
    assert {name: (each.total, each.count) for name, each in shares.items()} == {
        "environment": (12.0, 24.0),
        "function": (12.0, 24.0),
    }
