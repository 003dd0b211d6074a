"""Time whole training steps of R3 and of TRL's GRPOTrainer on the same task.

    .venv/bin/python -m benchmarks.against_trl      15 minutes a round on two idle cores

Both train the same checkpoint in the same precision on the same prompts with the same reward, as
many samples and tokens, and one update per step. Each uses both cores in the way that is fastest
for it: R3 two ranks of one thread, TRL one process of two threads. TRL generates with transformers:
its vLLM mode asks for the CUDA build of vLLM. Runs of the two take turns. The first step of every
run, in which memory is allocated and kernels are chosen, does not count.

TRL gets an environment of its own (`--trl-env`, 2 GB, made at the first call). The script writes
against_trl.json and against_trl.png to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import venv
from dataclasses import asdict, dataclass, replace
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.learning_curve import PACKAGES, ROOT, hardware, made_by, source
from benchmarks.train_step import MIDDLE
from r3 import assets

TRL = "1.16.0"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"}

REWARD = '''
def final_number(response, prompt):
    """1 if the last number of the response is that of the reference answer."""
    import re

    def last(text):
        found = re.findall(r"-?\\d+", text)
        return found[-1] if found else None

    return float(last(response) == last(prompt.answer))


def letters(response, prompt):
    """Differs between samples of a random model."""
    return float(len(set(response)) % 7)
'''


@dataclass(frozen=True, kw_only=True)
class Task:
    """What both trainers do.

    Attributes:
        model: folder of the checkpoint.
        prompts, samples: per step.
        max_tokens: of a response.
        reward: name of the function in REWARD.
        steps: of each run, the first of which does not count.
        lr: learning rate.
        trl_batch: samples per forward pass of TRL; the fastest of those tried.
        dtype: of weights and computation. R3 keeps float32 copies of bfloat16 weights for its
            optimizer; TRL has none, which is faster for it than autocast of float32 weights.
        kv_cache_gib: of an engine of R3; all its samples fit. More costs time, because its memory
            is freed and taken in every step.
    """

    model: str
    prompts: int
    samples: int
    max_tokens: int
    reward: str
    steps: int
    lr: float
    trl_batch: int
    kv_cache_gib: float
    dtype: str = "float32"


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One run, means of its steps without the first.

    Attributes:
        step_s: seconds.
        cpu_s: processor seconds of the whole run, start included.
        tokens: of a response.
        phases: seconds by phase, R3 only.
    """

    step_s: list[float]
    cpu_s: float
    tokens: float
    phases: dict[str, float]


def main() -> None:
    """Run both in turns on both tasks; write the ratios."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="of each run, instead of the task's")
    parser.add_argument("--tasks", nargs="+", default=["middle", "middle-bfloat16", "tiny"])
    parser.add_argument("--trl-env", type=Path, default=ROOT / "runs" / "trl-env")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    python = trl_python(args.trl_env.resolve())
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="r3-trl-") as name:
        folder = Path(name)
        for task_name in args.tasks:
            task = make_task(task_name, folder)
            if args.steps:
                task = replace(task, steps=args.steps)
            load = os.getloadavg()[0]
            turns: dict[str, list[Timing]] = {"r3": [], "trl": []}
            for number in range(args.rounds):
                for arm in ("r3", "trl") if number % 2 == 0 else ("trl", "r3"):
                    run = in_r3 if arm == "r3" else in_trl
                    timing = run(task, folder / f"{task_name}-{arm}-{number}", python)
                    print(f"{task_name} round {number + 1} {arm}: {timing}", flush=True)
                    turns[arm].append(timing)
            results[task_name] = summary(task, turns, load)
            print(f"{task_name}: {results[task_name]['ratio']}")
    write(args.out, results)


def trl_python(folder: Path) -> Path:
    """Return the interpreter of TRL's environment; make the environment if it is missing."""
    python, stamp = folder / "bin" / "python", folder / f"trl-{TRL}"
    if not stamp.exists():
        venv.create(folder, with_pip=True, clear=True)
        pip = [python, "-m", "pip", "install", "-q"]
        # Retries would take minutes where that index cannot be reached and another one has torch.
        index = ["--extra-index-url", TORCH_INDEX, "--retries", "0"]
        subprocess.run([*pip, *index, f"torch=={version('torch')}"], check=True)
        others = [f"trl=={TRL}", f"transformers=={version('transformers')}"]
        subprocess.run([*pip, *others], check=True)
        stamp.touch()
    return python


def make_task(name: str, folder: Path) -> Task:
    """Return a task by name; write its checkpoint and its reward to a folder."""
    (folder / "reward.py").write_text(REWARD)
    if name == "tiny":
        return Task(
            model=str(assets.TINY_MOE),
            prompts=16,
            samples=8,
            max_tokens=40,
            reward="final_number",
            steps=9,
            lr=5e-4,
            trl_batch=128,
            kv_cache_gib=0.0625,
        )
    assert name in ("middle", "middle-bfloat16"), name
    import torch
    from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**MIDDLE))
    path = folder / "middle"
    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(assets.TINY_MOE).save_pretrained(path)
    return Task(
        model=str(path),
        prompts=8,
        samples=8,
        max_tokens=256,
        reward="letters",
        steps=6,
        lr=1e-5,
        trl_batch=32,
        kv_cache_gib=0.25,
        dtype="bfloat16" if name.endswith("bfloat16") else "float32",
    )


