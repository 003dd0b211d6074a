"""Time whole steps with all kernels for CPU, without one of them, and with none.

    .venv/bin/python -m benchmarks.kernels             one process, an hour on one core

A step is one rank's half of the step of `against_trl.py`: sync, generation, packing and update,
with one thread. Every arm makes the same step from the same weights with the same seeds. Each round
runs each arm once, in another order; the seconds are those of the processor (user), so that other
load on the machine counts little, and wall time beside them. A kernel's cost is the median over the
rounds of the step without it divided by that with all. The script prints a table.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.against_trl import make_task
from r3.config import Config
from r3.engine.layers import direct_attention, direct_experts
from r3.handover.rollouts import PackingSpec, distribute
from r3.kernels.switch import KERNELS, VARIABLE
from r3.policy.updates import train_on
from r3.rollout.scored import score_all
from r3.rollout.step import RolloutSource
from r3.rollout.task import read_task
from r3.run.build import Run, build_run, init_rank
from r3.runtime.device import free_port, prepare_environment, settle
from tests.engines import is_direct
from tests.tiny import tiny_config


def main() -> None:
    """Build both models in both types, and time their steps."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=["tiny", "middle"], required=True)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], required=True)
    parser.add_argument("--rounds", type=int, default=3)
    words = parser.parse_args()
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = str(free_port())
    os.environ["OMP_NUM_THREADS"] = "1"  # `init_device` hands it to torch
    prepare_environment()
    with tempfile.TemporaryDirectory(prefix="r3-kernels-") as name:
        config = config_of(words.model, words.dtype, Path(name))
        device, mesh = init_rank(config)
        run = build_run(config, read_task(config), device=device, mesh=mesh)
        settle()
        names = [name for name in KERNELS if name != "triton"]
        arms = {"all": names, "none": []}
        arms |= {name: [other for other in names if other != name] for name in names}
        seconds = take_turns(run, arms, words.rounds)
    title = f"{words.model} {words.dtype}"
    every = seconds["all"]
    print(f"{title}: user s / wall s of a step; times of all")
    for arm, found in seconds.items():
        ratio = statistics.median(a[0] / b[0] for a, b in zip(found, every, strict=True))
        user, wall, generation = (statistics.median(column) for column in zip(*found, strict=True))
        label = arm if arm in ("all", "none") else f"without {arm}"
        print(f"{label:28} {user:7.2f} {wall:7.2f} (generation {generation:.2f} user) {ratio:6.3f}")
    os._exit(0)


def config_of(model: str, dtype: str, folder: Path) -> Config:
    """Settings of one rank's half of a step."""
    task = make_task(model, folder)
    reward = f"{folder / 'reward.py'}:{task.reward}"
    return tiny_config(
        task.model,
        model={"dtype": dtype},
        engine={"dtype": dtype, "max_num_seqs": 64, "kv_cache_gib": task.kv_cache_gib},
        rollout={
            "prompts_per_step": task.prompts // 2 if model == "tiny" else 2,
            "group_size": task.samples,
            "max_response_tokens": task.max_tokens,
        },
        reward={"function": (reward,)},
        train={"lr": 1e-12, "micro_batch_tokens": 8192},  # the weights stay as good as the same
        eval={"path": (), "max_prompts": ()},
        log={"dir": str(folder / "run")},
    )


def take_turns(
    run: Run, arms: dict[str, list[str]], rounds: int
) -> dict[str, list[tuple[float, float, float]]]:
    """Return user and wall seconds of each arm's steps, and user seconds of generation."""
    seconds: dict[str, list[tuple[float, float, float]]] = {name: [] for name in arms}
    order = list(arms)
    one_step(run)  # takes memory from the system, and does not count
    for number in range(rounds):
        start = number * 3 % len(order)
        for name in [*order[start:], *order[:start]]:
            os.environ[VARIABLE] = ",".join(arms[name]) or "none"
            replace_again(run)
            seconds[name].append(one_step(run))
            print(f"round {number + 1} of {rounds} {name} {seconds[name][-1]}", flush=True)
    return seconds


def replace_again(run: Run) -> None:
    """Let an engine's layers choose their kernels again."""
    (modules,) = run.engine.llm.collective_rpc(
        lambda worker: list(worker.model_runner.get_model().modules())
    )
    ways: dict[str, Callable[[Any], Any]] = {"Attention": direct_attention}
    for module in modules:
        if is_direct(module):
            vars(module).pop("forward")
            module.forward = ways.get(type(module).__name__, direct_experts)(module)


def one_step(run: Run) -> tuple[float, float, float]:
    """Make the step of `train.py`, always the first; return user and wall seconds."""
    config, task, policy = run.config, run.task, run.policy
    source = RolloutSource(run.engine, task, config, run.mesh)
    began, wall = os.times().user, time.perf_counter()
    run.sync(0)
    synced = os.times().user
    collected = source.collect(1)
    generated = os.times().user - synced
    scored = score_all(collected.rollouts, collected.rewards, config)
    run.release_engine()
    spec = PackingSpec.of_step(config, policy.replay.layers, 0)
    batches, _ = distribute(scored, run.mesh, task.shape, spec)
    rewards = collected.rewards
    of_step = (rewards.rewards_R, rewards.baselines_R, config, rewards.units_R)
    train_on(policy, batches, *of_step, step=1, report=lambda _: None)
    return os.times().user - began, time.perf_counter() - wall, generated


if __name__ == "__main__":
    main()
