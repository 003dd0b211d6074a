"""What users' code is handed is its own, and numbers of other libraries count as Python's."""

import copy
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from r3 import assets
from r3.config import AlgoConfig, EnvConfig, RewardConfig
from r3.envs import Environments, Workflows, checked_result, checked_step
from r3.rewards import number
from r3.rewards.scorer import make_scorer
from r3.tools import example_inputs, example_rewards
from r3.types import Prompt
from r3.user_code import advantage_of, bounds_of, load, loss_of
from tests.environments import collect, said
from tests.errors import Patch
from tests.rounds import play_round
from tests.rows import write
from tests.tiny import responded

# Each spoils everything that it is handed, and returns how much of it was spoilt before.
SPOILERS = '''
def spoil(value):
    """Change everything in a value; return how many changes of an earlier call are in it."""
    if hasattr(value, "metadata"):
        return sum(map(spoil, (value.messages, value.metadata, value.tools)))
    if isinstance(value, dict):
        found = sum(map(spoil, value.values())) + ("spoilt" in value)
        if isinstance(value.get("content"), str):
            found += value["content"].count("!")
            value["content"] += "!"
        value["spoilt"] = True
        return found
    if isinstance(value, (list, tuple)):
        found = sum(map(spoil, value))
        if isinstance(value, list):
            found += value.count("spoilt")
            value.append("spoilt")
        return found
    if hasattr(value, "fill"):
        found = int((value == -1).all())
        value.fill(-1)
        return found
    return 0

def alone(response, prompt, messages, given=()):
    return spoil([prompt, messages, given])

async def alone_async(response, prompt, messages, given=()):
    return spoil([prompt, messages, given])

def group(responses, prompt, messages, given=()):
    count = len(responses)
    return [spoil([prompt, messages, given]) + spoil(responses)] * count

class Turns:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    def __init__(self, given=()):
        self.found = spoil(given)
    def reset(self, prompt):
        self.found += spoil(prompt)
        return [{"role": "user", "content": "ask"}]
    def step(self, message):
        self.found += spoil(message)
        return [{"role": "user", "content": "ask"}], float(self.found), False

class Flow:
    def __init__(self, given=()):
        self.given = given
    async def run(self, task, model):
        found = spoil([task, self.given])
        messages = [{"role": "user", "content": "ask"}]
        messages.append(await model.chat(messages))
        messages.append({"role": "user", "content": "more"})
        await model.chat(messages)
        spoil(messages)
        return 1.0, {"found": found}

def loss(inputs, bounds, given=()):
    lost = -inputs.advantages_N.clone() * inputs.logprobs_N
    for each in (inputs.old_logprobs_N, inputs.rollout_logprobs_N, inputs.advantages_N,
                 inputs.loss_mask_N, inputs.logprobs_N):
        each.mul_(0)
    return lost + spoil(given), lost > 1e9

def advantage(rewards_R, groups_R, given=()):
    centred = rewards_R - rewards_R.mean() + spoil(given)
    rewards_R.mul_(0)
    groups_R.mul_(0)
    return centred
'''
GIVEN = 'given=[{"deep": [1, 2]}]'


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("spoilers"), SPOILERS, name="spoilers.py")


def fragile() -> Prompt:
    """A prompt with everything that a function can change."""
    return Prompt(
        id="rows.jsonl:7",
        messages=({"role": "user", "content": "3 + 4?", "parts": [{"type": "text"}]},),
        tokens_T=(1, 2),
        answer="#### 7",
        metadata={"tests": ["a", {"b": [1]}], "array": np.arange(3), "level": 3},
        tools=({"type": "function", "function": {"name": "f", "parameters": {"a": [1]}}},),
    )


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("name", ["alone", "alone_async", "group"])
def test_rewards_cannot_change_what_others_see(file: Path, name: str, workers: int) -> None:
    prompt = fragile()
    said = ({"role": "user", "content": "3?"}, {"role": "assistant", "content": "4"})
    samples = [replace(responded(sample_index=i), messages=said) for i in range(3)]
    functions = (f"{file}:{name}", f"{file}:alone")
    arguments = tuple(f"{each}.{GIVEN}" for each in {name, "alone"})
    settings = RewardConfig(function=functions[: 1 + (name != "alone")], args=arguments)
    before = repr(prompt), repr(samples)
    scorer = make_scorer(replace(settings, workers=workers))
    found = []
    for _ in range(2):
        for key, sample in enumerate(samples):
            scorer.submit(key, sample, prompt)
        scorer.complete_group(samples[0].group)
        while scorer.outstanding:
            found += [result.reward for result in scorer.poll(5.0)]
    scorer.close()
    assert found == [0.0] * 6
    assert (repr(prompt), repr(samples)) == before


