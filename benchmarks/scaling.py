"""Time how R3 scales: ranks, and what training costs as a task grows.

    .venv/bin/python -m benchmarks.scaling          an hour on two idle cores

Ranks: the same steps of the 52 M model of `against_trl.py` on one rank and on two, one thread each;
steps of half the prompts on one rank that has the machine to itself; and steps of twice the prompts
on two ranks, so that a rank has as much to do as the single one. Besides, bare products, vLLM
alone, and the kernels of an engine's step alone, in one process and in two. Layouts: steps on two
ranks, with an engine for each rank or one for both, and with all experts on each rank or divided
over both. Cost: forward and backward of one step in one process, while one size grows and the
others stay. An exponent is the slope of log(seconds) over log(size): 1 is linear, 0 is flat. Sizes
are run in turns, and each takes its fastest round. The script writes scaling.json to
benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.against_trl import Task, Timing, in_r3, make_task
from benchmarks.learning_curve import PACKAGES, ROOT, hardware, made_by, source
from benchmarks.train_step import (
    MODEL,
    expect_bare_products,
    pack,
    products,
    recorded,
    take_turns,
)
from r3.config import Config, ModelConfig, TrainConfig
from r3.models.shape import ModelShape
from r3.policy import Policy
from r3.runtime.device import Device, free_port, init_device
from r3.runtime.mesh import Mesh, build_mesh


@dataclass(frozen=True, kw_only=True)
class Growth:
    """One size that grows.

    Attributes:
        sizes: its values.
        model: changes of the model for a value.
        lengths: lengths of the sequences for a value.
        expected: the exponent that the arithmetic gives.
    """

    sizes: tuple[int, ...]
    model: Callable[[int], dict[str, int]] = lambda _size: {}
    lengths: Callable[[int], list[int]] = lambda _size: [128] * 32
    expected: str


GROWTHS = {
    "tokens, more responses (group size)": Growth(
        sizes=(16, 32, 64, 128), lengths=lambda count: [128] * count, expected="1"
    ),
    "length of responses, tokens in all alike": Growth(
        sizes=(64, 128, 256, 512, 1024),
        lengths=lambda length: [length] * (8192 // length),
        expected="0, and more as attention begins to count",
    ),
    "experts, 8 active of each": Growth(
        sizes=(16, 32, 64, 128), model=lambda count: {"num_experts": count}, expected="0"
    ),
    "layers": Growth(
        sizes=(1, 2, 4, 8), model=lambda count: {"num_hidden_layers": count}, expected="up to 1"
    ),
}


def main() -> None:
    """Run both parts and write the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parts", nargs="+", default=["ranks", "layouts", "cost"])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    words = parser.parse_args()
    load = os.getloadavg()[0]
    found: dict[str, Any] = {}
    if "ranks" in words.parts:
        found["ranks"] = over_ranks(words.rounds)
    if "layouts" in words.parts:
        found["layouts"] = over_layouts(words.rounds)
    if "cost" in words.parts:
        found["cost"] = over_sizes(words.rounds)
    result = {
        "what": "how steps scale with ranks, and training with sizes",
        "made_by": made_by("python -m benchmarks.scaling"),
        "date": date.today().isoformat(),
        "source": source(),
        "hardware": hardware() | {"load_average_before": round(load, 1)},
        "versions": {name: version(name) for name in PACKAGES},
        **found,
    }
    words.out.mkdir(parents=True, exist_ok=True)
    (words.out / "scaling.json").write_text(json.dumps(result, indent=1) + "\n")
    sys.stdout.flush()
    os._exit(0)


