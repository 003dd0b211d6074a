"""The report of `--check`: the data, calls of environments and rewards, users' algorithms."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from r3.config import AlgoConfig, ConfigError, Problem
from r3.rewards.scorer import RewardError, RewardResult, Scorer
from r3.rollout.conversation_setup import ConversationSetup, EnvironmentFailed
from r3.rollout.episode import message_of
from r3.rollout.task import Task
from r3.tools.check_messages import check_messages
from r3.tools.contract import run_contract
from r3.types import Prompt, Rollout

_REFERENCES = 8  # rows whose reference answers are scored if that of the first is worth nothing


def check_task(task: Task, algo: AlgoConfig) -> Iterator[str]:
    """Lines about a task.

    Calls environment and reward functions once for the training rows and once per held-out set, on
    the first row; a function that rows name, on the first row that names it. Reward functions get
    the reference answer as the response, so one that does not fit the data shows at once. A loss
    and an advantage of the user's files are given to the contract of the built-in ones.

    Raises:
        RewardError: a reward function failed and `reward.on_error` is stop.
        EnvironmentFailed: the environment failed.
        AlgorithmError: the user's loss or advantage raised an error.
        ConfigError: it breaks the contract.
    """
    sets = [task.prompts.prompts, *(heldout.prompts for heldout in task.heldout)]
    prompts = [prompt for prompts in sets for prompt in prompts]
    longest = max(len(prompt.tokens_T) for prompt in prompts)
    held_out = "".join(f", {len(each.prompts)} held out in {each.name}" for each in task.heldout)
    learned = sum(end - first for prompt in task.prompts.prompts for first, end in prompt.spans)
    if learned:
        tokens = sum(len(prompt.tokens_T) for prompt in task.prompts.prompts)
        yield (
            f"ok: {len(task.prompts)} conversations of {tokens} tokens, {learned} of them learned"
            f"{held_out}; longest {longest} tokens"
        )
    else:
        counts = f"{len(task.prompts)} prompts{held_out}" if task.prompts.prompts else held_out[2:]
        yield f"ok: {counts}; longest prompt {longest} tokens"
    if repeated := task.prompts.duplicates:
        (twice, first), count = repeated[0], len(repeated)
        yield (
            f"    note: {count} of {len(task.prompts)} rows repeat an earlier one ({twice} is "
            f"{first}); --data.drop_duplicates true leaves them out"
        )
    yield from check_messages(task)
    yield from check_functions(task, algo)


def check_functions(task: Task, algo: AlgoConfig) -> Iterator[str]:
    """The lines of `check_task` about environments, rewards and users' algorithms."""
    learned = any(prompt.spans for prompt in task.prompts.prompts)
    if task.prompts.prompts and not learned:
        for setup, prompts in task.conversation_setup.split(task.prompts.prompts):
            yield from _check_environment(setup, prompts[0])
            yield from _check_reward(task, setup, task.scorer, prompts)
    for heldout in task.heldout:
        who = f"{heldout.name}: "
        yield from _check_environment(heldout.conversation_setup, heldout.prompts[0], who)
        setup = heldout.conversation_setup
        yield from _check_reward(task, setup, heldout.scorer, heldout.prompts, who)
    yield from _check_algorithm(algo)


def _check_algorithm(algo: AlgoConfig) -> Iterator[str]:
    for role, spec in algo.own_functions.items():
        findings = run_contract(algo, role)
        if broken := [finding for finding in findings if finding.fault and finding.required]:
            fix = "correct the function; python -m r3.check_loss shows every check"
            raise ConfigError(
                [
                    Problem(f"algo.{role}", spec, f"breaks {finding.claim!r}: {finding.fault}", fix)
                    for finding in broken
                ]
            )
        yield f"    algo.{role} {spec}: passes the contract of the built-in ones"
        yield from (f"    note: {finding.fault}" for finding in findings if finding.fault)


def _check_environment(setup: ConversationSetup, prompt: Prompt, who: str = "") -> Iterator[str]:
    if setup.environments.is_workflow:
        yield f"    {who}workflow: loaded, and not run, because it calls the model"
        return
    environments = setup.environments
    if environments.one_turn:
        return
    message = {**message_of(prompt.answer, "stop", None), "tool_calls": []}
    sizes = environments.shared_sizes()
    try:
        environments.open(0, prompt)
        first, seconds = _reply(environments, "reset", prompt, who)
        yield (
            f"    {who}environment: reset on {prompt.id} returned {len(first)} message(s) in "
            f"{seconds:.1f} s"
        )
        environments.send(0, message)
        step, seconds = _reply(environments, "step", prompt, who)
        reward = "no reward" if step.reward is None else f"reward {step.reward:g}"
        yield (
            f"    {who}environment: step with the reference answer returned "
            f"{len(step.messages)} message(s), {reward}, done {step.done} in {seconds:.1f} s"
        )
    except EnvironmentFailed as failed:  # as in the run
        if (on_error := environments.settings.on_error) == "stop":
            raise
        yield f"    note: {failed}\n      env.on_error is {on_error}: the run continues without it"
    finally:
        environments.forget(0)
    for name, size in environments.shared_sizes().items():
        if sizes.get(name) != size:
            yield (
                f"    note: {who}environment: calls changed {name}, which belongs to the class: "
                "all conversations of a process share it. Set it in __init__, unless that is meant"
            )


