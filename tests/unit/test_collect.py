"""One round of conversations without an engine: the test writes what the model says."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import fsum
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from r3.config import EnvConfig, RewardConfig
from r3.engine import CaptureSpec, Sampled, Transcript, Turn
from r3.metrics import merged_parts
from r3.models.shape import ModelShape
from r3.rewards.scorer import Scorer, make_scorer
from r3.rollout import (
    ConversationSetup,
    EnvironmentFailed,
    RoundResult,
    rollout_metrics,
    without_end,
)
from tests.errors import Capsys
from tests.rounds import env_of, numbered, play_round
from tests.rows import write
from tests.talkers import values
from tests.tiny import BASE, parts_of, rewards_of, tiny_config, tokenizer_folder

ENVIRONMENTS = """
import time

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

class Silent(Late):
    '''The same without any reward.'''
    reward = None

class Half(Silent):
    '''Rewards only prompts with an even number.'''
    def reset(self, prompt):
        self.reward = None if int(prompt.answer) % 2 else 1.0
        return super().reset(prompt)

class Counts(Late):
    '''Reports a number per turn, and one that depends on the prompt.'''
    def reset(self, prompt):
        self.share = int(prompt.answer) / 10
        return super().reset(prompt)
    def step(self, message):
        messages, reward, done = super().step(message)
        return messages, reward, done, {"share": self.share, "turn": self.turns * self.scale}
    scale = 1

class Loose(Counts):
    scale = float("nan")

class Answers(Silent):
    '''Replies to each call of a tool, and goes on without one, too.'''
    def step(self, message):
        _, reward, done = super().step(message)
        calls = [call["name"] for call in message["tool_calls"]]
        return [{"role": "tool", "content": f"#### {name}"} for name in calls], reward, done

class Endless(Late):
    def step(self, message):
        return [{"role": "user", "content": "again"}], None, False

class Hears(Silent):
    '''Tells the model what it said, twice; the first time with a control token after it.'''
    def reset(self, prompt):
        return [{"role": "system", "content": "Be brief."}, *super().reset(prompt)]
    def step(self, message):
        _, reward, done = super().step(message)
        text = message["content"] + "<|im_end|>" * (self.turns == 1)
        return [{"role": "user", "content": text}], reward, done

def length(response, prompt):
    return float(len(response))

def shares(response, prompt):
    return 1.0, {"tenth": int(prompt.answer) / 10}

def group_size(responses, prompt):
    return [float(len(responses))] * len(responses)

class Slow(Late):
    '''Takes a second to begin the conversation of one prompt.'''
    def reset(self, prompt):
        time.sleep(int(prompt.answer) == 9)
        return super().reset(prompt)

class Fails(Silent):
    '''Raises in the second of three conversations, and gives no reward in the others.'''
    opened = 0
    def reset(self, prompt):
        Fails.opened += 1
        self.number = Fails.opened
        return super().reset(prompt)
    def step(self, message):
        if self.number == 2:
            raise RuntimeError("no reply")
        return super().step(message)

def refuse(response, prompt):
    raise AssertionError("a reward function was called")