def over_ranks(rounds: int) -> dict[str, Any]:
    """Return seconds of steps on one and on two ranks, of half and of twice a step, and ratios."""
    timings: dict[str, list[Timing]] = {"1": [], "2": [], "half": [], "twice": []}
    with tempfile.TemporaryDirectory(prefix="r3-scaling-") as name:
        folder = Path(name)
        task = make_task("middle", folder)
        half, twice = (replace(task, prompts=int(task.prompts * part)) for part in (0.5, 2))
        runs = {"1": (task, 1), "2": (task, 2), "half": (half, 1), "twice": (twice, 2)}
        for number in range(rounds):
            for arm in random.sample(sorted(runs), len(runs)):
                work, ranks = runs[arm]
                timing = in_r3(work, folder / f"{arm}-{number}", ranks=ranks)
                timings[arm].append(timing)
                print(f"round {number + 1} of {rounds}, {arm}: {timing}", flush=True)
    steps = {arm: [s for timing in found for s in timing.step_s] for arm, found in timings.items()}

    def scaling(arm: str, phase: str = "") -> float:
        """How many times the seconds of `arm` one rank takes for the step."""
        one, other = (
            statistics.median(timing.phases[f"time/{phase}_s"] for timing in timings[each])
            if phase
            else statistics.median(steps[each])
            for each in ("1", arm)
        )
        return round(one / other, 2)

    # Random models stop where they like.
    tokens = {arm: statistics.fmean(timing.tokens for timing in timings[arm]) for arm in timings}

    def throughput(arm: str) -> float:
        """Sampled tokens per second."""
        sampled = tokens[arm] * task.samples * runs[arm][0].prompts
        return sampled / statistics.median(steps[arm])

    # A step has the same tokens on any number of ranks, but for rounding; steps differ in tokens.
    ratio = statistics.median(one / two for one, two in zip(steps["1"], steps["2"], strict=True))
    print(f"one rank takes {ratio:.2f} times the seconds of two (bar 1.7)")
    print(f"and {scaling('half'):.2f} times those of half a step on one")
    of_twice = throughput("twice") / throughput("1")
    print(f"twice the responses on two ranks: {of_twice:.2f} times the tokens per second of one")
    bare, bare_alone = of_machine(time_products, rounds)
    print(f"half of the products take {bare:.2f} times less ({bare_alone:.2f} if alone)")
    sampling, sampling_alone = of_machine(time_vllm, rounds)
    print(f"half of the prompts, vLLM alone: {sampling:.2f} times less ({sampling_alone:.2f})")
    kernels, kernels_alone = of_machine(time_kernels, rounds)
    print(f"half of the requests, kernels alone: {kernels:.2f} times less ({kernels_alone:.2f})")
    generate = statistics.median(timing.phases["time/generate_s"] for timing in timings["1"])
    whole = statistics.median(steps["1"])

    def limit(of_generation: float) -> float:
        """How a step scales whose generation does so, and all else like bare products."""
        return whole / ((whole - generate) / bare + generate / of_generation)

    print(f"a step that scales like products and vLLM: {limit(sampling):.2f}")
    print(f"a step that scales like products and kernels: {limit(kernels):.2f}")
    return {
        "step_s": {arm: [round(value, 2) for value in steps[arm]] for arm in steps},
        "tokens_of_a_response": {arm: round(value, 1) for arm, value in tokens.items()},
        "phases_s": {arm: [timing.phases for timing in found] for arm, found in timings.items()},
        "ratio": round(ratio, 2),
        "ratio_of_medians": scaling("2"),
        "ratio_of_training": scaling("2", "train"),
        "ratio_of_generation": scaling("2", "generate"),
        "half": {
            "step": scaling("half"),
            "training": scaling("half", "train"),
            "generation": scaling("half", "generate"),
        },
        "twice_on_two": {
            "tokens_per_s": round(of_twice, 2),
            "step": round(2 * scaling("twice"), 2),
            "training": round(2 * scaling("twice", "train"), 2),
            "generation": round(2 * scaling("twice", "generate"), 2),
        },
        "bar": 1.7,
        "machine": round(bare, 2),
        "machine_half_alone": round(bare_alone, 2),
        "vllm_alone": round(sampling, 2),
        "vllm_half_alone": round(sampling_alone, 2),
        "kernels": round(kernels, 2),
        "kernels_half_alone": round(kernels_alone, 2),
        "limit": round(limit(sampling), 2),
        "limit_of_kernels": round(limit(kernels), 2),
    }


