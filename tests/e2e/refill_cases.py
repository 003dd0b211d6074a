"""Steps with dynamic sampling."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from r3.config import Config
from r3.rewards.scorer import Scorer
from r3.rollout.scored import score_all
from r3.rollout.step import NoSignalError, RolloutSource
from r3.runtime.device import Device
from r3.types import Prompt, Rollout
from tests.errors import message_of
from tests.talkers import Talker, values
from tests.tiny import tiny_config


@dataclass(frozen=True, kw_only=True)
class RefillStep:
    """One step by "PROMPT GROUP SAMPLE"; counts are None without dynamic sampling."""

    sampled: dict[str, list[int]]
    advantages: list[float]
    indices: list[int]
    rounds: float | None
    groups_trained: float | None
    groups_sampled: float | None


@dataclass(frozen=True, kw_only=True)
class Refills:
    """Steps by number: three in a row, the third alone, with one refill, without dynamic sampling.

    Attributes:
        nothing: message of a step in which all rewards are equal.
    """

    run: dict[str, RefillStep]
    resumed: dict[str, RefillStep]
    capped: dict[str, RefillStep]
    off: dict[str, RefillStep]
    nothing: str


def refills(device: Device) -> Refills:
    """Steps with dynamic sampling; rewards differ for every third prompt only."""
    config = tiny_config(
        engine={"max_model_len": 160, "kv_cache_gib": 0.0625},
        rollout={"prompts_per_step": 6, "group_size": 2},
        algo={"dynamic_sampling": 6},
    )
    talker = Talker(device, config)

    def scorer(rollout: Rollout, prompt: Prompt) -> float:
        return float(rollout.sample_index) if int(prompt.id.rpartition(":")[2]) % 3 == 0 else 1.0

    def steps(
        config: Config, scorer: Callable[[Rollout, Prompt], float], *wanted: int
    ) -> dict[str, RefillStep]:
        results: dict[str, RefillStep] = {}
        for step in wanted:
            talker.engine.policy_version = step - 1
            task = replace(talker.task, scorer=Scorer.of_function(scorer))
            made = RolloutSource(talker.engine, task, config, talker.mesh).collect(step)
            scored = score_all(made.rollouts, made.rewards, config)
            metrics = values({name: part for parts in made.metrics for name, part in parts.items()})
            results[str(step)] = RefillStep(
                sampled={
                    f"{each.prompt_id} {each.group} {each.sample_index}": each.tokens_T.tolist()
                    for each in made.rollouts.rollouts
                },
                advantages=[item.advantage for item in scored],
                indices=[item.index for item in scored],
                rounds=metrics.get("rollout/rounds"),
                groups_trained=metrics.get("rollout/groups_trained"),
                groups_sampled=metrics.get("rollout/groups_sampled"),
            )
        return results

    one, off = (
        replace(config, algo=replace(config.algo, dynamic_sampling=rounds)) for rounds in (1, 0)
    )
    return Refills(
        run=steps(config, scorer, 1, 2, 3),
        resumed=steps(config, scorer, 3),
        capped=steps(one, scorer, 1),
        off=steps(off, scorer, 1),
        nothing=message_of(lambda: steps(one, lambda _rollout, _prompt: 1.0, 1), NoSignalError),
    )
