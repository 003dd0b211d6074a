"""Print accuracy and pass@k of every evaluation in a run's folder, from its samples."""

import json
import sys
from collections import defaultdict
from math import comb
from pathlib import Path


def main() -> None:
    """One line per step and set."""
    for file in sorted(Path(sys.argv[1]).glob("eval/step_*.jsonl")):
        sets: dict[str, dict[str, list[bool]]] = defaultdict(lambda: defaultdict(list))
        for line in file.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            sets[row["set"]][row["prompt_id"]].append(row["reward"] >= 1)
        for name, questions in sets.items():
            right = [sum(samples) for samples in questions.values()]
            n = max(len(samples) for samples in questions.values())
            accuracy = sum(right) / (n * len(right))
            chances = [1 - comb(n - c, n) / comb(n, n) for c in right]
            print(
                f"{file.stem} {name}: accuracy {accuracy:.3f}, "
                f"pass@{n} {sum(chances) / len(chances):.3f} ({len(right)} questions)"
            )


if __name__ == "__main__":
    main()
