"""Settings of a run: the fields with their rules, problems with them, and YAML.

`r3.checks.problems(config, world_size)` lists everything that is wrong with a config at once,
each with place, value, rule and fix, before any device is touched. Presets are in `configs/`.
Imports nothing heavy.
"""

from r3.config.arguments import argument_value, keyword_arguments
from r3.config.fields import HIDDEN, Setting, as_typed, key_problems, looks_like_key, shown
from r3.config.model import EngineConfig, LoraConfig, ModelConfig, ParallelConfig, model_problem
from r3.config.reading import (
    dump_yaml,
    filled_in,
    from_yaml,
    load_yaml,
    nearest_settings,
    parse_value,
    read_values,
    to_yaml,
    values_of,
)
from r3.config.resume import (
    ANOTHER_FOLDER,
    changes_of_run,
    fixed_changes,
    folder_error,
    other_run,
    path_from_start,
    require_same_settings,
)
from r3.config.rollout import DataConfig, EnvConfig, RewardConfig, RolloutConfig
from r3.config.run import EVAL_LISTS, CheckpointConfig, DebugConfig, EvalConfig, EvalSet, LogConfig
from r3.config.settings import SETTINGS, Config, flatten, help_of, overriding, with_values
from r3.config.train import ADVANTAGES, LOSSES, OF_OBJECTIVE, AlgoConfig, ReplayConfig, TrainConfig
from r3.errors import ConfigError, Problem
