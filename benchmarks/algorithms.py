"""Train `tiny-moe` for ten steps with every advantage, loss and correction.

    .venv/bin/python benchmarks/algorithms.py                    all, one after the other
    .venv/bin/python benchmarks/algorithms.py --only gspo pg     some; the others keep their figures
    .venv/bin/python benchmarks/algorithms.py --table            rewrite the table from the json

The benchmark shows whether each of them changes the model. It uses one rank, a float32 policy and a
bfloat16 engine, so that there is a mismatch to correct. Each step has two updates, so that the
second one has ratios other than 1. Every figure is a row of a run's own metrics.jsonl, or the mean
of its column. The script writes results/algorithms.json and the table between the marks in
README.md.
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
from pathlib import Path
from statistics import fmean
from typing import Any

from learning_curve import ENVIRONMENT, PACKAGES, ROOT, hardware, source

RESULTS = ROOT / "benchmarks" / "results" / "algorithms.json"
README = ROOT / "benchmarks" / "README.md"
MARKS = ("<!-- algorithms: made by algorithms.py -->", "<!-- algorithms: end -->")
COMMON = (
    *(
        "--model.path",
        "r3/assets/tiny-moe",
        "--model.dtype",
        "float32",
        "--model.fp32_head",
        "false",
    ),
    *("--parallel.ep", "1", "--engine.dtype", "bfloat16"),
    *(
        "--eval.every",
        "0",
        "--replay.shadow_every",
        "0",
        "--log.rollouts_every",
        "0",
        "--log.tensorboard",
        "False",
    ),
    *("--checkpoint.export", "False"),
)
ALGORITHMS: dict[str, str] = {
    # advantages, with ppo_clip
    "grpo": "",
    "dr_grpo": "--algo.advantage dr_grpo",
    "rloo": "--algo.advantage rloo",
    "reinforce_pp": "--algo.advantage reinforce_pp",
    "reinforce_pp_baseline": "--algo.advantage reinforce_pp_baseline",
    # losses, with grpo
    "ppo_clip, dual": "--algo.clip_dual 3",
    "gspo": "--algo.loss gspo --algo.clip_low 3e-4 --algo.clip_high 4e-4"
    " --algo.aggregation sequence",
    "cispo": "--algo.loss cispo --algo.clip_low 1 --algo.clip_high 4",
    "minirl": "--algo.loss minirl --algo.clip_high 0.27 --algo.advantage dr_grpo"
    " --algo.aggregation constant",
    "pg": "--algo.loss pg --train.updates_per_step 1",
    # corrections, with grpo and ppo_clip
    "token_tis": "--algo.correction token_tis",
    "sequence_tis": "--algo.correction sequence_tis",
    "token_mis": "--algo.correction token_mis",
    "sequence_mis": "--algo.correction sequence_mis",
    "geometric_mask": "--algo.correction geometric_mask",
    "icepop": "--algo.correction icepop",
    "bypass": "--algo.correction bypass",
    # the rest
    "sequence mean": "--algo.aggregation sequence",
    "constant length": "--algo.aggregation constant --algo.advantage dr_grpo",
    "KL in loss": "--algo.kl_coef 0.05 --algo.kl_estimator k3",
    "KL in reward": "--algo.kl_coef 0.05 --algo.kl_in reward --algo.kl_estimator k1",
    "overlong": "--algo.overlong_buffer 8 --algo.overlong_filter True",
}

Row = Mapping[str, float]


def main() -> None:
    """Run the chosen cases, keep the figures of the others and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS), metavar="NAME"
    )
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument(
        "--table", action="store_true", help="write the table from the json, run nothing"
    )
    args = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"algorithms": {}}
    if not args.table:
        results |= {
            "what": f"preset `tiny`, one rank, bfloat16 engine, {args.steps} steps of two updates",
            "made_by": "python benchmarks/algorithms.py",
            "date": date.today().isoformat(),
            "source": source(),
            "hardware": hardware(),
            "versions": {
                "python": platform.python_version(),
                **{name: version(name) for name in PACKAGES},
            },
        }
        for name in args.only:
            with tempfile.TemporaryDirectory(prefix="r3-algorithms-") as folder:
                results["algorithms"][name] = run(
                    Path(folder) / "run", args.steps, ALGORITHMS[name].split()
                )
            # Write after each case, so that an interrupted benchmark loses only the current one.
            RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
            print(row_of(name, results["algorithms"][name]), flush=True)
    before, rest = README.read_text().split(MARKS[0])
    README.write_text(
        before
        + MARKS[0]
        + "\n\n"
        + table(results["algorithms"])
        + "\n\n"
        + MARKS[1]
        + rest.split(MARKS[1])[1]
    )


def run(folder: Path, steps: int, flags: Sequence[str]) -> dict[str, Any]:
    """Figures of one run."""
    arguments = [
        "--standalone",
        "--nproc_per_node",
        "1",
        "train.py",
        "tiny",
        "--train.steps",
        str(steps),
        *COMMON,
    ]
    if "--train.updates_per_step" not in flags:
        arguments += ["--train.updates_per_step", "2"]
    arguments += flags
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
    command = shlex.join(["torchrun", *arguments])
    if done.returncode:
        sys.exit(f"{done.stdout}\n{command}\nended with exit code {done.returncode}")
    rows: list[Row] = [
        json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]
    accuracy = [row["eval/heldout/accuracy"] for row in rows if "eval/heldout/accuracy" in row]
    trained = [row for row in rows if row["step"] > 0]

    def mean(key: str) -> float | None:
        values = [row[key] for row in trained if key in row]
        return fmean(values) if values else None

    return {
        "command": command,
        "wall_s": round(wall, 1),
        "accuracy_before": accuracy[0],
        "accuracy_after": accuracy[-1],
        "reward": [round(row["reward/mean"], 4) for row in trained],
        "k3": mean("mismatch/k3"),
        "clip_frac": mean("loss/clip_frac"),
        "cut_frac": mean("correction/cut_frac"),
        "weight_mean": mean("correction/weight_mean"),
        "kl_ref_last": trained[-1].get("loss/kl_ref"),
        "grad_norm": mean("optim/grad_norm"),
    }


def row_of(name: str, made: Mapping[str, Any]) -> str:
    """One line of the table."""

    def share(key: str) -> str:
        value = made[key]
        return "" if value is None else f"{100 * value:.2g} %"

    start, end = made["reward"][0], fmean(made["reward"][-3:])
    flags = ALGORITHMS[name].replace("--algo.", "").replace("--train.", "") or "(defaults)"
    return (
        f"| {name} | `{flags}` | {made['accuracy_before']:.3f} | {made['accuracy_after']:.3f} | "
        f"{start:.2f} | {end:.2f} "
        f"| {made['k3']:.1e} | {share('clip_frac')} | {share('cut_frac')} |"
    )


def table(algorithms: Mapping[str, Mapping[str, Any]]) -> str:
    """The table of README.md."""
    head = (
        "| algorithm | flags | before | after | reward, step 1 | last 3 | k3 | out of bounds | cut "
        "|"
    )
    lines = [row_of(name, algorithms[name]) for name in ALGORITHMS if name in algorithms]
    return "\n".join([head, "|---" * 9 + "|", *lines])


if __name__ == "__main__":
    main()
