"""Rules over several settings that need neither the model nor a file's content."""

from __future__ import annotations

import math
import stat
from collections.abc import Sequence
from pathlib import Path

from r3.config.arguments import reward_names
from r3.config.fields import as_typed, shown
from r3.config.rollout import EnvConfig
from r3.config.run import EvalSet
from r3.config.settings import Config, flatten
from r3.config.train import ADVANTAGES, OF_OBJECTIVE
from r3.errors import Problem

_FILES = ("metrics.jsonl", "config.yaml", "overrides.yaml", "run.json", "run.lock")
_FOLDERS = ("checkpoints", "errors", "eval", "heartbeats", "hf", "rollouts", "tensorboard")
_NEW = "name a new folder, or that of an earlier run"


class Findings:
    """Problems so far, and the settings they are about.

    A rule that combines several settings first asks whether each is `sound` by itself.
    """

    def __init__(self, config: Config) -> None:
        self.values = flatten(config)
        self.problems: list[Problem] = []

    def add(
        self, name: str, rule: str, fix: str, value: object = None, *, is_missing: bool = False
    ) -> None:
        """Add a problem with a setting, or with `value`, a part of it; each problem once."""
        shown = self.values[name] if value is None else value
        problem = Problem(name, shown, rule, fix, is_missing=is_missing)
        if problem not in self.problems:
            self.problems.append(problem)

    def sound(self, *names: str) -> bool:
        """Whether none of these settings has a problem yet."""
        return not any(problem.place in names for problem in self.problems)


def check_objective(config: Config, errors: Findings) -> None:
    """What the objective brings has its value; a teacher alone says what is learnt by distill."""
    objective = config.train.objective
    for name, value in OF_OBJECTIVE[objective].items():
        if errors.sound(name) and errors.values[name] != value:
            fix = f"leave it out, or add --{name} {as_typed(value) or repr('')}"
            errors.add(name, f"train.objective {objective} needs {shown(value)}", fix)
    if objective == "distill" and config.algo.takes_kl_from_reward:
        rule = "train.objective distill learns from the teacher alone, not from rewards"
        errors.add("algo.kl_in", rule, "add --algo.kl_in loss, or --algo.kl_coef 0")


