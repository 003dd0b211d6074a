"""Supervised warm start and on-policy distillation of `tiny`, beside RL alone.

    .venv/bin/python benchmarks/warm_start.py            four runs, one after the other
    .venv/bin/python benchmarks/warm_start.py --redraw   picture and table from the json

RL trains the embedded model; its export is the teacher. Then the same model learns rows for a few
steps and goes on with RL from the export, and is distilled from the teacher. Every figure is a row
of a run's own metrics.jsonl. The script writes warm_start.json and warm_start.png to
benchmarks/results/, and the table between the marks in README.md.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
from collections.abc import Mapping, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from learning_curve import BLUE, GREY, PACKAGES, RED, ROOT, hardware, run, source

RESULTS = ROOT / "benchmarks" / "results" / "warm_start.json"
README = ROOT / "benchmarks" / "README.md"
MARKS = ("<!-- warm start: made by warm_start.py -->", "<!-- warm start: end -->")
QUIET = ("--log.tensorboard", "false", "--log.rollouts_every", "0", "--replay.shadow_every", "0")
RL_STEPS, SFT_STEPS, REST_STEPS, DISTILL_STEPS = 25, 4, 15, 20

COLUMNS = {
    "accuracy": "eval/heldout/accuracy",
    "reward": "reward/mean",
    "nll": "loss/nll",
    "kl_teacher": "loss/kl_teacher",
}


def main() -> None:
    """Make the runs, and write json, picture and table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--redraw", action="store_true", help="only picture and table")
    if not parser.parse_args().redraw:
        RESULTS.write_text(json.dumps(measured(), indent=1) + "\n", encoding="utf-8")
    results = json.loads(RESULTS.read_text())
    draw(results["runs"], RESULTS.with_suffix(".png"))
    before, rest = README.read_text().split(MARKS[0])
    parts = (before + MARKS[0], table(results["runs"]), MARKS[1] + rest.split(MARKS[1])[1])
    README.write_text("\n\n".join(parts))


def measured() -> dict[str, Any]:
    """All runs, the later ones from exports of the earlier ones."""
    with tempfile.TemporaryDirectory(prefix="r3-warm-start-") as name:
        folder = Path(name)

        def export(of: str, steps: int) -> str:
            return str(folder / of / "hf" / f"step_{steps:06d}")

        def make(of: str, steps: int, *flags: str) -> dict[str, Any]:
            rows, how = run(folder / of, 0, steps, *QUIET, *flags)
            return {
                **how,
                "command": how["command"].replace(name, "RUNS"),
                **columns(rows, COLUMNS),
            }

        sft = ("--train.objective", "sft", "--eval.every", "1", "--train.lr", "4e-4")
        teacher = ("--algo.teacher", export("rl", RL_STEPS), "--train.objective", "distill")
        runs = {
            "rl": make("rl", RL_STEPS),
            "sft": make("sft", SFT_STEPS, *sft),
            "rl after sft": make(
                "rl-after-sft", REST_STEPS, "--model.path", export("sft", SFT_STEPS)
            ),
            "distill": make("distill", DISTILL_STEPS, *teacher),
        }
    return {
        "what": "preset `tiny`, seed 0, two ranks; distill: the teacher is the export of rl",
        "made_by": "python benchmarks/warm_start.py",
        "date": date.today().isoformat(),
        "source": source(),
        "hardware": hardware(),
        "versions": {
            "python": platform.python_version(),
            **{package: version(package) for package in PACKAGES},
        },
        "runs": runs,
    }


def columns(rows: Sequence[Mapping[str, float]], keys: Mapping[str, str]) -> dict[str, Any]:
    """Columns of metrics.jsonl by step, and the seconds of all steps but step 0.

    Args:
        keys: name of a column -> its metric.
    """
    return {
        name: {int(row["step"]): round(row[key], 6) for row in rows if key in row}
        for name, key in keys.items()
    } | {"step_s": round(sum(row.get("time/step_s", 0.0) for row in rows[1:]), 1)}


def draw(runs: Mapping[str, Any], path: Path) -> None:
    """Accuracy by step: RL with and without a warm start; distillation and its teacher."""
    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 3.6), layout="constrained")

    def line(axes: Any, name: str, color: str, label: str, start: int = 0, **style: Any) -> None:
        points = {start + int(step): value for step, value in runs[name]["accuracy"].items()}
        axes.plot(
            list(points), list(points.values()), "o-", color=color, label=label, ms=3, **style
        )

    for axes in (left, right):
        line(axes, "rl", GREY, "RL")
        axes.set(xlabel="step", ylabel="held-out accuracy, greedy", ylim=(0, 1.02))
    line(left, "sft", RED, f"{SFT_STEPS} steps of SFT")
    line(left, "rl after sft", BLUE, "then RL", SFT_STEPS)
    line(right, "distill", BLUE, "distilled from the export of RL")
    teacher = list(runs["rl"]["accuracy"].values())[-1]
    right.axhline(teacher, color=RED, ls="--", lw=1, label=f"the teacher, {teacher:.3f}")
    left.set_title("Supervised warm start, then RL")
    right.set_title("On-policy distillation")
    for axes in (left, right):
        axes.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=120)


def table(runs: Mapping[str, Any]) -> str:
    """The table of README.md."""
    lines = ["| run | steps | accuracy before | after | curve | seconds of the steps |"]
    lines.append("|---" * 6 + "|")
    for name, made in runs.items():
        curve = made["accuracy"]
        values = list(curve.values())
        text = ", ".join(f"{step}: {value:.3f}" for step, value in list(curve.items())[1:])
        lines.append(
            f"| {name} | {list(curve)[-1]} | {values[0]:.3f} | {values[-1]:.3f} | {text} "
            f"| {made['step_s']:.0f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
