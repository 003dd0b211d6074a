"""Settings of a run: the fields with their rules, problems with them, and YAML.

`r3.cli.checks.problems(config, world_size)` lists everything that is wrong with a config at once,
each with field, value, rule and fix, before any device is touched. Presets are in `configs/`.
Imports nothing heavy.
"""

from r3.config.fields import (
    SETTINGS,
    ConfigError,
    FieldDescription,
    Problem,
    Setting,
    describe_fields,
    nearest_settings,
    parse_value,
    resume_problems,
)
from r3.config.files import dump_yaml, from_yaml, load_yaml, to_yaml, values_of
from r3.config.settings import (
    AlgoConfig,
    CheckpointConfig,
    Config,
    DataConfig,
    DebugConfig,
    EngineConfig,
    EnvConfig,
    EvalConfig,
    EvalSet,
    LogConfig,
    ModelConfig,
    ParallelConfig,
    ReplayConfig,
    RewardConfig,
    RolloutConfig,
    TrainConfig,
    flatten,
    with_values,
)

__all__ = [
    "SETTINGS",
    "AlgoConfig",
    "CheckpointConfig",
    "Config",
    "ConfigError",
    "DataConfig",
    "DebugConfig",
    "EngineConfig",
    "EnvConfig",
    "EvalConfig",
    "EvalSet",
    "FieldDescription",
    "LogConfig",
    "ModelConfig",
    "ParallelConfig",
    "Problem",
    "ReplayConfig",
    "RewardConfig",
    "RolloutConfig",
    "Setting",
    "TrainConfig",
    "describe_fields",
    "dump_yaml",
    "flatten",
    "from_yaml",
    "load_yaml",
    "nearest_settings",
    "parse_value",
    "resume_problems",
    "to_yaml",
    "values_of",
    "with_values",
]
