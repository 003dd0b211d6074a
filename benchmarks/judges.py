"""Measure how long a round takes with a slow reward function that runs beside the engine.

    .venv/bin/python -m benchmarks.judges                    one rank, two minutes on one core

Every arm samples responses to the same prompts with the shipped model, all at once. The arms differ
in the reward function:

- `exact`, which takes almost no time;
- an async function that sleeps, as a call to a server would;
- the same function called in the engine's loop, so that the engine waits for it;
- a reward model in dynamic batches;
- a reward model in batches of one.

Every round runs each arm once. The script also counts how many responses were scored before the
last one was sampled. It writes judges.json to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.learning_curve import PACKAGES, ROOT, hardware, source
from r3.config import RewardConfig
from r3.judges import Batches, RewardModel
from r3.rewards.scorer import Component, Scorer, make_scorer
from r3.runtime.device import Device
from r3.types import Prompt, Rollout
from r3.user_code import Pool, Threads
from tests.e2e import scorer_cases as cases
from tests.families import CLASSIFIER_TOLERANCE, classifier
from tests.tiny import rewards_of
from tests.world import run_world

SLEEP_S = 0.05  # of the slow reward function


def turns(device: Device, *, reward_model: str, rounds: int) -> list[dict[str, Any]]:
    """Sample the same round under each reward function, in turns; all on one rank."""
    engine = cases.talker(device)
    prompts = engine.task.prompts.prompts

    def at_once(batch: int) -> RewardConfig:
        return RewardConfig(
            function=("model",),
            model_path=reward_model,
            model_dtype="float32",
            model_batch=batch,
            model_wait_s=0.05 if batch > 1 else 0.0,
        )

    batched, single = RewardModel(at_once(16)), RewardModel(at_once(1))

    async def sleep(response: str, prompt: Prompt) -> float:
        await asyncio.sleep(SLEEP_S)
        return 1.0

    def wait(rollout: Rollout, prompt: Prompt) -> float:
        time.sleep(SLEEP_S)
        return 1.0

    def sleeping() -> Scorer:
        pool = Pool(Threads(), timeout_s=60.0)
        return Scorer([Component(name="sleep", function=sleep, pool=pool)])

    arms: dict[str, Callable[[], Scorer]] = {
        "quick": lambda: make_scorer(RewardConfig(function=("exact",))),
        "beside": sleeping,
        "in the loop": lambda: Scorer.of_function(wait),
        "model": lambda: make_scorer(batched.settings, model=batched),
        "model of one": lambda: make_scorer(single.settings, model=single),
    }
    results: list[dict[str, Any]] = []
    for number in range(rounds + 1):
        figures: dict[str, Any] = {}
        for name, arm in arms.items():
            scorer = arm()
            collected, watched, seconds = cases.round_of(engine, scorer, prompts=16)
            last = max(watched.ended.values())
            figures[name] = {
                "seconds": seconds,
                "writing_s": last - watched.began,
                "judged_before_last": watched.overlap(),
                "answers": len(collected.rollouts),
                "judge_mean_s": sum(
                    watched.judged[key] - when for key, when in watched.ended.items()
                )
                / len(watched.ended),
            }
            if name.startswith("model"):
                place = scorer.components[0].pool.place
                assert isinstance(place, Batches)
                alone = [
                    single.score(rollout.response, prompts[rollout.group])
                    for rollout in collected.rollouts
                ]
                figures[name]["batches"] = len(place.trace)
                figures[name]["worst_difference"] = max(
                    abs(one - other)
                    for one, other in zip(rewards_of(collected), alone, strict=True)
                )
        if number:  # the first warms everything up
            results.append(figures)
    return results


def main() -> None:
    """Run the arms in turns, write the figures and print them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="r3-judges-") as folder:
        from benchmarks import judges  # ranks look the case up by the name of its module

        path = classifier(Path(folder))
        (results,) = run_world(
            judges.turns, 1, timeout_s=800.0, reward_model=str(path), rounds=args.rounds
        )
    arms = {arm: summary([figures[arm] for figures in results]) for arm in results[0]}
    result: dict[str, Any] = {
        "made": date.today().isoformat(),
        "hardware": hardware(),
        "source": source(),
        "packages": {name: version(name) for name in PACKAGES},
        "sleep_s": SLEEP_S,
        "tolerance": CLASSIFIER_TOLERANCE,
        "rounds": args.rounds,
        "arms": arms,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "judges.json").write_text(json.dumps(result, indent=1) + "\n")
    for arm, figures in arms.items():
        print(f"{arm:12} {figures}")


def summary(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return medians over the rounds, and the largest difference of scores."""
    figures: dict[str, Any] = {
        name: statistics.median(of_round[name] for of_round in rounds)
        for name in ("seconds", "writing_s", "judged_before_last", "answers", "judge_mean_s")
    }
    if "batches" in rounds[0]:
        figures["batches"] = statistics.median(of_round["batches"] for of_round in rounds)
        figures["worst_difference"] = max(of_round["worst_difference"] for of_round in rounds)
    return figures


if __name__ == "__main__":
    main()
