"""Warn about settings that others make ineffective, and about results that may mislead."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Mapping
from typing import Any, Protocol

from r3.checks.functions import algorithm_notes
from r3.checks.objective import fixed
from r3.config import LOSSES, Config, flatten, shown
from r3.models.shape import ModelShape

_QUICK_REWARDS = {"gsm8k", "exact", "gym", "row", "env", "none"}
# Settings that one kind of reward function alone uses.
_OF_REWARDS = {
    "http": (
        *("reward.url", "reward.model", "reward.api_key_env", "reward.max_connections"),
        *("reward.backoff_s", "reward.request"),
    ),
    "self_judge": ("reward.no_verdict",),
    "model": ("reward.model_*",),
    "row": ("reward.row_functions",),
}
# Settings that need an environment of several turns, or one of the user's.
_ENVIRONMENT = (
    *("env.max_turns", "env.tool_parser", "env.reasoning_parser", "env.keep_reasoning"),
    *("env.workers", "env.timeout_s", "env.retries", "env.on_error", "env.unfinished_reward"),
)
# Settings without a meaning for rows that are learned, and without anything that is sampled.
_OF_ROLLOUTS = (
    *("algo.clip_*", "algo.correction_*", "algo.dynamic_sampling_*", "algo.kl_*"),
    *("algo.minirl_cap", "algo.overlong_*", "log.rollouts_every", "log.show_every", "replay.*"),
    "rollout.max_staleness",
)
_OF_SAMPLING = (
    *("debug.prove_sync_every", "engine.*", "env.*", "parallel.engine_tp", "reward.*"),
    "rollout.max_response_tokens",
)
# Settings of training, and those among them that an evaluation alone reads.
_OF_TRAINING = (
    *("algo.*", "checkpoint.background", "checkpoint.best_is", "checkpoint.every"),
    *("checkpoint.export*", "checkpoint.keep*"),
    *("data.drop_duplicates", "data.on_too_long", "data.path", "data.weights", "debug.profile"),
    *("eval.every", "log.rollouts_every", "log.show_every", "model.recompute", "replay.*"),
    *("rollout.group_size", "rollout.max_staleness", "rollout.prompts_per_step"),
    *("rollout.step_token_budget", "rollout.temperature", "rollout.top_*", "train.*"),
)
_OF_EVALUATION = (
    *("train.micro_batch_tokens", "train.objective", "train.optimizer", "train.seed"),
)
# A setting of training, the value that switches something off, and what then has no effect.
_SWITCHES = (
    ("algo.correction", "none", "algo.correction_high"),
    ("algo.correction", "bypass", "algo.correction_high"),
    ("algo.dynamic_sampling", 0, "algo.dynamic_sampling_metric"),
    ("algo.kl_coef", 0, "algo.kl_estimator", "algo.kl_in", "replay.reference"),
    ("algo.overlong_buffer", 0, "algo.overlong_penalty"),
    ("algo.teacher", (), "algo.teacher_coef"),
    ("checkpoint.keep_best", "", "checkpoint.best_is"),
    ("rollout.step_token_budget", 0, "rollout.max_staleness"),
    ("train.lr_schedule", "constant", "train.min_lr"),
)


class _Ignored(Protocol):
    """Notes that settings, or all that match patterns such as algo.*, have no effect."""

    def __call__(self, because: str, *patterns: str, but: Collection[str] = ()) -> None: ...


def ignored_settings(
    config: Config, shape: ModelShape | None, given: Collection[str] | None
) -> list[str]:
    """Warnings, each once.

    Args:
        config: the settings.
        shape: the model's; None if it cannot be read.
        given: settings that the user named; None: all. A preset's own settings are not warned of.
    """
    values, defaults = flatten(config), flatten(Config())
    notes: list[str] = []

    def ignored(because: str, *patterns: str, but: Collection[str] = ()) -> None:
        notes.extend(
            f"{name} = {values[name]!r} has no effect: {because}"
            for pattern in patterns
            for name in fnmatch.filter(values, pattern)
            if values[name] != defaults[name]
            and (given is None or name in given)
            and name not in but
        )

    if config.eval.only:
        ignored("eval.only trains nothing", *_OF_TRAINING, but=_OF_EVALUATION)
    else:
        for switch, off, *names in _SWITCHES:
            if values[switch] == off:
                ignored(f"{switch} is {shown(off)}", *names)
        _objective(config, values, notes, ignored)
        _replay(config, shape, ignored)
        _algorithm(config, ignored)
        notes += algorithm_notes(config)
        _training(config, notes, ignored)
        _sampling(config, notes)
    _model(config, shape, notes, ignored)
    _environment(config, ignored)
    _rewards(config, ignored)
    if not config.eval.path:
        ignored("eval.path is empty, so nothing is evaluated", "eval.*")
    else:
        if not any(config.eval.temperature):
            ignored("eval.temperature 0 takes the likeliest token", "eval.top_p")
        if max(config.eval.samples, default=1) == 1:
            ignored("eval.samples is 1", "eval.pass_at")
    if config.log.tracker == "none":
        ignored("log.tracker is none", "log.project")
    return list(dict.fromkeys(notes))


def _objective(
    config: Config, values: Mapping[str, Any], notes: list[str], ignored: _Ignored
) -> None:
    of_objective = fixed(config)
    names = [name for name, value in of_objective.items() if values[name] != value]
    if config.train.objective == "sft":
        ignored("train.objective is sft", *names)
        ignored("train.objective is sft", *_OF_ROLLOUTS, but=of_objective)
        if not config.uses_engine:
            because = "train.objective is sft and eval.path is empty, so nothing is sampled"
            but = ["env.name", "env.path"]  # rows show the tools of the environment
            if config.algo.aggregation == "constant":  # divides the loss by it
                but.append("rollout.max_response_tokens")
            ignored(because, *_OF_SAMPLING, but=but)
    if config.train.objective == "distill":
        because = "train.objective distill learns from the teacher alone"
        if "algo.kl_coef" in names:
            names.append("algo.kl_in")
            because = f"{because}, not from rewards (--algo.kl_in loss has an effect)"
        ignored(because, *names, "algo.dynamic_sampling_metric", "algo.overlong_buffer")
        ignored(because, "algo.overlong_penalty")
    if not config.lora.rank:
        ignored("lora.rank is 0, so there are no adapters", "lora.*")
    elif "experts" not in config.lora.targets:
        ignored("lora.targets has no experts", "lora.expert_rank")


def _replay(config: Config, shape: ModelShape | None, ignored: _Ignored) -> None:
    replay = config.replay
    if shape and not shape.moe_layers:
        ignored("the model is dense", "replay.*", but=["replay.mode"])
        return
    if replay.mode == "off":
        ignored(
            "replay.mode is off", "replay.on_missing", "replay.reference", "replay.plausibility"
        )
    if replay.mode == "r2":
        ignored("replay.mode r2 captures no routes in the engine", "replay.on_missing")
    if replay.mode != "r3" or replay.on_missing == "error":
        because = "it needs replay.mode r3 and replay.on_missing live"
        ignored(because, "replay.min_coverage")
    if replay.mode != "r3":
        ignored(f"replay.mode is {replay.mode}", "replay.shadow_*")
    elif not replay.shadow_every:
        ignored("replay.shadow_every is 0", "replay.shadow_frac")


def _algorithm(config: Config, ignored: _Ignored) -> None:
    algo = config.algo
    if config.env.is_built_in:  # a class is known when its file is loaded
        ignored("only workflows reward calls, and the environment is none", "algo.baseline")
    if algo.loss == "pg":
        ignored("algo.loss is pg, which has no ratio", "algo.clip_low", "algo.clip_high")
    elif (
        algo.loss in LOSSES  # a user's loss may use bounds otherwise
        and config.train.updates_of_step == 1
        and algo.correction != "bypass"
    ):
        because = "with one update per step (train.updates_per_step) the policy is pi_old: r is 1"
        names = ["algo.clip_high"]
        names += ["algo.clip_low"] if algo.loss != "cispo" else []  # it needs 1, which is no bound
        names += ["algo.clip_dual"] if algo.loss == "ppo_clip" else []
        ignored(because, *names)
    if algo.loss in LOSSES and algo.loss != "ppo_clip":  # a user's loss gets all bounds
        ignored(f"algo.loss is {algo.loss}; only ppo_clip has this bound", "algo.clip_dual")
    if algo.loss in LOSSES and algo.loss != "minirl":
        ignored(f"algo.loss is {algo.loss}", "algo.minirl_cap")
    if algo.correction in ("none", "bypass", "token_tis", "sequence_tis"):
        ignored(f"algo.correction {algo.correction} has no lower bound", "algo.correction_low")


def _training(config: Config, notes: list[str], ignored: _Ignored) -> None:
    train = config.train
    if len(config.data.path) == 1:
        ignored("there is one source of rows", "data.weights")
    if config.eval.path and not config.eval.every:
        because = "eval.every is 0: the run is evaluated before its first and after its last step"
        ignored(because, "train.patience")
    if train.warmup_updates > train.total_updates:
        notes.append(
            f"train.lr is never reached: train.warmup_updates = {train.warmup_updates} of "
            f"{train.total_updates} updates"
        )


def _sampling(config: Config, notes: list[str]) -> None:
    rollout, algo = config.rollout, config.algo
    is_stale = bool(rollout.step_token_budget and rollout.max_staleness)
    if is_stale and algo.correction == "none" and algo.loss in LOSSES and algo.loss != "minirl":
        notes.append(
            "rollout.max_staleness lets older policies sample, and no weight pi_old / mu corrects "
            "their tokens: use --algo.correction token_tis, another correction, or --algo.loss "
            "minirl"
        )
    if rollout.top_p < 1 or rollout.top_k > 0:
        notes.append(
            "rollout.top_p and top_k restrict the engine's distribution but not the policy's: "
            "mismatch metrics and importance weights include that difference"
        )


def _model(config: Config, shape: ModelShape | None, notes: list[str], ignored: _Ignored) -> None:
    model, engine = config.model, config.engine
    if shape and not shape.moe_layers:
        because = "has no effect: the model is dense"
        if config.replay.mode != "off":
            notes.append(f"replay.mode = {config.replay.mode!r} {because}, without routers")
        ignored("the model is dense", "model.experts", "model.router_logits")
        if model.recompute == "moe":
            notes.append(f"model.recompute = 'moe' {because}. Use full to recompute every layer")
    if engine.dtype == "float32" or (shape and shape.engine_router_fp32):
        ignored("the engine's router logits are float32", "model.router_logits")
    if model.dtype == engine.dtype == "float32":
        ignored("policy and engine are float32 throughout", "model.fp32_head")
    if model.dtype == "float32" and engine.dtype == "bfloat16":
        notes.append(
            "model.dtype is float32 and engine.dtype bfloat16: the engine rounds every weight. "
            "This dominates the mismatch, and replay cannot remove it. Use one dtype for both"
        )
    if engine.kv_cache_gib:
        ignored("engine.kv_cache_gib sets the size", "engine.memory_fraction")


def _environment(config: Config, ignored: _Ignored) -> None:
    env = config.env
    if env.name == "single_turn" and env.is_built_in and not any(config.eval.env):
        ignored("env.name is single_turn", *_ENVIRONMENT)
    elif (
        not any(":" in spec for spec in (env.path, *config.eval.env))
        and not env.command
        and not env.workers
    ):
        ignored("the environment is a built-in one, which runs at once", "env.timeout_s")
    if env.command and not any(config.eval.env):
        ignored("the environment is a workflow, which builds its own prompts", "env.keep_reasoning")


def _rewards(config: Config, ignored: _Ignored) -> None:
    used = set(config.reward_functions)
    for kind, names in _OF_REWARDS.items():
        if kind not in used:
            ignored(f"no reward function is {kind}", *names)
    if not used.intersection(("http", "self_judge")):
        names = ("reward.prompt_file", "reward.pattern", "reward.max_tokens")
        ignored("no reward function is http or self_judge", *names)
    if used <= {*_QUICK_REWARDS, "self_judge"}:
        because = "built-in functions and self_judge have no time limit and are not retried"
        ignored(because, "reward.timeout_s", "reward.workers", "reward.retries")
    elif not any(":" in spec or spec == "math" for spec in used):
        ignored("no reward function is math or one of your files", "reward.workers")
    if len(config.reward.function) == 1:
        ignored("there is one reward function, which decides", "reward.correct")
