"""All settings of a run: a `Config` of sections, by their full names, and with other values.

The sections are frozen dataclasses in the files beside this one. The text under a field is its
`--help`. The annotation of a field holds its type, the rule its values obey, how to fix a value
that breaks the rule, and whether a resumed run may change it (`r3/config/rules.py`). A new setting
is added in one place: there. `python tools/make_docs.py` writes docs/configuration.md from it.

A `Config` is data; derived values are properties. Imports nothing heavy.
"""

# ruff: noqa: RUF009 - the sections are frozen, so one object may be the default of all
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

from r3.config.model import EngineConfig, LoraConfig, ModelConfig, ParallelConfig
from r3.config.names import names_of
from r3.config.rollout import DataConfig, EnvConfig, RewardConfig, RolloutConfig
from r3.config.rules import MayChangeOnResume
from r3.config.run import CheckpointConfig, DebugConfig, EvalConfig, LogConfig
from r3.config.train import AlgoConfig, ReplayConfig, TrainConfig

ENVIRONMENTS = ("env.name", "env.path", "env.command")
"""Settings of which one names the environment; `env.args` belong to it."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of a run: `torchrun --nproc_per_node N train.py BASE --section.field value`."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    env: EnvConfig = EnvConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    algo: AlgoConfig = AlgoConfig()
    train: TrainConfig = TrainConfig()
    lora: LoraConfig = LoraConfig()
    # Neither the layout nor what is written and measured shapes what is learnt.
    parallel: Annotated[ParallelConfig, MayChangeOnResume()] = ParallelConfig()
    engine: EngineConfig = EngineConfig()
    replay: ReplayConfig = ReplayConfig()
    eval: Annotated[EvalConfig, MayChangeOnResume()] = EvalConfig()
    checkpoint: Annotated[CheckpointConfig, MayChangeOnResume()] = CheckpointConfig()
    log: Annotated[LogConfig, MayChangeOnResume()] = LogConfig()
    debug: Annotated[DebugConfig, MayChangeOnResume()] = DebugConfig()

    @property
    def uses_engine(self) -> bool:
        """Whether anything is sampled: rollouts or evaluations."""
        return self.train.objective != "sft" or bool(self.eval.path)

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
    def named_rewards(self) -> tuple[tuple[str, str], ...]:
        """Functions of training, evaluation and rows by the names that metrics have."""
        rows = self.reward.row_functions if "row" in self.reward_functions else ()
        named = [zip(names_of(specs), specs, strict=True) for specs in (self.reward.function, rows)]
        alone = [(names_of([spec])[0], spec) for spec in self.eval.function if spec]
        return tuple(dict.fromkeys((*named[0], *named[1], *alone)))

    def longest_sequence(self, context: int) -> int:
        """Maximum tokens of prompt and response together, in a model with this context."""
        longest = min(self.engine.max_model_len or context, context, self.train.micro_batch_tokens)
        return min(
            longest, (self.data.max_prompt_tokens or longest) + self.rollout.max_response_tokens
        )

    def longest_prompt(self, context: int) -> int:
        """Maximum tokens of a prompt: `data.max_prompt_tokens`, or what a full response leaves."""
        return self.longest_sequence(context) - self.rollout.max_response_tokens


def flatten(config: Config) -> dict[str, Any]:
    """Every setting by its full name: `{"model.path": ..., "model.dtype": ..., ...}`."""
    return {
        f"{section}.{name}": value
        for section, values in asdict(config).items()
        for name, value in values.items()
    }


def replacing(config: Config, values: Mapping[str, Any]) -> dict[str, Any]:
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
