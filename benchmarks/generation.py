"""Time generation: R3 with and without captured routes, and vLLM alone on the same prompts.

    .venv/bin/python -m benchmarks.generation        one process, five minutes on one core

Each round runs every arm once, in random order, on the same 64 prompts. A ratio is the median over
the rounds of the two speeds of one round, in sampled tokens per second of the one thread's
processor time, so other load on the machine affects both sides alike. The script writes
generation.json to benchmarks/results/.

All arms use one engine, which captures routes in the last arm only. Two engines without capture
differed by up to 1 %, a third of what capture may cost.

vLLM alone runs norms, experts and attention in its own way (`r3/backends/cpu/engine.py`).

    vllm plain   `LLM.generate` as a user would call it: no seeds, no log-probabilities
    vllm         `LLM.generate` with what R3 asks for: a seed per response, log-probabilities
    r3 off       R3's sampler without capture
    r3           R3's sampler with capture; responses, log-probabilities and routes are collected
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from benchmarks.against_trl import Task, make_task
from benchmarks.learning_curve import PACKAGES, ROOT, hardware, made_by, source
from r3.config import ReplayConfig
from r3.data.prompts import prompts_from
from r3.engine import Engine, sampling_seed
from r3.rollout import read_task
from r3.runtime.device import Device, free_port, has_gpu, init_device, settle
from r3.tools.proof import sample_single_turn
from r3.types import Prompt
from tests.engines import engine_from_disk, routers_of
from tests.tiny import tiny_config

SAMPLES = 64
ROUNDS = {"tiny": 200, "middle": 10}  # a round of the embedded model takes half a second
BARS = {  # name -> (numerator, denominator, target for the ratio of their speeds)
    "r3 / vllm": ("r3", "vllm", 0.95),
    "r3 / vllm plain": ("r3", "vllm plain", 0.95),
    "r3 / r3 off": ("r3", "r3 off", 1 / 1.03),
}


@contextmanager
def without_capture(engine: Engine) -> Iterator[None]:
    """Inside, an engine runs as one that was built to capture no routes."""
    routes = engine._routes
    assert routes is not None, "this engine captures no routes"
    scheduler: Any = routes._scheduler
    pool = scheduler.kv_cache_manager.block_pool
    wrapped = [(pool, "get_new_blocks"), (scheduler, "_free_request")]
    wrapped.append((scheduler, "_preempt_request"))
    hooks = [vars(owner).pop(name) for owner, name in wrapped]
    routers = routers_of(engine)
    captures = [router.capture_fn for router in routers.values()]
    for router in routers.values():
        router.set_capture_fn(None)
    engine.capture, engine._routes = False, None
    try:
        yield
    finally:
        engine.capture, engine._routes = True, routes
        for router, capture in zip(routers.values(), captures, strict=True):
            router.set_capture_fn(capture)
        for (owner, name), hook in zip(wrapped, hooks, strict=True):
            setattr(owner, name, hook)


def main() -> None:
    """Run both models and write the ratios."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, help="instead of those of each model")
    parser.add_argument("--models", nargs="+", choices=ROUNDS, default=list(ROUNDS))
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = str(free_port())
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # `init_device` hands it to torch
    device = init_device()
    results = {}
    with tempfile.TemporaryDirectory(prefix="r3-generation-") as folder:
        for name in args.models:
            results[name] = measure(name, Path(folder), args.rounds or ROUNDS[name], device)
    result = {
        "what": "sampled tokens per second, one engine on one core, 64 requests at once",
        "made_by": made_by("python -m benchmarks.generation"),
        "date": date.today().isoformat(),
        "source": source(),
        "hardware": hardware(),
        "versions": {name: version(name) for name in PACKAGES},
        "models": results,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "generation.json").write_text(json.dumps(result, indent=1) + "\n")
    sys.stdout.flush()
    os._exit(0)  # the engines' process groups need no orderly end


