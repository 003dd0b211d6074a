"""All settings of a run: a `Config` of sections, by their full names, and with other values.

The sections are frozen dataclasses in the files beside this one. A new setting is a field of one,
with its type and `setting(...)` (`r3/config/fields.py`); the text under it is its `--help`.
`python tools/make_docs.py` writes docs/configuration.md from it.

A `Config` is data; derived values are properties. Imports nothing heavy.
"""

# ruff: noqa: RUF009 - the sections are frozen, so one object may be the default of all
from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, get_type_hints

from r3.config.arguments import reward_names
from r3.config.fields import Setting, setting
from r3.config.model import EngineConfig, LoraConfig, ModelConfig, ParallelConfig
from r3.config.rollout import DataConfig, EnvConfig, RewardConfig, RolloutConfig
from r3.config.run import CheckpointConfig, DebugConfig, EvalConfig, EvalSet, LogConfig
from r3.config.train import AlgoConfig, ReplayConfig, TrainConfig

ENVIRONMENTS = ("env.name", "env.path", "env.command")
"""Settings of which one names the environment; `env.args` belong to it."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of a run: `torchrun --nproc_per_node N train.py BASE --section.field value`."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    env: EnvConfig = setting(EnvConfig(), needs="sampling")
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = setting(RewardConfig(), needs="sampling")
    algo: AlgoConfig = setting(AlgoConfig(), needs="training")
    train: TrainConfig = setting(TrainConfig(), needs="training")
    lora: LoraConfig = setting(LoraConfig(), needs="lora.rank")
    # Neither the layout nor what is written and measured shapes what is learnt.
    parallel: ParallelConfig = setting(ParallelConfig(), resume=True)
    engine: EngineConfig = setting(EngineConfig(), needs="sampling")
    replay: ReplayConfig = setting(ReplayConfig(), needs="rollouts moe")
    eval: EvalConfig = setting(EvalConfig(), resume=True, needs="eval.path")
    checkpoint: CheckpointConfig = setting(CheckpointConfig(), resume=True)
    log: LogConfig = setting(LogConfig(), resume=True)
    debug: DebugConfig = setting(DebugConfig(), resume=True)

    @property
    def trains(self) -> bool:
        """Whether the run trains; it evaluates and ends with `eval.only`."""
        return not self.eval.only

    @property
    def learns_rows(self) -> bool:
        """Whether a step learns rows as they are and samples nothing (`train.objective sft`)."""
        return self.train.objective == "sft"

    @property
    def distils(self) -> bool:
        """Whether samples learn from a teacher alone."""
        return self.train.objective == "distill"

    @property
    def has_teacher(self) -> bool:
        """Whether frozen checkpoints score the samples."""
        return bool(self.algo.teacher)

    @property
    def checkpoints(self) -> tuple[str, ...]:
        """The models whose weights a run loads into policies: its own, then the teachers."""
        return (self.model.path, *self.algo.teacher)

    @property
    def uses_engine(self) -> bool:
        """Whether anything is sampled: rollouts or evaluations."""
        return not self.learns_rows or bool(self.eval.path)

    @property
    def moves_optimizer(self) -> bool:
        """Whether its state is on the host at times: streamed, or while an engine generates."""
        return self.uses_engine or self.train.optimizer == "streamed"

    @property
    def has_rounds(self) -> bool:
        """Whether a step may take several rounds of conversations."""
        return bool(self.rollout.step_token_budget or self.algo.dynamic_sampling)

    @property
    def in_float32(self) -> bool:
        """Whether policy and engine compute in float32 throughout."""
        return self.model.dtype == self.engine.dtype == "float32"

    @property
    def uses_lora(self) -> bool:
        """Whether adapters are trained and all other parameters keep their values."""
        return self.lora.rank > 0

    @property
    def quantises_base(self) -> bool:
        """Whether the matrices that adapters leave frozen are stored in one byte per value."""
        return self.model.base != "dtype"

    @property
    def replays(self) -> bool:
        """Whether a model with experts replays routes, those of the engine or its own."""
        return self.replay.mode != "off"

    @property
    def captures(self) -> bool:
        """Whether the engine captures routes, if the model has experts."""
        return self.replay.mode == "r3"

    def of_teacher(self, *, is_dense: bool) -> Config:
        """The config that a teacher is built with: settings of the policy's model are left out."""
        own: dict[str, Any] = {"parallel.pp_layers": (), "model.router_logits": "float32"}
        if is_dense:
            own |= {"parallel.ep": 1, "parallel.etp": 0}
        return with_values(self, own)

    @property
    def reward_functions(self) -> tuple[str, ...]:
        """Functions of training, evaluation and rows, each once, as they are set."""
        named = (*self.reward.function, *filter(None, self.eval.function))
        rows = self.reward.row_functions if "row" in named else ()
        return tuple(dict.fromkeys((*named, *rows)))

    @property
    def environments(self) -> tuple[EnvConfig, ...]:
        """The environment of each path of the training data."""
        named = (self.env.named(name) if name else self.env for name in self.data.env)
        return tuple(named) or (self.env,) * len(self.data.path)

    @property
    def users_code(self) -> tuple[str, ...]:
        """Functions and classes of users' files, as path/to/file.py:name."""
        specs = (self.env.path, *self.reward.function, *self.reward.row_functions)
        specs += (*self.algo.own_functions.values(), *self.eval.env, *self.eval.function)
        specs += self.data.env
        return tuple(dict.fromkeys(spec for spec in specs if ":" in spec))

    @property
    def users_files(self) -> list[str]:
        """Files of the user that are there: of functions, classes, programs and prompts."""
        files = [spec.rpartition(":")[0] for spec in self.users_code]
        files += [self.reward.prompt_file, *self.env.command.split()]
        return [file for file in dict.fromkeys(files) if Path(file).is_file()]

    @property
    def named_rewards(self) -> tuple[tuple[str, str], ...]:
        """Functions of training, evaluation and rows by the names that metrics have."""
        rows = self.reward.row_functions if "row" in self.reward_functions else ()
        named = [
            zip(reward_names(specs), specs, strict=True) for specs in (self.reward.function, rows)
        ]
        alone = [(reward_names([spec])[0], spec) for spec in self.eval.function if spec]
        return tuple(dict.fromkeys((*named[0], *named[1], *alone)))

    def response_tokens(self, of_set: EvalSet | None = None) -> int:
        """Maximum tokens of a response, in training or in a held-out set."""
        return (of_set.max_tokens if of_set else 0) or self.rollout.max_response_tokens

    def longest_sequence(self, context: int) -> int:
        """Maximum tokens of prompt and response together, in a model with this context."""
        longest = min(self.engine.max_model_len or context, context, self.train.micro_batch_tokens)
        return min(
            longest, (self.data.max_prompt_tokens or longest) + self.rollout.max_response_tokens
        )

    def longest_row(self, context: int) -> int:
        """Maximum tokens of a row of training: a prompt, or a conversation to learn."""
        whole = min(context, self.train.micro_batch_tokens)
        return whole if self.learns_rows else self.longest_prompt(context)

    def longest_prompt(self, context: int) -> int:
        """Maximum tokens of a prompt: `data.max_prompt_tokens`, or what a full response leaves."""
        return self.longest_sequence(context) - self.rollout.max_response_tokens