"""


class Script:
    """Rounds of conversations in which the model always says the same.

    Attributes:
        first_turn_s: seconds until the last round asked the engine for a turn.
    """

    first_turn_s = 0.0

    def __init__(self, folder: Path, tokenizer: Any) -> None:
        self.file, self.tokenizer = write(folder, ENVIRONMENTS, name="mine.py"), tokenizer

    def scorer(self, *functions: str, weights: Sequence[float] = ()) -> Scorer:
        names = [name if name in ("env", "none") else f"{self.file}:{name}" for name in functions]
        return make_scorer(RewardConfig(function=tuple(names), weights=tuple(weights), retries=0))

    def play(
        self,
        environment: str,
        scorer: Scorer | str,
        *,
        prompts: int | Sequence[int] = 1,
        says: str = "hello",
        asked: Mapping[str, Any] = {},
        **options: Any,
    ) -> RoundResult:
        """Play one round; `asked` are fields of the prompts, `options` of env and the round."""
        settings = env_of(options, path=f"{self.file}:{environment}")
        numbers = range(prompts) if isinstance(prompts, int) else prompts
        began, first = time.monotonic(), []

        def answer(turn: Turn) -> str:
            first.append(time.monotonic() - began)
            return says

        result, _ = play_round(
            ConversationSetup.of(settings, self.tokenizer, "tiny"),
            self.tokenizer,
            {number: replace(numbered(number), **asked) for number in numbers},
            says=answer,
            scorer=self.scorer(scorer) if isinstance(scorer, str) else scorer,
            **options,
        )
        self.first_turn_s = first[0] if first else 0.0
        return result


@pytest.fixture
def script(tmp_path: Path, tokenizer: Any) -> Script:
    return Script(tmp_path, tokenizer)


def shares(collected: RoundResult) -> list[float | None]:
    """Shares of conversations rewarded by environment, by functions, and unfinished."""
    found, names = values(collected.metrics), ("by_environment", "by_function", "unfinished")
    return [found.get(f"reward/{name}_frac") for name in names]


UNFINISHED: dict[str, Any] = {"max_turns": 2, "unfinished_reward": -0.5}


SUM = {"env": 2.0, "length": 0.1}
# Environment, weights of functions, options, rewards, and the shares.
WHO: dict[str, tuple[str, dict[str, float], dict[str, Any], list[float], list[float]]] = {
    "environment": ("Late", {"refuse": 1.0}, {}, [1.0], [1, 0, 0]),
    "none": ("Late", {"none": 1.0}, {}, [1.0], [1, 0, 0]),
    "functions where it gave none": (
        *("Half", {"length": 1.0}, {"prompts": 4}),
        *([1.0, 5.0, 1.0, 5.0], [0.5, 0.5, 0]),
    ),
    "a sum": ("Late", SUM, {}, [2.0 + 0.1 * 5], [1, 1, 0]),
    "weight 0": ("Late", {"env": 1.0, "length": 0.0}, {}, [1.0], [1, 1, 0]),
    "unfinished": ("Late", {"refuse": 1.0}, UNFINISHED, [-0.5], [0, 0, 1]),
    "unfinished in a sum": ("Late", SUM, UNFINISHED, [-1.0 + 0.1 * 5], [0, 1, 1]),
}


@pytest.mark.parametrize("case", WHO)
def test_who_gives_the_reward(case: str, script: Script) -> None:
    name, weights, options, rewards, expected = WHO[case]
    scorer = script.scorer(*weights, weights=[*weights.values()])
    collected = script.play(name, scorer, **options)
    assert rewards_of(collected) == rewards and shares(collected) == expected
    is_unfinished = collected.rollouts[0].finish_reason == "turns"
    assert is_unfinished == ("max_turns" in options)
    if weights.keys() == SUM.keys() and not is_unfinished:
        assert parts_of(collected) == {(0, 0): {"env": 1.0, "length": 5.0}}


def test_users_metrics_do_not_depend_on_the_ranks(script: Script) -> None:
    def play(*ranks: Sequence[int]) -> tuple[dict[str, float], list[Any]]:
        both = ("env", "shares")
        rounds = [script.play("Counts", script.scorer(*both), prompts=each) for each in ranks]
        parts = [rollout_metrics(each.samples) for each in rounds]
        merged = merged_parts([{key: [part] for key, part in each.items()} for each in parts])
        reported = [rollout.metrics for each in rounds for rollout in each.rollouts]
        return {key: merged[key] for key in ("env/share", "env/turn", "reward/tenth")}, reported

    whole, reported = play(range(7))
    assert reported[3] == {"env/share": 0.3, "env/turn": 3.0, "reward/tenth": 0.3}, "the last turn"
    # Equal, not close: 0.1 + 0.2 + 0.3 depends on the order.
    tenths = fsum(number / 10 for number in range(7)) / 7
    assert whole == {"env/share": tenths, "env/turn": 3.0, "reward/tenth": tenths}
    assert play([0, 2, 4, 6], [1, 3, 5])[0] == play([6], [5, 0], [1, 2, 3, 4])[0] == whole


@pytest.mark.parametrize(
    ("name", "function", "message"),
    [
        ("Silent", "none", "ended without a reward"),
        ("Silent", "env", "ended without a reward"),
        ("Loose", "none", "metric 'turn' is nan, not a finite number"),
    ],
)
def test_an_environment_that_owes_a_reward_or_a_number_has_failed(
    script: Script, name: str, function: str, message: str
) -> None:
    with pytest.raises(EnvironmentFailed, match=message):
        script.play(name, function)
    collected = script.play(name, function, on_error="zero")
    assert rewards_of(collected) == [0.0] and collected.rollouts[0].metrics == {}
    assert shares(collected) == [None, None, None], "failed conversations are counted elsewhere"


ODD = """
class Odd:
    '''Returns what no chat template or tokenizer can use.'''
    part = None
    def __init__(self, where="step"):
        self.where = where
    def messages(self, where):
        return [{"role": "user", "content": "x"} | (self.part if where == self.where else {})]
    def reset(self, prompt):
        return self.messages("reset")
    def step(self, message):
        return self.messages("step"), 1.0, False

class Half(Odd):
    part = {"content": "a \\ud800 b"}

class Endless(Odd):
    part = {"tool_calls": []}
    part["tool_calls"].append(part)

class Keys(Odd):
    part = {"more": {(1, 2): 3}}

class Sealed(Odd):
    class Unwilling:
        def __str__(self):
            raise RuntimeError("no text")
    part = {"more": Unwilling()}
