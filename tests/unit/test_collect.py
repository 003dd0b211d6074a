"""One round of conversations without an engine: the test writes what the model says."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from r3 import assets
from r3.config import EnvConfig, RewardConfig
from r3.engine import CaptureSpec, Sampled, Sampling
from r3.models.shape import ModelShape
from r3.rewards.scorer import Scorer, make_scorer
from r3.rollout.collect import CollectedRollouts, Round
from r3.rollout.conversation import ConversationRules, ConversationSetup, EnvironmentFailed
from r3.types import Prompt
from tests.tiny import tiny_config

pytestmark = pytest.mark.unit

ENVIRONMENTS = """
class Late:
    '''Three turns; the reward comes with the last.'''
    reward = 1.0
    def reset(self, prompt):
        self.turns = 0
        return prompt.messages
    def step(self, message):
        self.turns += 1
        if self.turns < 3:
            return [{"role": "user", "content": "go on"}], None, False
        return [], self.reward, True

class Calls(Late):
    '''Rewards one call of a tool.'''
    def step(self, message):
        return [], float(len(message["tool_calls"])), True

class Silent(Late):
    '''The same without any reward.'''
    reward = None

class Half(Silent):
    '''Rewards only prompts with an even number.'''
    def reset(self, prompt):
        self.reward = None if int(prompt.answer) % 2 else 1.0
        return super().reset(prompt)

def length(response, prompt):
    return float(len(response))

def refuse(response, prompt):
    raise AssertionError("a reward function was called")
"""


def prompt(number: int) -> Prompt:
    messages = ({"role": "user", "content": "1+1?"},)
    return Prompt(id=f"rows:{number}", messages=messages, tokens_T=(3, 4, 5), answer=str(number))


class Script:
    """Rounds of conversations in which the model always says the same."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "mine.py"
        self.file.write_text(ENVIRONMENTS)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(assets.TINY_MOE)

    def scorer(self, *functions: str, weights: Sequence[float] = ()) -> Scorer:
        names = [name if name in ("env", "none") else f"{self.file}:{name}" for name in functions]
        return make_scorer(RewardConfig(function=tuple(names), weights=tuple(weights), retries=0))

    def play(
        self, environment: str, scorer: Scorer, *, prompts: int = 1, says: str = "hello", **env: Any
    ) -> CollectedRollouts:
        settings = EnvConfig(path=f"{self.file}:{environment}", **env)
        setup = ConversationSetup.of(settings, self.tokenizer, "tiny")
        assert setup.chat is not None
        rules = ConversationRules(
            setup=setup,
            sampling=Sampling(stop_tokens=(setup.chat.end,)),
            capture=CaptureSpec(
                policy_version=0,
                captures=False,
                on_missing="error",
                shape=ModelShape.read(tiny_config().model.path),
            ),
            run_seed=0,
            max_response_tokens=400,
            max_model_len=500,
            needs_reward=scorer.uses_environment,
        )
        asked = {number: prompt(number) for number in range(prompts)}
        round_ = Round(rules, scorer, asked, seed_step=1, samples_per_prompt=1)
        tokens = [*self.tokenizer(says, add_special_tokens=False)["input_ids"], setup.chat.end]
        remaining = prompts
        while remaining:
            turns, finished = round_.advance(engine_busy=False)
            remaining -= finished
            for turn in turns:
                sampled = Sampled(
                    key=turn.key,
                    tokens_T=tokens,
                    logprobs_T=[-1.0] * len(tokens),
                    routed_experts=None,
                    first_row=turn.first_row,
                    finish_reason="stop",
                )
                round_.receive_sample(sampled)
        result = round_.result()
        setup.environments.close()
        scorer.close()
        return result


@pytest.fixture
def script(tmp_path: Path) -> Script:
    return Script(tmp_path)


def shares(collected: CollectedRollouts) -> list[float | None]:
    """Shares of conversations rewarded by environment, by functions, and unfinished."""
    parts = [
        collected.metrics[f"reward/{name}_frac"]
        for name in ("by_environment", "by_function", "unfinished")
    ]
    return [type(part).reduce([part]) for part in parts]


def test_an_unfinished_conversation_gets_the_declared_reward(script: Script) -> None:
    scorer = script.scorer("refuse")
    collected = script.play("Late", scorer, max_turns=2, unfinished_reward=-0.5)
    assert collected.rewards == [-0.5]
    assert collected.rollouts[0].finish_reason == "turns"
    assert shares(collected) == [0, 0, 1]


def test_without_env_functions_score_what_the_environment_did_not(script: Script) -> None:
    assert script.play("Late", script.scorer("refuse")).rewards == [1.0]
    collected = script.play("Half", script.scorer("length"), prompts=4)
    assert collected.rewards == [1.0, 5.0, 1.0, 5.0]
    assert shares(collected) == [0.5, 0.5, 0]


def test_env_is_a_weighted_part_of_the_reward(script: Script) -> None:
    scorer = script.scorer("env", "length", weights=(2.0, 0.1))
    collected = script.play("Late", scorer)
    assert collected.rewards == [2.0 + 0.1 * 5]
    assert collected.parts == {(0, 0): {"env": 1.0, "length": 5.0}}
    assert shares(collected) == [1, 1, 0]


def test_an_unfinished_conversation_has_the_declared_part(script: Script) -> None:
    scorer = script.scorer("env", "length", weights=(2.0, 0.1))
    collected = script.play("Late", scorer, max_turns=2, unfinished_reward=-0.5)
    assert collected.rewards == [-1.0 + 0.1 * 5]
    assert shares(collected) == [0, 1, 1]


def test_a_weight_of_0_only_reports_the_function(script: Script) -> None:
    collected = script.play("Late", script.scorer("env", "length", weights=(1.0, 0.0)))
    assert collected.rewards == [1.0]
    assert collected.parts == {(0, 0): {"env": 1.0, "length": 5.0}}


def test_reward_function_none_leaves_rewards_to_the_environment(script: Script) -> None:
    collected = script.play("Late", script.scorer("none"))
    assert collected.rewards == [1.0] and collected.parts == {(0, 0): {"env": 1.0}}
    assert shares(collected) == [1, 0, 0]


def test_an_environment_gets_parsed_tool_calls(script: Script) -> None:
    says = '<tool_call>{"name": "a"}</tool_call>'
    collected = script.play("Calls", script.scorer("none"), says=says)
    assert collected.rewards == [1.0]
    assert collected.rollouts[0].messages[-1] == {"role": "assistant", "content": says}
    assert script.play("Calls", script.scorer("none")).rewards == [0.0]


@pytest.mark.parametrize("function", ["none", "env"])
def test_an_environment_that_owes_a_reward_has_failed(script: Script, function: str) -> None:
    with pytest.raises(EnvironmentFailed, match="ended without a reward"):
        script.play("Silent", script.scorer(function))
    collected = script.play("Silent", script.scorer(function), on_error="zero")
    assert collected.rewards == [0.0]
    assert shares(collected) == [None, None, None], "failed conversations are counted elsewhere"
