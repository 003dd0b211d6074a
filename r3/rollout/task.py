"""The task of a run: prompts, held-out sets, environment, rewards, tokenizer, model shape."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from r3 import extras
from r3.config import Config, ConfigError, Problem
from r3.config.arguments import keyword_arguments
from r3.data.prompts import Dataset, load_prompts
from r3.data.rendering import ChatTemplate
from r3.data.rows import columns_of
from r3.data.sources import ReadsRows, read_once
from r3.data.template import tokenizer_of
from r3.models.shape import ModelShape
from r3.rewards.scorer import Scorer, make_scorer
from r3.rollout.conversation_setup import ConversationSetup
from r3.rollout.heldout import HeldOut
from r3.runtime.device import device_gib, has_gpu
from r3.runtime.limits import host_gib
from r3.user_code.algorithm import advantage_of, loss_of


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a run learns, read from disk.

    Attributes:
        prompts: training prompts, or conversations to learn (train.objective sft); empty if the run
            only evaluates.
        heldout: held-out sets.
        conversation_setup: environments and chat template of the training.
        scorer: rewards of the training.
        shape: sizes of the model.
        max_model_len: maximum tokens of any conversation.
        reward_model: the model that the reward `model` asks, if it is used.
    """

    prompts: Dataset
    heldout: tuple[HeldOut, ...]
    conversation_setup: ConversationSetup
    scorer: Scorer
    tokenizer: Any
    shape: ModelShape
    max_model_len: int
    reward_model: Any = None

    def close(self) -> None:
        """End what environments and reward functions started."""
        self.conversation_setup.environments.close()
        self.scorer.close()
        for heldout in self.heldout:
            heldout.scorer.close()
            if heldout.conversation_setup is not self.conversation_setup:
                heldout.conversation_setup.environments.close()


def _unfit(config: Config, shape: ModelShape, world_size: int) -> list[Problem]:
    """What of the plan exceeds this rank's device, or its machine."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or None
    planner = extras.planner()
    problems, _ = planner.host_problems(
        config, shape, world_size, host_gib(), ranks=ranks, on_gpu=has_gpu()
    )
    if size := device_gib():
        unfit, _ = planner.memory_problems(config, shape, world_size, size)
        problems = unfit + problems
    return problems


def _unread(tokenizer: Any, template_kwargs: Mapping[str, Any]) -> list[Problem]:
    """Variables that the chat template does not read, so that they would have no effect."""
    template = ChatTemplate(tokenizer, template_kwargs)
    problems = []
    for name in template.unread():
        near = difflib.get_close_matches(name, template.variables, n=2)
        fix = f"did you mean {' or '.join(near)}?" if near else "leave it out"
        rule = f"the chat template reads no variable {name}"
        value = f"{name}={template_kwargs[name]}"
        problems.append(Problem("data.template_kwargs", value, rule, fix))
    return problems


def _refuse(problems: list[Problem]) -> None:
    if problems:
        raise ConfigError(problems)


def read_task(config: Config, world_size: int | None = None, read: ReadsRows | None = None) -> Task:
    """Read and check model, tokenizer, data, environments and rewards. Touches no device.

    Args:
        config: the settings.
        world_size: ranks of the run; None: those that the launcher has started, or 1.
        read: reads rows; one that remembers them is what has checked them.

    Raises:
        ConfigError: a setting does not fit; names field, value, rule and fix.
        DataError: rows cannot be used; names file, row, field, rule and fix.
    """
    shape = config.model.shape()
    if config.trains:
        loss_of(config.algo), advantage_of(config.algo)  # users' files fail here, not in a step
    _refuse(extras.device_problems(config, shape, is_cuda=has_gpu()))
    if world_size is None:
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
    _refuse(_unfit(config, shape, world_size))
    tokenizer = tokenizer_of(shape)
    if config.has_teacher:
        _refuse(extras.teacher_rules().token_problems(config, tokenizer))
    template_kwargs = keyword_arguments(config.data.template_kwargs)
    _refuse(_unread(tokenizer, template_kwargs))
    conversation_setup = ConversationSetup.of(config.env, tokenizer, shape.source, template_kwargs)
    reward_model = (
        extras.reward_model(config.reward) if "model" in config.reward_functions else None
    )
    parts: dict[str, Any] = {"model": reward_model, "renderer": conversation_setup.renderer}
    parts["others"] = config.named_rewards
    scorer = make_scorer(config.reward, **parts)
    data, context = config.data, shape.max_position_embeddings

    def room(conversation_setup: ConversationSetup, longest_prompt: int, response: int) -> int:
        if conversation_setup.environments.one_turn:
            return longest_prompt + response
        # The first messages of an environment are not known before it runs, so its conversations
        # get as many tokens as the context and a micro-batch allow.
        return min(context, config.longest_prompt(context) + response)

    def read_prompts(sources: str | Sequence[str], **how: Any) -> Dataset:
        how |= {
            "template_kwargs": template_kwargs,
            "allow_control_tokens": data.allow_control_tokens,
        }
        make = partial(load_prompts, sources, tokenizer, read=read, **how)
        return read_once((shape.source, sources, how), make)

    setup, of_sources = conversation_setup, {}
    if data.env and config.trains:
        setup, of_sources = extras.mixture().of_sources(config, data.path, setup, template_kwargs)
    prompts, longest = Dataset(prompts=()), 0
    if config.trains:
        prompts = read_prompts(
            data.path,
            columns=columns_of(config),
            tools=conversation_setup.environments.tools,
            max_prompt_tokens=data.max_prompt_tokens or config.longest_row(context),
            on_too_long=data.on_too_long,
            drop_duplicates=data.drop_duplicates,
            weights=data.weights,
            own=of_sources,
        )
    if prompts.prompts and not config.learns_rows:
        longest = max(len(prompt.tokens_T) for prompt in prompts.prompts)
        longest = room(setup, longest, config.response_tokens())
    heldout = []
    for each in config.eval.sets:
        response = config.response_tokens(each)
        environment = each.environment(config.env)
        conversation = (
            conversation_setup
            if environment == config.env
            else ConversationSetup.of(environment, tokenizer, shape.source, template_kwargs)
        )
        questions = read_prompts(
            each.path,
            columns=columns_of(config, each),
            tools=conversation.environments.tools,
            max_prompt_tokens=min(config.engine.max_model_len or context, context) - response,
        ).prompts
        own = make_scorer(config.reward, (each.function,), **parts) if each.function else scorer
        heldout.append(
            HeldOut(settings=each, prompts=questions, scorer=own, conversation_setup=conversation)
        )
        longest = max(
            longest, room(conversation, max(len(prompt.tokens_T) for prompt in questions), response)
        )
    judges = [each.judge for each in (scorer, *(each.scorer for each in heldout)) if each.judge]
    if judges:
        rows = [*prompts.prompts, *(prompt for each in heldout for prompt in each.prompts)]
        answer = max((row.answer for row in rows), key=len, default="")
        longest = min(context, max(longest, judges[0].longest(longest, answer)))
    return Task(
        prompts=prompts,
        heldout=tuple(heldout),
        conversation_setup=setup,
        scorer=scorer,
        reward_model=reward_model,
        tokenizer=tokenizer,
        shape=shape,
        max_model_len=config.engine.max_model_len or longest,
    )