SETTINGS: dict[str, Setting] = {}
"""Every setting by its full name, "section.field"."""


def _declare() -> None:
    for section in fields(Config):
        cls = type(getattr(Config(), section.name))
        kinds = get_type_hints(cls)
        of_section = section.metadata.get("setting", Setting())
        for field in fields(cls):
            declared = field.metadata or setting(field.default).metadata
            own: Setting = declared["setting"]
            name, resume = f"{section.name}.{field.name}", own.resume or of_section.resume
            needs = own.needs or of_section.needs
            SETTINGS[name] = replace(
                own, name=name, kind=kinds[field.name], resume=resume, needs=needs
            )


_declare()


def help_of(name: str) -> str:
    """What a setting is, its unit, and what special values mean."""
    section, key = name.split(".")
    return _help_texts(section)[key]


@cache
def _help_texts(section: str) -> dict[str, str]:
    """The text under each setting of a section.

    Read when help is asked for: at every start it would take longer than all else about settings.
    """
    cls = type(getattr(Config(), section))
    (node,) = ast.parse(inspect.getsource(cls)).body
    assert isinstance(node, ast.ClassDef), f"{cls.__name__} is not a class statement"
    texts: dict[str, str] = {}
    for field, below in pairwise(node.body):
        match field, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str() as text)),
            ):
                texts[name] = " ".join(text.split())
    return texts


def flatten(config: Config) -> dict[str, Any]:
    """Every setting by its full name: `{"model.path": ..., "model.dtype": ..., ...}`."""
    return {
        f"{section}.{name}": value
        for section, values in asdict(config).items()
        for name, value in values.items()
    }


def overriding(config: Config, values: Mapping[str, Any]) -> dict[str, Any]:
    """Values to lay over a config, with the defaults of what they take the place of.

    A layer that names an environment replaces that of the layers below, its arguments included.
    """
    if not any(values.get(name) for name in ENVIRONMENTS):
        return dict(values)
    below, defaults = flatten(config), flatten(Config())
    above = {name: defaults[name] for name in ENVIRONMENTS} | dict(values)
    if all(above[name] == below[name] for name in ENVIRONMENTS):
        return dict(values)  # the same one
    replaced = (*ENVIRONMENTS, "env.args")
    return {name: defaults[name] for name in replaced if below[name] != defaults[name]} | {**values}


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """The config with some settings, given by their full names, replaced."""
    sections: dict[str, dict[str, Any]] = {}
    for full_name, value in values.items():
        section, name = full_name.split(".")
        sections.setdefault(section, {})[name] = value
    return replace(
        config,
        **{section: replace(getattr(config, section), **new) for section, new in sections.items()},
    )
