"""Time the start of a run on two CPU ranks: forked from one process, or each a program.

    .venv/bin/python -m benchmarks.start      two minutes on 2 idle cores

The preset is `tiny`. All arms check the command line; the time runs until the policy is built.

    forked      `launch/local.sh`: the launcher imports what ranks need while another process checks
    programs    the same check, then ranks that import for themselves, as on GPUs

Rounds take turns. The script writes start.json to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.learning_curve import PACKAGES, ROOT, hardware, made_by, source

RANKS = ("--standalone", "--nproc_per_node", "2", "train.py", "tiny", "--train.steps", "1")
QUIET = ("--eval.path", "", "--eval.every", "0", "--checkpoint.export", "false")
ARMS: dict[str, tuple[tuple[str, ...], ...]] = {
    "forked": (("launch/ranks.py", "--check", "--preload", *RANKS),),
    "programs": (
        ("train.py", "tiny", "--check", "--world-size", "2"),
        ("launch/ranks.py", *RANKS),
    ),
}
BUILT = "building the policy ..."  # what rank 0 prints then


def main() -> None:
    """Start both in turns and write the seconds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    words = parser.parse_args()
    load = os.getloadavg()[0]
    found: dict[str, list[tuple[float, float]]] = {arm: [] for arm in ARMS}
    for number in range(-1, words.rounds):  # the first one fills the system's caches
        for arm in ARMS if number % 2 else reversed(ARMS):
            timing = start(ARMS[arm], ROOT)
            if number >= 0:
                found[arm].append(timing)
                print(f"{arm:9} {timing[0]:5.1f} s, {timing[1]:5.1f} s of processor", flush=True)
    arms: dict[str, Any] = {}
    for arm, timings in found.items():
        seconds, cpu = (
            [round(value, 2) for value in values] for values in zip(*timings, strict=True)
        )
        arms[arm] = {
            "seconds": round(statistics.median(seconds), 2),
            "range": [min(seconds), max(seconds)],
            "processor_seconds_with_one_step": round(statistics.median(cpu), 1),
            "rounds": seconds,
        }
    result = {
        "what": "seconds from the command until the policy is built, preset tiny, two CPU ranks",
        "made_by": made_by("python -m benchmarks.start"),
        "date": date.today().isoformat(),
        "source": source(),
        "hardware": hardware(),
        "versions": {name: version(name) for name in PACKAGES},
        "load_average_before": round(load, 1),
        **arms,
        "ratio": round(arms["programs"]["seconds"] / arms["forked"]["seconds"], 2),
    }
    print(f"forked ranks start {result['ratio']} times as fast")
    words.out.mkdir(parents=True, exist_ok=True)
    (words.out / "start.json").write_text(json.dumps(result, indent=1) + "\n")


def start(commands: tuple[tuple[str, ...], ...], folder: Path) -> tuple[float, float]:
    """Run the commands of an arm, programs for Python, one after the other in a clone.

    Returns:
        Seconds until the policy is built, and processor seconds of everything.
    """

    def cpu() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    passive = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", "OMP_NUM_THREADS": "1"}
    built = float("nan")
    with tempfile.TemporaryDirectory(prefix="r3-start-") as made:
        began, used = time.perf_counter(), cpu()
        for command in commands:
            flags = (*QUIET, "--log.dir", f"{made}/run")
            process = subprocess.Popen(
                [sys.executable, *command, *flags],
                cwd=folder,
                env=os.environ | passive,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            said = ""
            for line in process.stdout or ():
                said += line
                if line.startswith(BUILT) and math.isnan(built):
                    built = time.perf_counter() - began
            if process.wait(timeout=300):
                sys.exit(f"{said}\n{command}\nended with exit code {process.returncode}")
        if math.isnan(built):
            sys.exit(f"{said}\n{folder} cannot be timed: no line begins with {BUILT}")
        return built, cpu() - used


if __name__ == "__main__":
    main()