# Changes of a run with two ranks, and the phase that they are about.
LAYOUTS: dict[str, tuple[dict[str, Any], str]] = {
    "an engine for each rank, all experts on each": ({}, ""),
    "one engine of both ranks": ({"parallel.engine_tp": 2}, "time/generate_s"),
    "experts divided over both ranks": ({"parallel.ep": 2}, "time/train_s"),
}


def over_layouts(rounds: int) -> dict[str, Any]:
    """Return the seconds of generation and training of each layout, for both tasks."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="r3-scaling-") as name:
        for task_name in ("middle", "tiny"):
            folder = Path(name) / task_name
            folder.mkdir()
            task = make_task(task_name, folder)
            phases: dict[str, list[dict[str, float]]] = {layout: [] for layout in LAYOUTS}
            for number in range(rounds):
                for place, (layout, (changes, _)) in enumerate(LAYOUTS.items()):
                    timing = in_r3(task, folder / f"{number}-{place}", changes=changes)
                    phases[layout].append(timing.phases)
            first, *others = phases
            found[task_name] = {"phases": phases} | {
                layout: round(median(phases[layout], phase) / median(phases[first], phase), 2)
                for layout, phase in ((other, LAYOUTS[other][1]) for other in others)
            }
            print(f"{task_name}: {found[task_name]}", flush=True)
    return found


def median(runs: list[dict[str, float]], phase: str) -> float:
    """Return the median seconds of a phase."""
    return statistics.median(run[phase] for run in runs)


def of_machine(work: Callable[..., None], rounds: int) -> tuple[float, float]:
    """Return how many times less half of some work takes than all of it: (at once, alone).

    "At once" is with another process that does the other half: cores share caches, memory and
    clock. "Alone" is on an idle machine: part of an engine's step does not become less with fewer
    requests. R3 does the same work and more, so it is not expected to scale better.

    Args:
        work: does the `count`-th part of it, and puts its median seconds into a queue.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="r3-scaling-") as name:
        task = make_task("middle", Path(name))

        def seconds(count: int, processes: int) -> float:
            times: Any = context.Queue()
            barrier = context.Barrier(processes)
            started = [
                context.Process(target=work, args=(task, count, rounds, barrier, times))
                for _ in range(processes)
            ]
            for process in started:
                process.start()
            slowest = max(times.get(timeout=600) for _ in started)
            for process in started:
                process.join()
            return slowest

        whole = seconds(1, 1)
        return whole / seconds(2, 2), whole / seconds(2, 1)


