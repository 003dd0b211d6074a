"""What `--check` reports: the data that was read, and one call of the environment and rewards."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from r3.rollout.conversation import EnvironmentFailed
from r3.rollout.task import Task
from r3.types import Prompt, Rollout


def check_task(task: Task) -> Iterator[str]:
    """Lines about a task. Calls the environment and the reward functions once, on the first row.

    The reward functions get the reference answer as the response, so a reward function that does
    not fit the data shows at once.

    Raises:
        RewardError: a reward function failed and `reward.on_error` is stop.
        EnvironmentFailed: the environment failed.
    """
    sets = [task.prompts.prompts, *(heldout.prompts for heldout in task.heldout)]
    prompts = [prompt for prompts in sets for prompt in prompts]
    longest = max(len(prompt.tokens_T) for prompt in prompts)
    held_out = "".join(f", {len(each.prompts)} held out in {each.name}" for each in task.heldout)
    yield f"ok: {len(task.prompts)} prompts{held_out}; longest prompt {longest} tokens"
    yield from _check_environment(task, prompts[0])
    yield from _check_reward(task, prompts[0])


def _check_environment(task: Task, prompt: Prompt) -> Iterator[str]:
    environments = task.conversation_setup.environments
    if environments.one_turn:
        return
    started = time.perf_counter()
    environments.open(0, prompt)
    while not (replies := environments.poll(1.0)):
        pass
    seconds = time.perf_counter() - started
    environments.forget(0)
    if failure := replies[0].failure:
        raise EnvironmentFailed(
            f"{prompt.id}: reset of the environment failed ({failure.kind}: {failure.text})"
        )
    count = len(replies[0].opened or ())
    yield f"    environment: reset on {prompt.id} returned {count} message(s) in {seconds:.1f} s"


def _check_reward(task: Task, prompt: Prompt) -> Iterator[str]:
    if task.reward_model is not None:
        yield "    reward: not called, because a reward model is loaded on a device only"
        return
    if not prompt.answer:
        yield f"    reward: not called, because {prompt.id} has no reference answer"
        return
    task.scorer.submit(0, reference_rollout(task, prompt), prompt)
    while not (results := task.scorer.poll(1.0)):
        pass
    result = results[0]
    parts = ", ".join(f"{name} {value:g}" for name, value in result.parts.items())
    text = f"failed: {result.failure.splitlines()[0]}" if result.failure else parts
    yield f"    reward of the reference answer of {prompt.id}: {text} ({result.seconds:.1f} s)"


def reference_rollout(task: Task, prompt: Prompt) -> Rollout:
    """The rollout of a policy that responds with the reference answer; its log-probabilities are
    0.
    """
    response = task.tokenizer.encode(prompt.answer, add_special_tokens=False)
    tokens_T = np.array([*prompt.tokens_T, *response], dtype=np.int64)
    mask_T = (np.arange(len(tokens_T)) >= len(prompt.tokens_T)).astype(np.float32)
    return Rollout(
        prompt_id=prompt.id,
        group=0,
        sample_index=0,
        tokens_T=tokens_T,
        loss_mask_T=mask_T,
        logprobs_T=np.zeros_like(mask_T),
        routed_experts=np.zeros((len(tokens_T) - 1, 0, 0), np.int8),
        finish_reason="stop",
        policy_version=0,
        response=prompt.answer,
    )
