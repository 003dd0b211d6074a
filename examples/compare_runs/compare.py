"""Compare two runs: settings that differ, and means of the metrics that a person steers by."""

import json
import sys
from pathlib import Path

import yaml

METRICS = (
    "reward/mean",
    "eval/heldout/accuracy",
    "rollout/response_tokens_mean",
    "policy/entropy",
    "mismatch/k3",
    "mismatch/f2",
    "mismatch/abs_max",
    "optim/grad_norm",
)


def settings(folder: Path) -> dict[str, object]:
    """Every setting of a run by its full name."""
    tree = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    return {
        f"{section}.{name}": value
        for section, values in tree.items()
        for name, value in values.items()
    }


def rows(folder: Path) -> dict[float, dict[str, float]]:
    """The rows of metrics.jsonl by step."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return {row["step"]: row for row in map(json.loads, lines)}


def main() -> None:
    """Print both tables."""
    one, other = Path(sys.argv[1]), Path(sys.argv[2])
    left, right = settings(one), settings(other)
    print(f"{'setting':32s}{one.name:>20s}{other.name:>20s}")
    for name in left.keys() | right.keys():
        if left.get(name) != right.get(name) and name != "log.dir":
            print(f"{name:32s}{left.get(name)!s:>20s}{right.get(name)!s:>20s}")
    print(f"\n{'metric, mean over common steps':32s}{one.name:>20s}{other.name:>20s}")
    here, there = rows(one), rows(other)
    for name in METRICS:
        steps = [step for step in here if name in here[step] and name in there.get(step, {})]
        if steps:
            means = (sum(run[step][name] for step in steps) / len(steps) for run in (here, there))
            print(f"{name:32s}" + "".join(f"{mean:20.4g}" for mean in means))


if __name__ == "__main__":
    main()