"""


@pytest.mark.parametrize("where", ["reset", "step"])
@pytest.mark.parametrize("name", ["Half", "Endless", "Keys", "Sealed"])
def test_drop_covers_messages_that_cannot_be_used(
    script: Script, name: str, where: str, capsys: Capsys
) -> None:
    script.file.write_text(ODD)
    odd: dict[str, Any] = {"args": (f"where={where}",)}
    with pytest.raises(EnvironmentFailed, match="on_error drop"):
        script.play(name, "none", **odd)
    collected = script.play(name, "none", prompts=2, on_error="drop", **odd)
    assert collected.rollouts == [] and collected.metrics["env/dropped"].value == 2
    assert capsys.readouterr().err.count("the environment failed (") == 1, "the first one"


@pytest.mark.parametrize(("where", "outcome"), [("reset", "error"), ("step", "length")])
def test_a_huge_observation_is_not_tokenised(script: Script, where: str, outcome: str) -> None:
    script.file.write_text(ODD + "\nclass Huge(Odd):\n    part = {'content': 'a' * 50_000_000}\n")
    huge: dict[str, Any] = {"args": (f"where={where}",), "on_error": "zero"}
    began = time.monotonic()
    collected = script.play("Huge", "none", **huge)
    assert time.monotonic() - began < 10  # tokenising it takes more than a minute
    ends = [rollout.finish_reason for rollout in collected.rollouts]
    assert ends == ([] if where == "reset" else [outcome])
    assert collected.metrics["env/dropped"].value == (where == "reset")


STATES = """
class Locked:
    '''Cannot be pickled.'''
    def reset(self, prompt):
        return prompt.messages
    def step(self, message):
        return [{"role": "user", "content": "go on"}], None, False
    def __reduce__(self):
        raise RuntimeError("not now")

class Lost(Locked):
    '''Can be pickled and not be restored.'''
    def __reduce__(self):
        return fail, ()

def fail():
    raise OSError("the container is gone")
