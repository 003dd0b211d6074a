"""Settings that `train.objective` fixes."""

from __future__ import annotations

from typing import Any

from r3.config import Config, with_values

_OF_SFT: dict[str, Any] = {
    "rollout.group_size": 1,
    "rollout.temperature": 1.0,
    "rollout.top_p": 1.0,
    "rollout.top_k": 0,
    "rollout.step_token_budget": 0,
    "algo.advantage": "reinforce_pp",
    "algo.baseline": "prompt",
    "algo.dynamic_sampling": 0,
    "algo.overlong_buffer": 0,
    "algo.overlong_filter": False,
    # With an advantage of 1, the cross-entropy.
    "algo.loss": "pg",
    "algo.args": (),
    "algo.correction": "none",
    "algo.kl_coef": 0.0,
    "replay.mode": "off",
    "train.epochs_per_step": 1,
}
FIXED: dict[str, dict[str, Any]] = {
    "rl": {},
    # Nothing is sampled, compared or replayed.
    "sft": _OF_SFT,
    # Responses are not compared with each other.
    "distill": {
        "algo.advantage": "reinforce_pp",
        "algo.baseline": "prompt",
        "algo.dynamic_sampling": 0,
    },
}
"""Settings that train.objective fixes, whatever the others are."""


def fixed(config: Config) -> dict[str, Any]:
    """Settings that `train.objective` fixes, by their full names."""
    values = dict(FIXED[config.train.objective])
    if config.train.objective == "distill" and config.algo.takes_kl_from_reward:
        values["algo.kl_coef"] = 0.0
    return values


def in_effect(config: Config) -> Config:
    """The config with the settings that `train.objective` fixes."""
    return with_values(config, fixed(config))
