"""The settings of `tiny` in float32 with some fields changed, and what the checks say of them."""

from typing import Any

from r3 import checks
from r3.config import Config, Problem, parse_value, with_values
from r3.configs import PRESETS

# In float32, so that what bfloat16 adds is one setting away.
TINY = with_values(
    PRESETS["tiny"](),
    {"model.dtype": "float32", "model.fp32_head": False, "engine.dtype": "float32"},
)


def changed(values: dict[str, Any], config: Config = TINY) -> Config:
    """Return a config with some fields as the command line or YAML gives them."""
    return with_values(config, {name: parse_value(name, value) for name, value in values.items()})


def found(values: dict[str, Any], world_size: int = 2) -> dict[str, str]:
    """Return field -> message of each problem of `tiny` with some fields changed."""
    problems = checks.problems(changed(values), world_size)
    return {problem.place: str(problem) for problem in problems}


def found_in_files(values: dict[str, Any]) -> dict[str, str]:
    """Return field -> message of each problem of the users' files that the settings name."""
    problems: list[Problem] = []
    checks.load_files(changed(values), problems)
    return {problem.place: str(problem) for problem in problems}
