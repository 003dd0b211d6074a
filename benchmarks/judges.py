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
import json
import statistics
import tempfile
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.learning_curve import PACKAGES, ROOT, hardware, source
from tests.e2e import scorer_cases
from tests.families import CLASSIFIER_TOLERANCE, classifier
from tests.world import run_world


def main() -> None:
    """Run the arms in turns, write the figures and print them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    words = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="r3-judges-") as folder:
        path = classifier(Path(folder))
        (found,) = run_world(
            scorer_cases.turns, 1, timeout_s=800.0, reward_model=str(path), rounds=words.rounds
        )
    arms = {arm: summary([each[arm] for each in found]) for arm in found[0]}
    result: dict[str, Any] = {
        "made": date.today().isoformat(),
        "hardware": hardware(),
        "source": source(),
        "packages": {name: version(name) for name in PACKAGES},
        "sleep_s": scorer_cases.SLEEP_S,
        "tolerance": CLASSIFIER_TOLERANCE,
        "rounds": words.rounds,
        "arms": arms,
    }
    words.out.mkdir(parents=True, exist_ok=True)
    (words.out / "judges.json").write_text(json.dumps(result, indent=1) + "\n")
    for arm, figures in arms.items():
        print(f"{arm:12} {figures}")


def summary(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return medians over the rounds, and the largest difference of scores."""
    figures: dict[str, Any] = {
        name: statistics.median(each[name] for each in rounds)
        for name in ("seconds", "writing_s", "judged_before_last", "answers", "judge_mean_s")
    }
    if "batches" in rounds[0]:
        figures["batches"] = statistics.median(each["batches"] for each in rounds)
        figures["worst_difference"] = max(each["worst_difference"] for each in rounds)
    return figures


if __name__ == "__main__":
    main()
