"""Sizes of a step: groups, prompts per rank and update, and the length of a sequence."""

from __future__ import annotations

import math

from r3.checks.findings import Findings
from r3.config import ADVANTAGES, Config
from r3.models.shape import BYTES_OF, ModelShape


def check_batch(config: Config, found: Findings, world_size: int) -> None:
    """Prompts must divide evenly into engines and updates; most advantages need groups."""
    rollout, train = config.rollout, config.train
    # What an advantage of the user's compares is not known.
    needs_groups = config.algo.advantage in ADVANTAGES and config.algo.advantage != "reinforce_pp"
    if rollout.group_size == 1 and needs_groups:
        found.add(
            "rollout.group_size",
            f"algo.advantage {config.algo.advantage!r} compares the samples of a prompt and needs "
            "at least 2",
            "set it to 2 or more (8 and 16 are common), or use algo.advantage reinforce_pp",
        )
    engines = (
        max(1, world_size // config.parallel.engine_tp) if found.sound("parallel.engine_tp") else 1
    )
    ranks = f"the {world_size} ranks" if engines == world_size else f"the {engines} engines"
    divisors = {ranks: engines} if config.train.objective != "sft" else {}
    if found.sound("train.updates_per_step"):
        divisors[f"train.updates_per_step = {train.updates_per_step}"] = train.updates_per_step
    if found.sound("rollout.prompts_per_step"):
        for what, divisor in divisors.items():
            if rollout.prompts_per_step % divisor:
                above = math.ceil(rollout.prompts_per_step / divisor) * divisor
                nearest = " or ".join(str(count) for count in (above - divisor, above) if count)
                rule = f"must be a multiple of {what}"
                found.add("rollout.prompts_per_step", rule, f"set it to {nearest}")
    if found.sound("train.lr", "train.min_lr") and train.min_lr > train.lr:
        rule = f"must not exceed train.lr = {train.lr}"
        found.add("train.min_lr", rule, "set it to 0, or to a tenth of train.lr")


def check_lengths(config: Config, found: Findings, shape: ModelShape | None) -> None:
    """Prompt and response must fit into the context, the engine, a micro-batch and the KV cache.

    Without data.max_prompt_tokens the longest prompt is unknown until the data set is built. One
    token stands for it here.
    """
    response, prompt = config.rollout.max_response_tokens, config.data.max_prompt_tokens
    if not found.sound("rollout.max_response_tokens", "data.max_prompt_tokens"):
        return
    if not config.uses_engine:  # rows have no response; those that are too long are named
        return
    needed = (prompt or 1) + response
    sequence = f"{prompt or 'at least 1'} prompt + {response} response tokens"
    if shape:
        context = shape.max_position_embeddings
        if response >= context:
            rule = f"does not fit the model's context of {shape.context}"
            fix = f"set it below {context}, with room for the prompts"
            found.add("rollout.max_response_tokens", rule, fix)
        elif needed > context:
            rule = f"{sequence} exceed the model's context of {shape.context}"
            fix = f"set it to at most {context - response}, or allow fewer response tokens"
            found.add("data.max_prompt_tokens", rule, fix)
        if config.engine.max_model_len > context:
            rule = f"exceeds the model's context of {shape.context}"
            fix = f"set it to at most {context}, or to 0 for what is needed"
            found.add("engine.max_model_len", rule, fix)
        conversation = shape.kv_values(needed) * BYTES_OF[config.engine.dtype]
        cache = config.engine.kv_cache_gib
        if found.sound("engine.kv_cache_gib") and cache and conversation > cache * 2**30:
            need = f"{conversation / 2**30:.3g} GiB"
            rule = f"cannot hold one conversation: {sequence} need {need}"
            fix = "set it to hold many conversations, or to 0 for what the device has free"
            found.add("engine.kv_cache_gib", rule, fix)
    if found.sound("engine.max_model_len") and 0 < config.engine.max_model_len < needed:
        fix = f"set it to at least {needed}, or to 0 for what is needed"
        found.add("engine.max_model_len", f"{sequence} do not fit", fix)
    if found.sound("train.micro_batch_tokens") and config.train.micro_batch_tokens < needed:
        rule = f"must hold the longest sequence: {sequence}"
        fix = f"set it to at least {needed}; several sequences pack better"
        found.add("train.micro_batch_tokens", rule, fix)
