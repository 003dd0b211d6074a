"""The checks of `data.env` and `data.curriculum`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from r3 import extras
from r3.checks.functions import check_environment_name
from r3.config import Config
from r3.config.rules import Findings


def check_sources(config: Config, errors: Findings) -> None:
    """Environments of sources exist and end their conversations in a step; bounds are bounds."""
    data = config.data
    for env in filter(None, dict.fromkeys(data.env)):
        check_environment_name(env, "data.env", errors)
    if data.env and len(data.env) != data.num_sources:
        rule = f"has {len(data.env)} values for the {data.num_sources} sources of rows"
        errors.add("data.env", rule, "give one per source, or none: env then holds for all rows")
    if data.env and config.rollout.step_token_budget:
        rule = "names environments of sources, and rollout.step_token_budget needs one for all rows"
        errors.add("data.env", rule, "set the budget to 0, or leave data.env out")
    if data.curriculum and (len(data.curriculum) != 2 or data.curriculum[0] >= data.curriculum[1]):
        rule = "must be two pass rates, the lower one first"
        errors.add("data.curriculum", rule, "use 0 1, or none for no curriculum")


def load_environments(config: Config, collect: Callable[..., None]) -> None:
    """Load the classes of `data.env`; `collect` keeps their problems."""
    for spec in dict.fromkeys(env for env in config.data.env if ":" in env):
        env = config.env.named(spec)
        load = partial(extras.environments().environment_notes, env, replace(config, env=env))
        collect(load, {spec: "data.env"})
