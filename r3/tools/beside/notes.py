"""Warnings of a start: settings without effect, which follow from `needs` at their fields, settings
that are seldom meant, and held-out questions that are trained on.

A word of `needs` is one of:

    algo.kl_coef                    that setting is not 0, false, none or empty
    algo.loss=ppo_clip|minirl       it has one of these values, or is a function of the user's file
    training                        a condition of `conditions`
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any

from r3.config.fields import as_typed, shown
from r3.config.settings import SETTINGS, Config, flatten
from r3.config.train import LOSSES
from r3.data.rows import Row
from r3.models.shape import ModelShape

_UNTIMED_REWARDS = {"gsm8k", "exact", "gym", "row", "env", "none", "self_judge"}


def notes_on(
    config: Config,
    named: Collection[str] | None,
    shape: ModelShape | None,
    train: Sequence[Row],
    heldout: Sequence[Row],
) -> list[str]:
    """Every warning, each once.

    Args:
        named: settings that the user named; None: all. A preset's own settings without effect are
            not warned of.
        shape: of the model, if it can be read.
        train, heldout: rows of training and of the held-out sets, as far as they are here.
    """
    notes = without_effect(config, named, shape) + doubtful(config, shape)
    notes += algorithm_notes(config) if config.trains else []
    return list(dict.fromkeys(notes + overlap(train, heldout)))


def without_effect(
    config: Config, named: Collection[str] | None, shape: ModelShape | None
) -> list[str]:
    """A warning per setting that others make ineffective, with the reason."""
    values, unmet = flatten(config), conditions(config, shape)
    notes = []
    for name, declared in SETTINGS.items():
        if values[name] == declared.default or (named is not None and name not in named):
            continue
        reasons = (_reason(need, values, unmet) for need in declared.needs.split())
        if reason := next(filter(None, reasons), ""):
            notes.append(f"{name} = {values[name]!r} has no effect: {reason}")
    return notes


def _reason(need: str, values: dict[str, Any], unmet: dict[str, str]) -> str:
    """Why a word of `needs` does not hold; "" where it does."""
    if need in unmet:
        return unmet[need]
    name, is_equal, wanted = need.partition("=")
    value = values[name]
    entries = [as_typed(entry) for entry in (value if isinstance(value, tuple) else (value,))]
    if is_equal:
        holds = any(entry in wanted.split("|") or ".py:" in entry for entry in entries)
    else:
        holds = any(entry not in ("", "0", "0.0", "false", "none") for entry in entries)
    return "" if holds else f"{name} is {shown(value)}"


def conditions(config: Config, shape: ModelShape | None) -> dict[str, str]:
    """Every condition with the reason why it does not hold; "" where it does."""
    algo, train, env = config.algo, config.train, config.env
    is_sft, is_distill = config.learns_rows, config.distils
    mode = config.replay.mode
    of_sets = [name for name in (*config.eval.env, *config.data.env) if name]
    used = set(config.reward_functions)
    one_update = train.updates_of_step == 1 and algo.correction != "bypass" and algo.loss in LOSSES
    on_policy = "with one update per step the policy is pi_old: r is 1" if one_update else ""
    no_ratio = "algo.loss is pg, which has no ratio" if algo.loss == "pg" else ""
    masks = algo.correction in ("token_mis", "sequence_mis", "geometric_mask", "icepop")
    truncates = algo.correction in ("token_tis", "sequence_tis")
    nothing = "train.objective is sft and eval.path is empty, so nothing is sampled"
    training = "" if config.trains else "eval.only trains nothing"
    rollouts = training or ("train.objective is sft" if is_sft else "")
    sampling = "" if config.uses_engine else nothing
    dense = "the model is dense" if _is_dense(shape) else ""
    replay = rollouts or dense or ("replay.mode is off" if mode == "off" else "")
    fails = {
        "turns": (
            env.name == "single_turn" and env.is_built_in and not of_sets,
            "env.name is single_turn",
        ),
        "waits": (
            not env.command
            and not env.workers
            and not any(":" in name for name in (env.path, *of_sets)),
            "the environment is a built-in one, which runs at once",
        ),
        "messages": (
            bool(env.command) and not of_sets,
            "the environment is a workflow, which builds its own prompts",
        ),
        "workflow": (
            env.is_built_in
            and not any(
                ":" in name for name in config.data.env
            ),  # a class is known when its file is loaded
            "only workflows reward calls, and the environment is none",
        ),
        "rounded_router": (
            config.engine.dtype == "float32" or (shape is not None and shape.engine_router_fp32),
            "the engine's router logits are float32",
        ),
        "rounding": (config.in_float32, "policy and engine are float32 throughout"),
        "low_bound": (not masks, f"algo.correction {algo.correction} has no lower bound"),
        "high_bound": (not masks and not truncates, f"algo.correction is {algo.correction}"),
        "sources": (config.data.num_sources == 1, "there is one source of rows"),
        "several_rewards": (
            len(config.reward.function) == 1,
            "there is one reward function, which decides",
        ),
        "judge": (not used & {"http", "self_judge"}, "no reward function is http or self_judge"),
        "calls": (
            used <= _UNTIMED_REWARDS,
            "built-in functions and self_judge have no time limit and are not retried",
        ),
        "processes": (
            not any(":" in name or name == "math" for name in used),
            "no reward function is math or one of your files",
        ),
        "moves": (not config.moves_optimizer, nothing),
        "decay": (train.lr_schedule == "constant", "train.lr_schedule is constant"),
        "samples": (max(config.eval.samples, default=1) == 1, "eval.samples is 1"),
        **{
            kind: (kind not in used, f"no reward function is {kind}")
            for kind in ("http", "self_judge", "model", "row")
        },
    }
    return {
        "training": training,
        "moe": dense,
        "rollouts": rollouts,
        "sampling": sampling,
        "rewards": rollouts or ("train.objective is distill" if is_distill else ""),
        "replay": replay,
        "r3": replay or ("" if mode == "r3" else f"replay.mode is {mode}"),
        "ratio": rollouts or no_ratio or on_policy,
        # cispo needs 1, which is no bound.
        "low_ratio": rollouts or no_ratio or ("" if algo.loss == "cispo" else on_policy),
        # With aggregation constant the loss is divided by the length of responses.
        "length": "" if is_sft and algo.aggregation == "constant" else sampling,
        **{name: reason if is_unmet else "" for name, (is_unmet, reason) in fails.items()},
    }


def doubtful(config: Config, shape: ModelShape | None) -> list[str]:
    """Settings that work but are seldom meant."""
    model, engine, train, algo = config.model, config.engine, config.train, config.algo
    rollout, notes = config.rollout, list[str]()
    if not __debug__:
        text = "guards of routes, weights and memory are assertions, and this Python skips them"
        notes.append(f"{text}: unset PYTHONOPTIMIZE, leave out -O")
    if config.trains:
        if train.warmup_updates > train.total_updates:
            notes.append(
                f"train.lr is never reached: train.warmup_updates = {train.warmup_updates} of "
                f"{train.total_updates} updates"
            )
        is_stale = bool(rollout.step_token_budget and rollout.max_staleness)
        if is_stale and algo.correction == "none" and algo.loss in LOSSES and algo.loss != "minirl":
            notes.append(
                "rollout.max_staleness lets older policies sample, and no weight pi_old / mu "
                "corrects their tokens: use --algo.correction token_tis, another correction, or "
                "--algo.loss minirl"
            )
    if _is_dense(shape) and config.replays:
        mode = config.replay.mode
        notes.append(f"replay.mode = {mode!r} has no effect: the model is dense, without routers")
    elif config.replay.mode == "r2" and config.trains and train.updates_of_step == 1:
        if not (config.replay.reference and algo.kl_coef):
            notes.append(
                "replay.mode = 'r2' has no effect: it keeps routes over the updates of a step, "
                "which has one"
            )
    if _is_dense(shape) and model.recompute == "moe":
        notes.append(
            "model.recompute = 'moe' has no effect: the model is dense. Use full to recompute "
            "every layer"
        )
    if model.dtype == "float32" and engine.dtype == "bfloat16":
        notes.append(
            "model.dtype is float32 and engine.dtype bfloat16: the engine rounds every weight. "
            "This dominates the mismatch, and replay cannot remove it. Use one dtype for both"
        )
    return notes


def algorithm_notes(config: Config) -> list[str]:
    """Settings that work and are seldom meant."""
    algo, notes = config.algo, []
    if algo.loss == "gspo" and max(algo.clip_low, algo.clip_high) > 0.05:
        notes.append(
            f"algo.clip_low = {algo.clip_low} and clip_high = {algo.clip_high} never clip with "
            "gspo: ratios of whole responses stay near 1. The paper uses 3e-4 and 4e-4"
        )
    if algo.loss == "gspo" and algo.aggregation != "sequence":
        notes.append(
            f"algo.aggregation = {algo.aggregation!r} weights the responses of gspo by length. The "
            "paper uses sequence"
        )
    if algo.loss == "cispo" and algo.clip_high < 1:
        notes.append(
            f"algo.clip_high = {algo.clip_high} is a bound of PPO: it would bound the weights of "
            f"cispo at {1 + algo.clip_high}. 3 to 5 are common"
        )
    several = config.train.updates_of_step > 1 and not config.learns_rows
    if algo.loss == "pg" and several:
        notes.append(
            "algo.loss = 'pg' has no ratio: all updates of a step but the first are biased"
        )
    if algo.kl_coef and algo.kl_in == "loss" and algo.kl_estimator == "k1":
        notes.append(
            "algo.kl_estimator = 'k1' in the loss has no gradient on average: use k2 or k3"
        )
    if algo.dynamic_sampling and algo.teacher and config.train.objective == "rl":
        notes.append(
            f"algo.dynamic_sampling = {algo.dynamic_sampling} leaves out no group for its rewards: "
            "algo.teacher teaches groups with equal rewards too"
        )
    if algo.takes_kl_from_reward and config.replays and not config.replay.reference:
        notes.append(
            "replay.reference is false: the reference policy routes for itself, and the KL that "
            "is subtracted from rewards is not 0 where both policies are equal. Use "
            "--replay.reference true"
        )
    if algo.takes_kl_from_reward and algo.kl_estimator != "k1":
        notes.append(
            f"algo.kl_estimator = {algo.kl_estimator!r} in the reward is a biased penalty: k1 is "
            "the unbiased one"
        )
    return notes


def overlap(train: Sequence[Row], heldout: Sequence[Row]) -> list[str]:
    """A warning if held-out questions are trained on."""
    row_of = {json.dumps(row.messages, default=str): row for row in train}
    shared = [
        (row, row_of[text])
        for row in heldout
        if (text := json.dumps(row.messages, default=str)) in row_of
    ]
    if not shared:
        return []
    here, there = shared[0]
    count = f"{len(shared)} of {len(heldout)} questions of eval.path are trained on as well"
    same = f"{here.file}:{here.line} is {there.file}:{there.line}"
    return [f"{count}, so the evaluation is too optimistic: {same}"]


def _is_dense(shape: ModelShape | None) -> bool:
    return shape is not None and not shape.moe_layers