def measure(name: str, folder: Path, rounds: int, device: Device) -> dict[str, Any]:
    """Measure all arms with one model."""
    task = make_task(name, folder)
    batch, engine = engine_of(task, device, "r3")
    arms: dict[str, Callable[[int], int]] = {
        "vllm plain": lambda turn: in_vllm(engine, batch, task.max_tokens, turn, alone=True),
        "vllm": lambda turn: in_vllm(engine, batch, task.max_tokens, turn, alone=False),
        "r3 off": lambda turn: in_r3(engine, batch, task.max_tokens, turn),
        "r3": lambda turn: in_r3(engine, batch, task.max_tokens, turn),
    }
    settle()  # as a run does
    load = os.getloadavg()[0]
    speeds: dict[str, list[float]] = {arm: [] for arm in arms}
    for number in range(-1, rounds):
        # At random: an arm is slower after one that runs other code. In turn, each arm would
        # always follow the same one.
        for arm in random.Random(number).sample(list(arms), len(arms)):
            engine.reset_cache()  # every arm computes the prompts
            with nullcontext() if arm == "r3" else without_capture(engine):
                began = time.process_time()
                tokens = arms[arm](number)
                took = time.process_time() - began
            if number >= 0:
                speeds[arm].append(tokens / took)
    ratios = {}
    for ratio, (over, under, bar) in BARS.items():
        values = sorted(a / b for a, b in zip(speeds[over], speeds[under], strict=True))
        middle = statistics.median(values)
        ratios[ratio] = {
            "median": round(middle, 3),
            "range": [round(values[0], 3), round(values[-1], 3)],
            "of_fastest": round(fastest(speeds[over]) / fastest(speeds[under]), 3),
            "bar": round(bar, 3),
            "reached": middle >= bar,
        }
        summary = ratios[ratio]
        print(
            f"{name:7} {ratio:16} {middle:.3f} {summary['range']}, of the fastest rounds "
            f"{summary['of_fastest']:.3f}, bar {bar:.3f}"
        )
    medians = {arm: round(statistics.median(values), 1) for arm, values in speeds.items()}
    return {
        "load_average_before": round(load, 1),
        "tokens_per_s": medians,
        "ratios": ratios,
        "rounds": {arm: [round(value, 1) for value in values] for arm, values in speeds.items()},
    }


def engine_of(
    task: Task, device: Device, mode: Literal["r3", "off"]
) -> tuple[list[Prompt], Engine]:
    """Return the prompts of a task, one for each response, and an engine with a replay mode."""
    config = tiny_config(
        task.model,
        engine={"kv_cache_gib": 0.5, "max_num_seqs": SAMPLES, "max_model_len": 320},
        rollout={"max_response_tokens": task.max_tokens},
    )
    read = read_task(config)
    prompts = prompts_from(read.prompts, seed=0, start=0, count=task.prompts)
    batch = [prompt for prompt in prompts for _ in range(SAMPLES // len(prompts))]
    config = replace(config, replay=ReplayConfig(mode=mode))
    return batch, engine_from_disk(config, device, read)


def fastest(speeds: list[float]) -> float:
    """Mean speed of the fastest eighth of the rounds, which other programs disturbed least."""
    count = -(-len(speeds) // 8)
    return statistics.fmean(sorted(speeds)[-count:])


def in_vllm(engine: Engine, prompts: list[Prompt], limit: int, turn: int, *, alone: bool) -> int:
    """Sample with `LLM.generate`; return the number of sampled tokens."""
    from vllm import SamplingParams

    asked: dict[str, Any] = {"temperature": 1.0, "max_tokens": limit, "detokenize": False}
    settings = [
        SamplingParams(**asked)
        if alone
        else SamplingParams(**asked, seed=seed, logprobs=0, flat_logprobs=True)
        for seed in seeds(prompts, turn)
    ]
    # On a GPU, R3 replaces none of vLLM's layers.
    with nullcontext() if has_gpu() else own_norms(engine):
        outputs = engine.llm.generate(
            [{"prompt_token_ids": list(prompt.tokens_T)} for prompt in prompts],
            settings,
            use_tqdm=False,
        )
    return sum(len(output.outputs[0].token_ids) for output in outputs)


@contextmanager
def own_norms(engine: Engine) -> Iterator[None]:
    """Inside, norms are computed as vLLM does without R3 (`normalise_in_one_call`)."""
    from vllm.model_executor.layers.layernorm import RMSNorm

    (modules,) = engine.llm.collective_rpc(
        lambda worker: list(worker.model_runner.get_model().modules())
    )
    norms = [module for module in modules if isinstance(module, RMSNorm)]
    replaced = [norm._forward_method for norm in norms]
    for norm in norms:
        norm._forward_method = norm.forward_native
    try:
        yield
    finally:
        for norm, method in zip(norms, replaced, strict=True):
            norm._forward_method = method


def in_r3(engine: Engine, prompts: list[Prompt], limit: int, turn: int) -> int:
    """Sample as R3 does; return the number of sampled tokens."""
    rollouts = sample_single_turn(
        engine, prompts, seeds=seeds(prompts, turn), policy_version=0, max_tokens=limit
    )
    assert all(bool(rollout.routed_experts.size) == engine.capture for rollout in rollouts)
    return sum(rollout.num_response_tokens for rollout in rollouts)


def seeds(prompts: list[Prompt], turn: int) -> list[int]:
    """Return a seed for each response, the same in all arms of a round."""
    return [sampling_seed(0, turn + 1, prompt.id, index) for index, prompt in enumerate(prompts)]


if __name__ == "__main__":
    main()