def _reply(environments: Any, method: str, prompt: Prompt, who: str) -> tuple[Any, float]:
    """Return what a method returned that was called, and how long it took."""
    started = time.perf_counter()
    while not (replies := environments.poll(1.0)):
        pass
    if failure := replies[0].failure:
        settings = environments.settings
        advice = (
            "It gets a prompt with id, messages, answer, answers, tools and metadata; here "
            f"metadata has {', '.join(prompt.metadata) or 'no column'}"
            if method == "reset"
            else f"It gets messages of the model, which may say anything; here {prompt.answer!r}"
        )
        raise EnvironmentFailed(
            f"{who}environment {settings.path or settings.name}: {method} failed on {prompt.id} "
            f"({failure.kind})\n{failure.text}\n  Fix: correct {method}. {advice}"
        )
    return replies[0].value, time.perf_counter() - started


def _check_reward(
    task: Task, setup: ConversationSetup, scorer: Scorer, prompts: Sequence[Prompt], who: str = ""
) -> Iterator[str]:
    may_reward = setup.environments.settings.may_reward
    first: dict[tuple[str, ...], Prompt] = {}
    for prompt in prompts:
        first.setdefault(scorer.path(prompt), prompt)
    for path, prompt in first.items():
        if not prompt.answer:
            yield f"    {who}reward: not called, because {prompt.id} has no reference answer"
            continue
        result = scorer.trial(reference_rollout(task, prompt), prompt)
        for choice in (component.of(prompt) for component in scorer.components):
            if choice.lacks:
                yield f"    {who}reward {choice.name}: not called, because {choice.lacks}"
        if result is None:
            continue
        yield _scored(result, scorer, prompt, who, may_reward=may_reward)
        if result.failure or scorer.deciding not in result.parts or _value(result, scorer) > 0:
            continue
        # One row may be odd. A few more tell whether the function fits the data at all.
        tried = [prompt for prompt in prompts if scorer.path(prompt) == path and prompt.answer]
        tried = tried[:_REFERENCES]
        results = [scorer.trial(reference_rollout(task, prompt), prompt) for prompt in tried]
        if (most := max(_value(result, scorer) for result in results if result)) <= 0:
            names = (component.name for component in scorer.components)
            name = dict(zip(names, path, strict=True))[scorer.deciding]
            of = f" of {name}" if name != scorer.deciding else ""
            yield (
                f"    warning: {who}the reference answers of the first {len(tried)} rows{of} are "
                f"worth {most:g} at most. {name} may not fit the data: it may expect another "
                "form of answer (#### 7), or another column (data.answer_key)"
            )


def _value(result: RewardResult, scorer: Scorer) -> float:
    return result.parts.get(scorer.deciding, result.reward)


def _scored(
    result: RewardResult, scorer: Scorer, prompt: Prompt, who: str, *, may_reward: bool
) -> str:
    if result.failure and may_reward:
        # What failed, without frames and sample.
        lines = result.failure.splitlines()
        cause = next(
            (b for a, b in zip(lines[1:], lines, strict=False) if a[:9] == "  prompt "), ""
        )
        names = ", ".join(scorer.path(prompt))
        return (
            f"    note: {who}reward {names} fails on the reference answer of {prompt.id}: {cause}\n"
            "      It is asked where the environment gives no reward; if the environment "
            "always does, set --reward.function none"
        )
    if result.failure and scorer.on_error == "stop":
        raise RewardError(
            f"{result.failure}\n  Fix: correct the function or the row. A prompt has id, messages, "
            "answer, answers, tools and metadata; here metadata has "
            f"{', '.join(prompt.metadata) or 'no column'}"
        )
    values = {**result.parts, **result.metrics}
    parts = ", ".join(f"{name} {value:g}" for name, value in values.items())
    text = f"failed: {result.failure.splitlines()[0]}" if result.failure else parts
    name = f"{who}reward of the reference answer of {prompt.id}"
    return f"    {name}: {text} ({result.seconds:.1f} s)"


def reference_rollout(task: Task, prompt: Prompt) -> Rollout:
    """The rollout of a policy that responds with the reference answer; its log-probabilities are
    0.
    """
    response = task.tokenizer.encode(prompt.answer, add_special_tokens=False)
    tokens_T = np.array([*prompt.tokens_T, *response], dtype=np.int64)
    mask_T = (np.arange(len(tokens_T)) >= len(prompt.tokens_T)).astype(np.float32)
    return Rollout.unsampled(prompt, tokens_T, mask_T)