def time_products(task: Task, count: int, rounds: int, barrier: Any, times: Any) -> None:
    """Put the median seconds of the products of a part of a step in `times`."""
    import torch

    torch.set_num_threads(1)
    expect_bare_products()
    shape = ModelShape.read(task.model)
    times.put(together(products(shape, pack(shape, [240] * (32 // count))), rounds, barrier))


def time_vllm(task: Task, count: int, rounds: int, barrier: Any, times: Any) -> None:
    """Put the median seconds of `LLM.generate` for a part of the prompts in `times`."""
    from benchmarks.generation import engine_of, in_vllm

    device = alone()
    prompts, engine = engine_of(task, device, "off")
    part = prompts[: len(prompts) // count]

    def sample() -> None:
        engine.reset_cache()
        in_vllm(engine, part, task.max_tokens, 0, alone=True)

    times.put(together(sample, rounds, barrier))
    times.close()
    times.join_thread()
    os._exit(0)  # the engine's process groups need no orderly end


def time_kernels(task: Task, count: int, rounds: int, barrier: Any, times: Any) -> None:
    """Put the median seconds of the kernels of an engine's step for a part of the requests.

    All requests are running and have half of their tokens: experts and attention by R3's loops,
    linear layers by torch. Not included: vLLM's Python code between them, and sampling. The numbers
    are random: the time does not depend on how vLLM packs the weights.
    """
    import torch

    from r3.engine import cpu_attention, cpu_experts

    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape, requests, block = ModelShape.read(task.model), task.prompts * task.samples, 32
    N, D, E, F = requests // count, shape.hidden_size, shape.num_experts, shape.moe_ffn_size
    H, G, head = shape.num_heads, shape.num_kv_heads, shape.head_dim
    length = task.max_tokens // 2
    blocks = -(-length // block)

    table = torch.arange(N * blocks, dtype=torch.int32).view(N, blocks)
    slots = table[:, -1].long() * block + (length - 1) % block
    context = slots, table, torch.full((N,), length, dtype=torch.int32), head**-0.5
    chosen = torch.rand(N, E).topk(shape.topk).indices.int()
    gates, tokens = torch.full(chosen.shape, 1 / shape.topk), torch.randn(N, D)
    layers = [
        (
            torch.randn(D, (H + 2 * G) * head),
            torch.randn(N * blocks, G, block, 2 * head),
            torch.randn(H * head, D),
            torch.randn(D, E),
            (torch.randn(E, 2 * F, D), torch.randn(E, D, F)),
        )
        for _ in range(shape.num_layers)
    ]
    output = torch.randn(D, shape.vocab_size)

    def steps() -> None:
        for _ in range(20):
            for qkv, cache, out, router, experts in layers:
                of_heads = (tokens @ qkv).view(N, -1, head).split([H, G, G], dim=1)
                attended = cpu_attention.attend(*of_heads, cache, *context)
                _ = attended.view(N, -1) @ out, tokens @ router
                cpu_experts.experts(tokens, *experts, gates, chosen)
            _ = tokens @ output

    times.put(together(steps, rounds, barrier))


def together(run: Callable[[], Any], rounds: int, barrier: Any) -> float:
    """Return the median seconds of `run` in processes that begin each round at once."""
    run()
    found = []
    for _ in range(max(rounds, 3)):
        barrier.wait()
        began = time.perf_counter()
        run()
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def alone() -> Device:
    """Make this process a single rank."""
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = str(free_port())
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # `init_device` hands it to torch
    return init_device()


def over_sizes(rounds: int) -> dict[str, Any]:
    """Return seconds and exponent of every size that grows."""
    device = alone()
    mesh = build_mesh(device, Config().parallel)
    found = {}
    for name, growth in GROWTHS.items():
        arms = {str(size): arm(growth, size, device, mesh) for size in growth.sizes}
        seconds = take_turns(arms, rounds)
        fastest = [min(seconds[str(size)]) for size in growth.sizes]
        slope = float(np.polyfit(np.log(growth.sizes), np.log(fastest), 1)[0])
        found[name] = {
            "sizes": list(growth.sizes),
            "seconds": [round(value, 3) for value in fastest],
            "exponent": round(slope, 2),
            "expected": growth.expected,
        }
        print(f"{name}: exponent {slope:.2f} (expected {growth.expected})", flush=True)
    return found


def arm(growth: Growth, size: int, device: Device, mesh: Mesh) -> Callable[[], Any]:
    """Return one forward and backward pass at one size."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    with tempfile.TemporaryDirectory(prefix="r3-scaling-") as folder:
        torch.manual_seed(0)
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**(MODEL | growth.model(size))))
        model.save_pretrained(folder)
        config = Config(
            model=ModelConfig(path=folder, dtype="float32"),
            train=TrainConfig(micro_batch_tokens=8192),
        )
        shape = ModelShape.read(folder)
        policy = Policy(config, device, mesh, shape)
    batch = recorded(policy, pack(shape, growth.lengths(size)))
    return lambda: policy.forward_backward(batch)


if __name__ == "__main__":
    main()
