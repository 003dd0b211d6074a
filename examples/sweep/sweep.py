"""Train every combination of some settings, one run after the other, and rank them by reward."""

import argparse
import itertools
import json
import subprocess
import sys
from pathlib import Path

LAUNCHER = Path(__file__).resolve().parents[2] / "launch" / "local.sh"


def reward(folder: Path) -> float:
    """Mean reward of the last five steps."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    found = [row["reward/mean"] for row in map(json.loads, lines) if "reward/mean" in row]
    return sum(found[-5:]) / len(found[-5:])


def main() -> None:
    """Run the grid."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder for the runs")
    parser.add_argument("--grid", action="append", required=True, metavar="SETTING=A,B,...")
    parser.add_argument("flags", nargs="*", help="after --: flags of all runs")
    args = parser.parse_args()
    axes = []
    for axis in args.grid:
        setting, _, values = axis.partition("=")
        axes.append([(setting, value) for value in values.split(",")])
    results = []
    for combination in itertools.product(*axes):
        name = "_".join(f"{setting}={value}" for setting, value in combination)
        folder = args.out / name
        chosen = [word for setting, value in combination for word in (f"--{setting}", value)]
        command = [str(LAUNCHER), args.preset, *args.flags, *chosen, "--log.dir", str(folder)]
        print(f"== {name}", flush=True)
        if subprocess.run(command, check=False).returncode:
            sys.exit(f"{name} failed: {' '.join(command)}")
        results.append((reward(folder), name))
    print("\nreward, mean of the last five steps")
    for value, name in sorted(results, reverse=True):
        print(f"{value:.3f}  {name}")


if __name__ == "__main__":
    main()