def test_without_copies_the_changes_are_seen(file: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr("r3.rewards.own_copy", lambda value: value)
    scorer, prompt = make_scorer(RewardConfig(function=(f"{file}:alone",))), fragile()
    assert scorer(responded(), prompt) < scorer(responded(), prompt)
    scorer.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_environments_cannot_change_what_others_see(file: Path, workers: int) -> None:
    prompt, message = fragile(), {**said("7"), "tool_calls": [{"name": "f", "arguments": {}}]}
    before = repr(prompt), repr(message)
    settings = EnvConfig(path=f"{file}:Turns", args=(GIVEN,), workers=workers, timeout_s=100)
    environments = Environments(settings)
    tools = repr(environments.tools)
    for key in range(4):
        environments.open(key, prompt)
    collect(environments, 4)
    for key in range(4):
        environments.send(key, message)
    steps = [reply.value for reply in collect(environments, 4).values()]
    environments.close()
    assert [step.reward for step in steps] == [0.0] * 4
    assert (repr(prompt), repr(message), repr(environments.tools)) == (*before, tools)


def test_workflows_cannot_change_what_others_see(file: Path) -> None:
    prompt = fragile()
    before = repr(prompt)
    tokenizer = AutoTokenizer.from_pretrained(assets.TINY_MOE_TOOLS)
    workflows = Workflows(EnvConfig(args=(GIVEN,)), load(f"{file}:Flow"))
    call = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    given: Any = {"samples": 4, "says": lambda turn: call}
    collected, turns = play_round(workflows, tokenizer, {0: prompt}, **given)
    # The second call continues the sequence of the first: the spoilt message was a copy.
    assert len(turns) == 8
    assert [rollout.metrics["env/found"] for rollout in collected.rollouts] == [0.0] * 4
    assert all("!" not in str(each["content"]) for r in collected.rollouts for each in r.messages)
    assert repr(prompt) == before
    workflows.close()


def test_losses_and_advantages_cannot_change_their_inputs(file: Path) -> None:
    args = (f"loss.{GIVEN}", f"advantage.{GIVEN}")
    algo = AlgoConfig(loss=f"{file}:loss", advantage=f"{file}:advantage", args=args)
    inputs, rewards = example_inputs(), example_rewards()
    inputs = replace(inputs, logprobs_N=inputs.logprobs_N.clone().requires_grad_())
    before = copy.deepcopy([tensor.detach() for tensor in tensors_of(inputs)]), rewards
    for _ in range(2):
        lost, _ = loss_of(algo)(inputs, bounds_of(algo))
        centred = advantage_of(algo)(*rewards)
    assert torch.equal(lost, -inputs.advantages_N * inputs.logprobs_N)
    assert torch.equal(centred, rewards[0] - rewards[0].mean())
    for now, then in zip(tensors_of(inputs), before[0], strict=True):
        assert torch.equal(now, then)
    # Gradients pass through the copy.
    assert torch.autograd.grad(lost.sum(), inputs.logprobs_N)[0].equal(-inputs.advantages_N)


def tensors_of(inputs: Any) -> list[torch.Tensor]:
    names = ("logprobs_N", "old_logprobs_N", "rollout_logprobs_N", "advantages_N", "loss_mask_N")
    return [getattr(inputs, name) for name in names]


@pytest.mark.parametrize("read", [number, lambda value: checked_step(([], value, True)).reward])
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.bool_(True), 1.0),
        (np.float16(0.5), 0.5),
        (np.array(0.25), 0.25),
        (torch.tensor(0.5), 0.5),
        (torch.tensor(True), 1.0),
        (torch.tensor(2, dtype=torch.int8), 2.0),
        (torch.tensor(0.5, requires_grad=True), 0.5),
        (Decimal("0.5"), 0.5),
        (True, 1.0),
    ],
)
def test_scalars_of_libraries_are_numbers(
    read: Callable[[Any], float], value: Any, expected: float
) -> None:
    found = read(value)
    assert found == expected and type(found) is float


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.array([1.0]), "not a number"),
        (torch.tensor([1.0]), "not a number"),
        (torch.tensor(float("nan")), "not a finite number"),
        (np.float32("inf"), "not a finite number"),
        (np.str_("1"), "not a number"),
        (1 + 0j, "not a number"),
        ({}, "not a number"),
    ],
)
def test_what_is_no_number_is_refused_by_name(value: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        number(value)
    with pytest.raises(TypeError, match="finite number or None"):
        checked_step(([], value, True))


def test_done_is_a_boolean_of_any_library() -> None:
    assert checked_step(([], 1.0, torch.tensor(True))).done is True
    more = [{"role": "user", "content": "more"}]
    assert not checked_step((more, None, np.bool_(False))).done
    with pytest.raises(TypeError, match="True or False as done, returned 'false'"):
        checked_step((more, None, "false"))


def test_rewards_per_call_may_be_an_array() -> None:
    assert checked_result(np.array([0.5, 1.0]), 2).call_rewards == (0.5, 1.0)
    assert checked_result([torch.tensor(0.5), np.bool_(True)], 2).call_rewards == (0.5, 1.0)
    assert checked_result(torch.tensor(0.5), 2).reward == 0.5