def in_r3(
    task: Task,
    folder: Path,
    _python: Path | None = None,
    *,
    ranks: int = 2,
    changes: dict[str, Any] | None = None,
) -> Timing:
    """Train with R3; `changes` are other settings than those of the comparison."""
    settings: dict[str, Any] = {
        "model.path": task.model,
        "model.dtype": task.dtype,
        "engine.dtype": task.dtype,
        "rollout.prompts_per_step": task.prompts,
        "rollout.group_size": task.samples,
        "rollout.max_response_tokens": task.max_tokens,
        "reward.function": f"{folder.parent / 'reward.py'}:{task.reward}",
        "train.steps": task.steps,
        "train.lr": task.lr,
        "train.micro_batch_tokens": 8192,
        "parallel.ep": 1,
        "replay.shadow_frac": 0.04,  # the default, which the tiny presets raise
        "engine.max_num_seqs": task.prompts * task.samples,
        "engine.kv_cache_gib": task.kv_cache_gib,
        "eval.every": 0,
        "eval.path": "",
        "checkpoint.every": 0,
        "checkpoint.export": "false",
        "log.dir": folder,
    } | (changes or {})
    flags = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    cpu_s = call(
        [sys.executable, *launch, "train.py", "tiny-smoke", *flags], {"OMP_NUM_THREADS": "1"}
    )
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["step"] > 1]
    assert len(rows) == task.steps - 1, f"{len(rows)} rows after the first step"
    names = [name for name in rows[0] if name.startswith("time/") and name.endswith("_s")]
    return Timing(
        step_s=[row["time/step_s"] for row in rows],
        cpu_s=cpu_s,
        tokens=statistics.fmean(row["rollout/response_tokens_mean"] for row in rows),
        phases={
            name: round(statistics.fmean(row.get(name, 0.0) for row in rows), 3) for name in names
        },
    )


def in_trl(task: Task, folder: Path, python: Path) -> Timing:
    """Train with TRL."""
    folder.mkdir()
    data = {
        "data": str(assets.WORD_PROBLEMS_TRAIN),
        "reward_file": str(folder.parent / "reward.py"),
    }
    settings = json.dumps({**asdict(task), **data, "out": str(folder)})
    cpu_s = call(
        [str(python), str(ROOT / "benchmarks" / "trl_steps.py"), settings], {"OMP_NUM_THREADS": "2"}
    )
    steps = json.loads((folder / "steps.json").read_text())
    return Timing(
        step_s=steps["seconds"][1:],
        cpu_s=cpu_s,
        tokens=statistics.fmean(steps["tokens"][1:]),
        phases={},
    )


def call(command: list[str], environment: dict[str, str]) -> float:
    """Run a command, print its output if it fails, and return its processor seconds."""

    def cpu() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    began = cpu()
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **PASSIVE, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1800,
    )
    if done.returncode:
        sys.exit(f"{done.stdout}\n{command}\nended with exit code {done.returncode}")
    return cpu() - began


def summary(task: Task, turns: dict[str, list[Timing]], load: float) -> dict[str, Any]:
    """Return medians, spread, and the ratio per step and per sampled token."""
    arms: dict[str, Any] = {}
    for arm, timings in turns.items():
        steps = sorted(step for timing in timings for step in timing.step_s)
        tokens = statistics.fmean(timing.tokens for timing in timings)
        median = statistics.median(steps)
        arms[arm] = {
            "step_s": round(median, 2),
            "range": [round(steps[0], 2), round(steps[-1], 2)],
            "tokens": round(tokens, 1),
            "ms_per_token": round(1000 * median / (tokens * task.prompts * task.samples), 3),
            "runs": [asdict(timing) for timing in timings],
        }
    return {
        "task": asdict(task) | {"model": Path(task.model).name},
        "load_average_before": round(load, 1),
        **arms,
        "ratio": round(arms["trl"]["step_s"] / arms["r3"]["step_s"], 2),
        "ratio_per_token": round(arms["trl"]["ms_per_token"] / arms["r3"]["ms_per_token"], 2),
    }


def write(out: Path, results: dict[str, Any]) -> None:
    """Write the figures and their picture."""
    result = {
        "what": "seconds of a training step, R3 and TRL's GRPOTrainer",
        "made_by": made_by("python -m benchmarks.against_trl"),
        "date": date.today().isoformat(),
        "source": source(),
        "hardware": hardware(),
        "versions": {name: version(name) for name in PACKAGES} | {"trl": TRL},
        "tasks": results,
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "against_trl.json").write_text(json.dumps(result, indent=1) + "\n")
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(results), figsize=(3.2 * len(results), 3), squeeze=False)
    for ax, (name, task) in zip(axes[0], results.items(), strict=True):
        medians = [task[arm]["step_s"] for arm in ("r3", "trl")]
        bounds = [
            [abs(task[arm]["range"][side] - task[arm]["step_s"]) for arm in ("r3", "trl")]
            for side in (0, 1)
        ]
        ax.bar(["R3", f"TRL {TRL}"], medians, yerr=bounds, capsize=4, color=["#1f77b4", "#999999"])
        ax.set_title(f"{name}: {task['ratio']} times", fontsize=10)
        ax.set_ylabel("seconds per step (median, range)")
    figure.tight_layout()
    figure.savefig(out / "against_trl.png", dpi=120)


if __name__ == "__main__":
    main()
