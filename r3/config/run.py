"""Settings of a run around its steps: evaluation, checkpoints, logs, and finding faults."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from r3.config.fields import ALWAYS, LONGEST_S, TEMPERATURES, setting
from r3.config.rollout import DataConfig, EnvConfig, RewardConfig


@dataclass(frozen=True, kw_only=True)
class EvalSet:
    """One held-out set: one value of every list of `EvalConfig`, and its `env_args`."""

    path: str
    name: str
    prompt_key: str
    answer_key: str
    tools_key: str
    system_prompt: str
    env: str
    env_args: tuple[str, ...]
    function: str
    max_prompts: int
    samples: int
    temperature: float
    top_p: float
    max_tokens: int

    def environment(self, training: EnvConfig) -> EnvConfig:
        """The environment of this set: that of training, or the class that `env` names.

        Arguments of the training's class are kept and may be replaced; another class gets only
        `env_args`.

        Raises:
            ValueError: `env` is neither a built-in environment nor file.py:Class.
        """
        if not self.env:
            return replace(training, args=(*training.args, *self.env_args))
        return training.named(self.env, self.env_args)

    def functions(self, training: RewardConfig) -> tuple[str, ...]:
        """The reward functions of this set, in place of those of training."""
        return (self.function,) if self.function else training.function

    def data(self, training: DataConfig) -> DataConfig:
        """The columns and the system prompt of this set, in place of those of training."""
        own: dict[str, Any] = {
            name: "" if value == "none" else value
            for name in ("prompt_key", "answer_key", "tools_key", "system_prompt")
            if (value := getattr(self, name))
        }
        return replace(training, **own)


EVAL_LISTS = tuple(declared.name for declared in fields(EvalSet) if declared.name != "env_args")
"""Settings of `EvalConfig` that have one value per set."""


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Evaluation with the same engine: before the first step, on schedule, and after the last.

    Lists have one value per set, or one for all sets.
    """

    only: bool = setting(False, needs=ALWAYS)
    """Evaluate the newest checkpoint of log.dir, or model.path if there is none, then end."""
    path: tuple[str, ...] = setting((), path=True)
    """Held-out sets, each one source as in data.path. Empty: no evaluation."""
    name: tuple[str, ...] = setting(
        ("heldout",),
        pattern=r"[A-Za-z0-9_.-]+",
        words="made of letters, digits, '_', '-' and '.' only",
        fix="heldout; metrics and files have this name",
    )
    """Names of the sets in metrics and files."""
    prompt_key: tuple[str, ...] = setting((), none=True)
    """Columns with the question, as in data.prompt_key. Empty: that of training."""
    answer_key: tuple[str, ...] = setting((), none=True)
    """Columns with the reference answer. Empty: that of training. none: rows have none."""
    tools_key: tuple[str, ...] = setting((), none=True)
    """Columns with the tools. Empty: that of training. none: rows have none."""
    system_prompt: tuple[str, ...] = setting((), none=True)
    """System messages of the sets. Empty: that of training. none: none is added."""
    env: tuple[str, ...] = setting((), path=True)
    """Environments of the sets, as in env.name or env.path. Empty: that of training."""
    env_args: tuple[str, ...] = setting(
        (),
        arguments=True,
        pattern=r"(?s)([A-Za-z0-9_.-]+\.)?[A-Za-z_]\w*=.*",
        words="key=value or SET.key=value",
    )
    """Keyword arguments of the environments, each SET.key=value, or key=value for all sets; also a
    mapping. They are added to env.args, or replace one of them. With eval.env they are the only
    ones."""
    function: tuple[str, ...] = setting((), path=True, none=True)
    """Reward functions of the sets, as in reward.function. Empty: those of training."""
    every: int = setting(10, ge=0, needs="eval.path training")
    """Steps between evaluations. 0: only before the first step and after the last."""
    max_prompts: tuple[int, ...] = setting((0,), ge=0)
    """Evaluate only this many rows of a set, from its beginning. 0: all."""
    samples: tuple[int, ...] = setting((1,), ge=1)
    """Samples per question. With more than one, avg@k and pass@k are reported too."""
    pass_at: tuple[int, ...] = setting((), ge=1, needs="eval.path samples")
    """Values of k for pass@k, each at most samples; estimated without bias from all samples. Empty:
    k = samples."""
    temperature: tuple[float, ...] = setting(
        (0.0,), zero=True, **TEMPERATURES, fix="0 for greedy decoding", resume=True
    )
    """Sampling temperature. 0: greedy decoding."""
    top_p: tuple[float, ...] = setting(
        (1.0,),
        gt=0,
        le=1,
        fix="1.0, which samples from all tokens",
        needs="eval.path eval.temperature",
    )
    """Nucleus sampling mass."""
    max_tokens: tuple[int, ...] = setting((0,), ge=0)
    """Maximum tokens per response. 0: rollout.max_response_tokens."""

    @property
    def sets(self) -> tuple[EvalSet, ...]:
        """The held-out sets, with every list spread over them."""
        count = len(self.path)
        columns: dict[str, Any] = {
            name: values * count if len(values := getattr(self, name) or ("",)) == 1 else values
            for name in EVAL_LISTS
        }
        columns["env_args"] = [self._env_args_of(name) for name in columns["name"]]
        return tuple(
            EvalSet(**{name: values[i] for name, values in columns.items()}) for i in range(count)
        )

    def _env_args_of(self, name: str) -> tuple[str, ...]:
        """The items of `env_args` for a set, as key=value."""
        named = [(item.partition("=")[0].rpartition("."), item) for item in self.env_args]
        return tuple(
            item.removeprefix(f"{owner}{dot}")
            for (owner, dot, _), item in named
            if owner in ("", name)
        )


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints to resume from, and the exported model."""

    every: int = setting(0, ge=-1, needs="training")
    """Steps between checkpoints. 0: only after the last step. -1: none, except where a signal stops
    the run or checkpoint.keep_best saves."""
    keep: int = setting(2, ge=0, needs="training")
    """Number of newest checkpoints to keep. 0: all."""
    keep_best: str = setting(
        "",
        pattern="|eval/[A-Za-z0-9_.-]+/.+",
        words="a metric of an evaluation",
        fix="eval/heldout/accuracy, with the name of your set",
        needs="training",
    )
    """Metric of the evaluations, such as eval/heldout/accuracy. A checkpoint is saved after each
    evaluation that is better than all before, and the best one is also kept. Empty: none."""
    best_is: Literal["highest", "lowest"] = setting(
        "highest", needs="training checkpoint.keep_best"
    )
    """Which value of checkpoint.keep_best is the best."""
    background: bool = setting(True, needs="training")
    """Write checkpoints while the next steps are made, from a copy in host memory. A checkpoint is
    complete some time after its step; a run that fails completes it first. false: the run waits."""
    on_damage: Literal["fall_back", "stop"] = "fall_back"
    """If the newest checkpoint is damaged: resume from the newest one that is whole, or stop."""
    export: bool = setting(True, needs="training")
    """Write Hugging Face safetensors after the last step, to LOG_DIR/hf/."""
    export_every: int = setting(0, ge=0, needs="training")
    """Steps between such exports during the run, each to a folder of its own. 0: none."""
    allow_changed: tuple[
        Literal[
            "data",
            "tokenizer",
            "template",
            "model",
            "weights",
            "adapter",
            "teacher",
            "reward_model",
        ],
        ...,
    ] = ()
    """What may have changed since the run was started, for this one resume. Empty: a resume is
    refused if rows, tokenizer, chat template or a model folder changed."""

    def exports_after(self, step: int, *, is_last: bool) -> bool:
        """Whether the weights after a step are exported."""
        return (is_last and self.export) or (
            self.export_every > 0 and step % self.export_every == 0
        )


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """What a run writes and shows."""

    dir: str = setting("", path=True)
    """Folder of the run. Starting again with the same folder resumes from its newest checkpoint.
    Empty: runs/PRESET, or runs/PRESET-2 and so on if that has a run with other settings."""
    rollouts_every: int = setting(10, ge=0, needs="rollouts")
    """Steps between dumps of all rollouts with tokens, log-probabilities and routes; the first step
    is always dumped. 0: never."""
    tensorboard: bool = True
    """Write LOG_DIR/tensorboard."""
    tracker: Literal["none", "wandb", "trackio", "mlflow"] = "none"
    """Experiment tracker that gets settings, metrics and samples too. Its package is
    installed separately. A resumed run continues its run of the tracker."""
    project: str = setting(
        "r3",
        pattern="(?s).+",
        words="a text that is not empty",
        why="a tracker files runs under a project",
        fix="r3",
        needs="log.tracker",
    )
    """Project of log.tracker; MLflow calls it an experiment."""
    show_every: int = setting(0, ge=0, needs="rollouts")
    """Steps between samples shown on the console, one conversation of the first rank with its
    reward. 0: none."""
    progress: bool = True
    """Show progress bars when the console is a terminal."""


@dataclass(frozen=True, kw_only=True)
class DebugConfig:
    """Settings for finding faults."""

    prove_sync_every: int = setting(0, ge=0, needs="sampling")
    """Steps between checks of the weight sync, which compare every weight of the engine with the
    policy's, then log-probabilities of a few tokens that the engine decodes. The first two syncs
    are always checked. 0: no further checks."""
    stall_s: float = setting(600.0, ge=0, le=LONGEST_S)
    """Seconds without progress after which a rank reports its phase and stack. 0: never."""
    kill_after_s: float = setting(900.0, ge=0, le=LONGEST_S)
    """Seconds without progress on any rank after which the ranks end, so that the launcher can
    restart the run; twice as long while it starts, and at least 120 s while it reads data.
    0: never."""
    collective_timeout_s: float = setting(
        1800.0, ge=1, le=LONGEST_S, fix="1800, or the longest wait you expect"
    )
    """Seconds that a rank waits for other ranks in a collective before the run fails. Raise it for
    very long generations or slow checkpoint disks."""
    profile: int = setting(0, ge=0, needs="training")
    """Step of which every rank records all operations under the step's phases: traces/ in the
    folder of the run, to be opened in https://ui.perfetto.dev. 0: none."""
    deterministic: bool = False
    """Ask torch for deterministic algorithms, so that two runs with one seed are bitwise equal. CPU
    runs always are. An operation without such an algorithm warns on CPU and raises an error on
    CUDA."""