"""


@pytest.mark.parametrize("name", ["Locked", "Lost"])
@pytest.mark.parametrize("on_error", ["stop", "zero", "drop"])
def test_on_error_covers_suspended_environments(script: Script, name: str, on_error: str) -> None:
    script.file.write_text(STATES)

    def two_rounds() -> tuple[RoundResult, RoundResult]:
        # The budget ends with the first message, which is whole: one token and the end.
        settings: dict[str, Any] = {"on_error": on_error, "token_budget": 2, "says": "7"}
        first = script.play(name, "none", **settings)
        return first, script.play(name, "none", prompts=0, resumed=first.suspended, **settings)

    if on_error == "stop":
        with pytest.raises(EnvironmentFailed, match=r"pickled: Runtime|restored: OSError"):
            two_rounds()
        return
    first, second = two_rounds()
    assert len(first.suspended) == (name == "Lost") and not second.suspended
    rewards = [*rewards_of(first), *rewards_of(second)]
    assert rewards == ([0.0] if on_error == "zero" else [])


def test_resumed_turns_do_not_wait_for_slow_environments(script: Script) -> None:
    resumed = script.play("Slow", "none", token_budget=2).suspended
    assert len(resumed) == 1
    script.play("Slow", "none", prompts=[9], resumed=resumed, token_budget=2)
    assert script.first_turn_s < 0.5  # the other environment takes a second to open


def test_samples_of_a_prompt_are_scored_together(script: Script) -> None:
    """Also if the environment rewarded some groups itself: those are not scored by functions."""
    collected = script.play("Half", script.scorer("group_size", "length"), prompts=2, samples=3)
    assert rewards_of(collected) == [1.0] * 3 + [3.0 + 5.0] * 3
    assert parts_of(collected)[1, 0] == {"group_size": 3.0, "length": 5.0}


@pytest.mark.parametrize("on_error", ["zero", "drop"])
def test_a_group_goes_on_without_a_failed_conversation(script: Script, on_error: str) -> None:
    collected = script.play("Fails", "group_size", samples=3, on_error=on_error)
    assert sorted(rewards_of(collected)) == [0.0] * (on_error == "zero") + [2.0, 2.0]


@pytest.mark.parametrize("bad", [float("nan"), float("-inf"), float("inf")])
def test_a_log_probability_that_is_not_finite_is_refused(bad: float) -> None:
    shape = ModelShape.read(tiny_config().model.path)
    spec = CaptureSpec(policy_version=0, captures=False, on_missing="error", shape=shape)
    given: dict[str, Any] = {"key": 0, "routed_experts": None, "first_row": 0}
    given |= {"tokens_T": [3, 4, 5], "logprobs_T": [-1.0, bad, -1.0], "finish_reason": "stop"}
    with pytest.raises(FloatingPointError, match=f"rollout p7/2: .* log-probability {bad}"):
        Transcript(spec, [1, 2], who="rollout p7/2").append_sample(Sampled(**given))


@pytest.mark.parametrize("is_base", [False, True], ids=["chat model", "base model"])
def test_a_message_has_one_text_and_each_end_ends_its_turn(
    is_base: bool, script: Script, tmp_path: Path
) -> None:
    """Tokens as a server of the chat template shows them; the text with all but its end token."""
    said = "<think>2</think>2"
    if is_base:
        script.tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder(tmp_path, **BASE))
    collected = script.play("Hears", "length", says=said)
    (rollout,) = collected.rollouts
    first = [{"role": "system", "content": "Be brief."}, *numbered(0).messages]
    heard = [{"role": "user", "content": said + end} for end in ("<|im_end|>", "")]
    reply = {"role": "assistant", "content": said}
    assert list(rollout.messages) == [*first, reply, heard[0], reply, heard[1], reply]
    assert rollout.response == said and rewards_of(collected) == [float(len(said))]
    whole = script.tokenizer.apply_chat_template(list(rollout.messages), tokenize=False)
    sampled = f"{said}{script.tokenizer.eos_token}"
    shown = whole.replace(f"assistant\n{said}<|im_end|>", f"assistant\n{sampled}").rstrip("\n")
    assert script.tokenizer.decode(rollout.tokens_T) == shown
    assert script.tokenizer.decode(rollout.tokens_T[rollout.loss_mask_T > 0]) == sampled * 3
    (end,) = script.tokenizer("<|im_end|>")["input_ids"]
    ends = 2 + 2 + 3 * (not is_base)  # of the first messages, what was heard, and the replies
    assert rollout.tokens_T.tolist().count(end) == ends, "one was said, which is a text"


def test_a_reset_with_further_messages_keeps_the_tools_of_the_row(script: Script) -> None:
    tool = {"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}
    (rollout,) = script.play("Hears", "length", asked={"tools": (tool,)}).rollouts
    messages = [{"role": "system", "content": "Be brief."}, *numbered(0).messages]
    options = {"tools": [tool], "tokenize": False, "add_generation_prompt": True}
    whole = script.tokenizer.apply_chat_template(messages, **options)
    assert "<tools>add</tools>" in whole
    assert script.tokenizer.decode(rollout.tokens_T).startswith(whole)


def test_results_of_several_calls_are_shown_once_and_never_rewarded(script: Script) -> None:
    """A reward reads what the model said, not the answer that a tool gave it."""
    call = '<tool_call>{{"name": "{}", "arguments": {{}}}}</tool_call>'
    said = call.format(7) + call.format(8)
    scorer = make_scorer(RewardConfig(function=("gsm8k",)))
    collected = script.play("Answers", scorer, prompts=[7], says=said, asked={"answer": "#### 8"})
    (rollout,) = collected.rollouts
    reply = {"role": "assistant", "content": said}
    results = [{"role": "tool", "content": f"#### {name}"} for name in (7, 8)]
    assert list(rollout.messages[1:]) == [reply, *results, reply, *results, reply]
    assert rollout.response == said and rewards_of(collected) == [0.0]


def test_the_end_of_a_cut_message_is_not_learned(script: Script) -> None:
    """The template ends the message before the next one; the model sampled no such token."""
    collected = script.play("Late", "env", says="a b c d e f", max_turn_tokens=4)
    (rollout,) = collected.rollouts
    (end,) = script.tokenizer("<|im_end|>")["input_ids"]
    is_end = rollout.tokens_T == end
    assert is_end.sum() == 2 + 2, "two messages of the model that go on, two of the environment"
    assert not rollout.loss_mask_T[is_end].any() and not rollout.logprobs_T[is_end].any()
    assert rollout.loss_mask_T.sum() == 3 * 4 and (rollout.logprobs_T < 0).sum() == 3 * 4


def test_empty_messages_end_with_the_turns(script: Script) -> None:
    collected = script.play("Endless", "length", says="", max_turns=5)
    (rollout,) = collected.rollouts
    assert rollout.finish_reason == "turns" and rollout.loss_mask_T.sum() == 5


def test_the_note_about_responses_without_end_names_the_ends(
    tmp_path: Path, script: Script
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder(tmp_path, **BASE))
    setup = ConversationSetup.of(EnvConfig(), tokenizer, "tiny")
    note = without_end(64, "rollout.max_response_tokens 24", setup)
    assert note.startswith("none of 64 responses ended within rollout.max_response_tokens 24. ")
    assert "A turn ends with <|im_end|> or <|endoftext|>." in note and "eos_token_id" in note
    turns = script.play("Endless", "none", max_turns=5).rollouts
    assert without_end(1, "64 tokens", setup, turns).endswith(": raise the limit"), "turns ended"
