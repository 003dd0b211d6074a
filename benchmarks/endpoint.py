"""`tiny-tools` trained through its environment, and by an agent in another process.

    .venv/bin/python benchmarks/endpoint.py            two runs, one after the other
    .venv/bin/python benchmarks/endpoint.py --redraw   picture and table from the json

The agent (endpoint_agent.py) has the task of the environment, OpenAI's official client and the
address of the endpoint. Every figure is a row of a run's own metrics.jsonl. The script writes
endpoint.json and endpoint.png to benchmarks/results/, and the table between the marks in README.md.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
import tempfile
from collections.abc import Mapping
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from learning_curve import BLUE, PACKAGES, RED, ROOT, hardware, run, source
from warm_start import columns

RESULTS = ROOT / "benchmarks" / "results" / "endpoint.json"
README = ROOT / "benchmarks" / "README.md"
MARKS = ("<!-- endpoint: made by endpoint.py -->", "<!-- endpoint: end -->")
AGENT = ROOT / "benchmarks" / "endpoint_agent.py"
QUIET = ("--log.tensorboard", "false", "--log.rollouts_every", "0", "--replay.shadow_every", "0")

COLUMNS = {
    "accuracy": "eval/heldout/accuracy",
    "reward": "reward/mean",
    "turns": "env/turns_mean",
    "coverage": "routing/coverage",
    "agreement": "routing/agreement",
}


def main() -> None:
    """Make the runs, and write json, picture and table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--redraw", action="store_true", help="only picture and table")
    args = parser.parse_args()
    if not args.redraw:
        RESULTS.write_text(json.dumps(measured(args.steps), indent=1) + "\n", encoding="utf-8")
    results = json.loads(RESULTS.read_text())
    draw(results["runs"], RESULTS.with_suffix(".png"))
    before, rest = README.read_text().split(MARKS[0])
    parts = (before + MARKS[0], table(results["runs"]), MARKS[1] + rest.split(MARKS[1])[1])
    README.write_text("\n\n".join(parts))


def measured(steps: int) -> dict[str, Any]:
    """Both runs, of the same seed."""
    with tempfile.TemporaryDirectory(prefix="r3-endpoint-") as name:
        folder = Path(name)

        def make(of: str, *flags: str) -> dict[str, Any]:
            every = ("--eval.every", "2", "--checkpoint.export", "false", "--checkpoint.every", "0")
            rows, how = run(folder / of, 0, steps, *QUIET, *every, *flags, preset="tiny-tools")
            command = how["command"].replace(name, "RUNS").replace(f"{ROOT}/", "")
            return {**how, "command": command, **columns(rows, COLUMNS)}

        start = shlex.join([sys.executable, f"{AGENT}:Agent"])
        runs = {
            "environment": make("environment"),
            "endpoint": make("endpoint", "--env.name", "single_turn", "--env.command", start),
        }
    return {
        "what": "preset `tiny-tools`, seed 0, two ranks; endpoint: the agent is another process",
        "made_by": "python benchmarks/endpoint.py",
        "date": date.today().isoformat(),
        "source": source(),
        "hardware": hardware(),
        "versions": {
            "python": platform.python_version(),
            **{package: version(package) for package in (*PACKAGES, "openai")},
        },
        "runs": runs,
    }


def draw(runs: Mapping[str, Any], path: Path) -> None:
    """Held-out accuracy and training reward by step."""
    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    figure, panels = plt.subplots(1, 2, figsize=(9.6, 3.4), layout="constrained")
    titles = {
        "accuracy": "Accuracy on 256 held-out problems, greedy",
        "reward": "Reward of sampled training answers",
    }
    styles = {"environment": (RED, "o-", 5), "endpoint": (BLUE, "x--", 6)}
    for axes, (key, title) in zip(panels, titles.items(), strict=True):
        for name, made in runs.items():
            color, style, size = styles[name]
            steps = [int(step) for step in made[key]]
            axes.plot(
                steps, list(made[key].values()), style, color=color, label=name, markersize=size
            )
        axes.set(xlabel="step", ylim=(0, 1.04), title=title)
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=120)


def table(runs: Mapping[str, Any]) -> str:
    """The table of README.md."""
    steps = list(next(iter(runs.values()))["accuracy"])
    heads = ["run", "accuracy before", *steps[1:], "reward, step 1", "last", "turns, step 1"]
    heads += ["last", "seconds of the steps"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for name, made in runs.items():
        cells = [name, *(f"{value:.3f}" for value in made["accuracy"].values())]
        for key in ("reward", "turns"):
            values = list(made[key].values())
            cells += [f"{values[0]:.2f}", f"{values[-1]:.2f}"]
        lines.append("| " + " | ".join([*cells, f"{made['step_s']:.0f}"]) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