def check_batch(config: Config, errors: Findings, world_size: int) -> None:
    """Prompts divide evenly into engines and updates, most advantages need groups, and the tokens
    that sampling keeps are bounded.
    """
    rollout, train = config.rollout, config.train
    # What an advantage of the user's compares is not known.
    needs_groups = config.algo.advantage in ADVANTAGES and config.algo.advantage != "reinforce_pp"
    if rollout.group_size == 1 and needs_groups:
        errors.add(
            "rollout.group_size",
            f"algo.advantage {config.algo.advantage!r} compares the samples of a prompt and needs "
            "at least 2",
            "set it to 2 or more (8 and 16 are common), or use algo.advantage reinforce_pp",
        )
    if rollout.top_p < 1 and not rollout.top_k and config.trains and errors.sound("rollout.top_p"):
        rule = "keeps any number of tokens, and the policy replays what is kept (rollout.top_k = 0)"
        fix = "add --rollout.top_k 512, which seldom removes more, or set it to 1"
        errors.add("rollout.top_p", rule, fix)
    engines = (
        max(1, world_size // config.parallel.engine_tp) if errors.sound("parallel.engine_tp") else 1
    )
    ranks = f"the {world_size} ranks" if engines == world_size else f"the {engines} engines"
    divisors = {ranks: engines} if not config.learns_rows else {}
    if errors.sound("train.updates_per_step"):
        divisors[f"train.updates_per_step = {train.updates_per_step}"] = train.updates_per_step
    if errors.sound("rollout.prompts_per_step"):
        for what, divisor in divisors.items():
            if rollout.prompts_per_step % divisor:
                above = math.ceil(rollout.prompts_per_step / divisor) * divisor
                nearest = " or ".join(str(count) for count in (above - divisor, above) if count)
                rule = f"must be a multiple of {what}"
                errors.add("rollout.prompts_per_step", rule, f"set it to {nearest}")
    if errors.sound("train.lr", "train.min_lr") and train.min_lr > train.lr:
        rule = f"must not exceed train.lr = {train.lr}"
        errors.add("train.min_lr", rule, "set it to 0, or to a tenth of train.lr")


def check_best(config: Config, errors: Findings, sets: Sequence[EvalSet]) -> None:
    """`checkpoint.keep_best` names a figure of one of the sets, and `train.patience` needs it."""
    metric = config.checkpoint.keep_best
    if config.train.patience and not metric:
        rule = "needs checkpoint.keep_best, which names the metric that must become better"
        errors.add("train.patience", rule, "add --checkpoint.keep_best eval/heldout/accuracy")
    if not metric or not config.trains or not errors.sound("checkpoint.keep_best"):
        return
    name, _, figure = metric.removeprefix("eval/").partition("/")
    of_set = {eval_set.name: eval_set for eval_set in sets}.get(name)
    if not config.eval.path:
        rule = "eval.path is empty, so nothing is evaluated"
        errors.add("checkpoint.keep_best", rule, "give --eval.path")
    elif of_set is not None:
        counts = config.eval.pass_at or (of_set.samples,)
        figures = ["accuracy", "reward", "unjudged"]
        if of_set.samples > 1:
            figures.append(f"avg_at_{of_set.samples}")
            figures += [f"pass_at_{k}" for k in counts if k <= of_set.samples]
        if figure not in figures and not figure.startswith(("env/", "reward/")):
            fix = f"use {', '.join(figures)}, or env/NAME or reward/NAME of your code"
            errors.add("checkpoint.keep_best", f"evaluations have no {figure}", fix)
    elif sets:
        fix = f"use one of {', '.join(eval_set.name for eval_set in sets)}"
        errors.add("checkpoint.keep_best", f"{name} is no held-out set", fix)


def check_environment(config: Config, errors: Findings) -> None:
    """One environment, with turns that fit into a response."""
    env = config.env
    longest = config.rollout.max_response_tokens
    if env.max_turn_tokens > longest and errors.sound("env.max_turn_tokens"):
        rule = f"exceeds rollout.max_response_tokens = {longest}, the limit of all turns together"
        fix = "set it to 0 for what is left, or allow more response tokens"
        errors.add("env.max_turn_tokens", rule, fix)
    envs = config.environments if errors.sound("data.env") else ()
    own = next((e.path or e.command or e.name for e in envs if not e.is_one_turn), "")
    if config.data.continue_final_message and own:
        rule = f"continues a message of the row, and {own} decides what messages there are"
        errors.add("data.continue_final_message", rule, "leave it out")
    if env.args and env.is_built_in:
        rule, fix = f"the built-in environment {env.name} takes none", "leave them out"
        errors.add("env.args", rule, fix)
    if env.path and env.name != EnvConfig().name:
        rule = "is set together with env.path: a conversation has one environment"
        errors.add("env.name", rule, "give one of the two")


def check_reward_terms(config: Config, errors: Findings) -> None:
    """The terms of the reward are different functions, with a weight each."""
    reward = config.reward
    if not reward.function:
        errors.add("reward.function", "is empty", "use gsm8k, or path/to/my_reward.py:function")
    if len(set(reward.function)) < len(reward.function):
        fix = "name it once, with a larger weight"
        errors.add("reward.function", "names a function twice", fix)
    if reward.weights and len(reward.weights) != len(reward.function):
        rule = (
            f"has {len(reward.weights)} values for the {len(reward.function)} functions of "
            "reward.function"
        )
        errors.add("reward.weights", rule, "give one per function, or none for equal weights")
    if reward.weights and not any(reward.weights):
        errors.add(
            "reward.weights", "are all 0, so every reward is 0", "give a weight other than 0"
        )
    if "none" in reward.function and len(reward.function) > 1:
        fix = "use env for the environment's reward in a sum"
        errors.add("reward.function", "has none beside other functions", fix)
    if reward.correct and reward.correct not in (names := reward_names(reward.function)):
        rule = "is no function of reward.function by its name in metrics"
        errors.add("reward.correct", rule, f"use one of {', '.join(names)}")


def check_algorithm(config: Config, errors: Findings) -> None:
    """Refuse to correct the mismatch twice, and one algorithm under the name of another."""
    algo = config.algo
    if errors.sound("algo.args") and algo.args and not algo.own_functions:
        rule = "is for a function or class of yours, and none is set"
        errors.add("algo.args", rule, "leave it out", value=algo.args[0])
    if algo.loss == "minirl" and algo.correction != "none":
        rule = "corrects the mismatch twice: the weight of minirl is pi / mu already"
        errors.add("algo.correction", rule, "set it to none; algo.minirl_cap bounds that weight")
    if algo.loss == "pg" and algo.correction == "bypass":
        rule = "changes the ratio of a loss, and pg has none"
        errors.add("algo.correction", rule, "set it to none, or use a loss with a ratio")
    if algo.loss == "cispo" and errors.sound("algo.clip_low") and algo.clip_low < 1:
        rule = "is a lower bound of PPO: cispo bounds its weight from above only"
        fix = "use --algo.clip_low 1 and choose --algo.clip_high; 3 to 5 are common"
        errors.add("algo.clip_low", rule, fix)
    if algo.dynamic_sampling > 0 and algo.advantage == "reinforce_pp":
        rule = (
            "leaves out groups with equal rewards, and reinforce_pp learns from those too: it has "
            "no groups"
        )
        errors.add("algo.dynamic_sampling", rule, "set it to 0, or use another algo.advantage")
    if algo.takes_kl_from_reward and algo.advantage == "grpo" and config.train.objective == "rl":
        rule = (
            "is divided by the standard deviation of its group: where rewards are equal, KL "
            "differences of any size would become advantages of 1, whatever algo.kl_coef is"
        )
        fix = "use --algo.kl_in loss, or --algo.advantage dr_grpo, rloo or reinforce_pp_baseline"
        errors.add("algo.kl_in", rule, fix)
    if algo.baseline == "step" and algo.advantage == "reinforce_pp":
        rule = "compares rewards within a group, and reinforce_pp compares those of the whole step"
        errors.add("algo.baseline", rule, "set it to prompt, or use another algo.advantage")
    if (
        algo.dynamic_sampling > 0
        and config.rollout.step_token_budget
        and config.rollout.max_staleness > 0
    ):
        rule = (
            "keeps groups for later steps, and algo.dynamic_sampling leaves out groups of this "
            "step by their rewards"
        )
        fix = "set it to 0, which drops suspended conversations, or disable algo.dynamic_sampling"
        errors.add("rollout.max_staleness", rule, fix)
    length = config.rollout.max_response_tokens
    if (
        errors.sound("algo.overlong_buffer", "rollout.max_response_tokens")
        and algo.overlong_buffer > length
    ):
        rule = f"exceeds rollout.max_response_tokens = {length}"
        errors.add("algo.overlong_buffer", rule, "DAPO uses a fifth of it; 0 disables the penalty")


def check_run_folder(config: Config, errors: Findings) -> None:
    """Refuse what cannot be a folder, and things of the wrong kind in it. Changes nothing."""
    path = config.log.dir
    if not path:
        return
    try:
        path.encode()
    except UnicodeEncodeError:
        # Shown with its escapes, because nothing can print it as it is.
        errors.add("log.dir", "is not UTF-8", _NEW, value=path.encode(errors="replace").decode())
        return
    folder = Path(path)
    try:
        if folder.exists() and not folder.is_dir():
            errors.add("log.dir", "is not a folder", _NEW)
            return
        kinds = {name: (folder / name).stat().st_mode for name in _present(folder)}
    except (OSError, ValueError) as error:  # too long, a loop of links, below a file, a null byte
        reason = error.strerror if isinstance(error, OSError) else error
        errors.add("log.dir", f"cannot be a folder ({reason})", _NEW)
        return
    for name, mode in kinds.items():
        fits = stat.S_ISREG(mode) if name in _FILES else stat.S_ISDIR(mode)
        if not fits:
            kind = "file" if name in _FILES else "folder"
            errors.add("log.dir", f"holds {name}, which is not a {kind}", f"remove it, or {_NEW}")


def _present(folder: Path) -> list[str]:
    """Names of a run that the folder holds; OSError if there can be no such folder."""
    try:
        folder.stat()
    except FileNotFoundError:
        return []
    return [name for name in (*_FILES, *_FOLDERS) if (folder / name).exists()]
