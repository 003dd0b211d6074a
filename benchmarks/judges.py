"""Judges beside the engine: what a round takes when its judge is slow, and what was judged before
the last answer was written.

    .venv/bin/python -m benchmarks.judges                    one rank, two minutes on one core

Arms answer the same prompts with the shipped model, all at once, and differ in the judge: none to
speak of (`exact`); an async function that sleeps, as a server would; the same called in the loop,
which is what a judge costs that the engine waits for; a reward model in dynamic batches, and in
batches of one. Every round runs each arm once, in turns. Writes judges.json to benchmarks/results/.
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
from tests.tiny import CLASSIFIER_TOLERANCE, classifier
from tests.world import run_world


def main() -> None:
    """Take turns, write, print."""
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
    """Medians over the rounds; the largest difference of scores."""
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
