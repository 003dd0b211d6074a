"""Time how R3 scales: ranks, and what training costs as a task grows.

    .venv/bin/python -m benchmarks.scaling          on two idle cores; ranks alone take 43 minutes

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
from r3.rollout.single_turn import sample_single_turn
from r3.runtime.device import Device, free_port, init_device
from r3.runtime.mesh import Mesh, build_mesh
from r3.types import Rollout


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
    found: dict[str, list[dict[str, float]]] = {part: [] for part in PARTS}
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
            for part, (prepare, count) in PARTS.items():  # the speed of memory changes by the hour
                found[part] += of_machine(prepare, task, count)
    steps = {arm: [s for timing in each for s in timing.step_s] for arm, each in timings.items()}

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
    bare, sampling, kernels = (Machine(found[part]) for part in PARTS)
    print(f"half of the products take {bare} less")
    print(f"half of the prompts, vLLM alone: {sampling} less")
    print(f"half of the requests, kernels alone: {kernels} less")
    generate = statistics.median(timing.phases["time/generate_s"] for timing in timings["1"])
    whole = statistics.median(steps["1"])

    # A step whose generation scales like vLLM, and all else like products.
    limit = whole / ((whole - generate) / bare.at_once + generate / sampling.at_once)
    print(f"a step that scales like products and vLLM: {limit:.2f}")
    return {
        "step_s": {arm: [round(value, 2) for value in steps[arm]] for arm in steps},
        "tokens_of_a_response": {arm: round(value, 1) for arm, value in tokens.items()},
        "phases_s": {arm: [timing.phases for timing in each] for arm, each in timings.items()},
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
        "machine": round(bare.at_once, 2),
        "machine_half_alone": round(bare.alone, 2),
        "vllm_alone": round(sampling.at_once, 2),
        "vllm_half_alone": round(sampling.alone, 2),
        "kernels": round(kernels.at_once, 2),
        "kernels_half_alone": round(kernels.alone, 2),
        "kernels_quartiles": [round(value, 2) for value in kernels.quartiles],
        "limit": round(limit, 2),
        "of_machine_s": found,
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


@dataclass(frozen=True)
class Machine:
    """How many times less half of some work takes than all of it.

    "At once" is with another process that does as much: cores share caches, memory and clock.
    "Alone" is on an idle machine: part of an engine's step does not become less with fewer
    requests. These ratios are no bounds for R3's: kernels without a pause disturb each other more
    than engines do.

    Attributes:
        rounds: of each, seconds of "whole", "at once" (the slower process) and "alone".
    """

    rounds: list[dict[str, float]]

    def __str__(self) -> str:
        """Both ratios, and where half of the rounds lie."""
        low, _, high = self.quartiles
        return f"{self.at_once:.2f} times ({low:.2f} to {high:.2f}; {self.alone:.2f} alone)"

    @property
    def at_once(self) -> float:
        """Median over the rounds."""
        return self.quartiles[1]

    @property
    def alone(self) -> float:
        """Median over the rounds."""
        return statistics.median(each["whole"] / each["alone"] for each in self.rounds)

    @property
    def quartiles(self) -> list[float]:
        """Of "at once"."""
        return statistics.quantiles(
            (each["whole"] / each["at once"] for each in self.rounds), method="inclusive"
        )


def of_machine(
    prepare: Callable[[Task], Callable[[int], Any]], task: Task, rounds: int
) -> list[dict[str, float]]:
    """Return seconds of all of some work and of half of it, at once and alone (`Machine`).

    Args:
        prepare: returns a function that does the `count`-th part of the work.
    """
    context = multiprocessing.get_context("spawn")
    times: Any = context.Queue()
    barrier = context.Barrier(2)
    started = [
        context.Process(target=take_part, args=(prepare, task, rounds, place, barrier, times))
        for place in range(2)
    ]
    for process in started:
        process.start()
    first, second = (times.get(timeout=900) for _ in started)
    for process in started:
        process.join()
    return [
        {arm: round(max(mine.get(arm, 0.0), others.get(arm, 0.0)), 4) for arm in mine | others}
        for mine, others in zip(first, second, strict=True)
    ]


def take_part(
    prepare: Callable[[Task], Callable[[int], Any]],
    task: Task,
    rounds: int,
    place: int,
    barrier: Any,
    times: Any,
) -> None:
    """Put the seconds of every arm of every round that this process takes part in in `times`.

    Arms follow each other in random order. The second process waits while the first is alone.
    """
    run = prepare(task)
    run(1)
    run(2)
    found = []
    for number in range(rounds):
        seconds: dict[str, float] = {}
        for arm in random.Random(number).sample(["whole", "at once", "alone"], 3):
            barrier.wait(timeout=600)
            if place and arm != "at once":
                continue
            began = time.perf_counter()
            run(1 if arm == "whole" else 2)
            seconds[arm] = time.perf_counter() - began
        found.append(seconds)
    times.put(found)
    times.close()
    times.join_thread()
    os._exit(0)  # an engine's process groups need no orderly end


def run_products(task: Task) -> Callable[[int], Any]:
    """Return a function that runs the products of a part of a step."""
    import torch

    torch.set_num_threads(1)
    expect_bare_products()
    shape = ModelShape.read(task.model)
    parts = {count: products(shape, pack(shape, [240] * (32 // count))) for count in (1, 2)}
    return lambda count: parts[count]()


def run_vllm(task: Task) -> Callable[[int], Any]:
    """Return a function that calls `LLM.generate` for a part of the prompts."""
    from benchmarks.generation import engine_of, in_vllm

    prompts, engine = engine_of(task, alone(), "off")

    def sample(count: int) -> None:
        engine.reset_cache()
        in_vllm(engine, prompts[::count], task.max_tokens, 0, alone=True)

    return sample


def run_kernels(task: Task) -> Callable[[int], Any]:
    """Return a function that runs the kernels of an engine's steps for a part of the requests.

    Every eighth step of a real generation, with the requests that run in it, their lengths and
    their experts: experts and attention by R3's loops, linear layers by torch. Not included: vLLM's
    Python code between them, and sampling. Other numbers are random: the time depends neither on
    them nor on how vLLM packs the weights.
    """
    import torch

    from r3.kernels import sampled_attention, sampled_experts

    rollouts = sampled(task)
    torch.manual_seed(0)
    shape, block = ModelShape.read(task.model), 32
    N, D, E, F = len(rollouts), shape.hidden_size, shape.num_experts, shape.moe_ffn_size
    H, G, head = shape.num_heads, shape.num_kv_heads, shape.head_dim
    blocks = -(-max(len(rollout.tokens_T) for rollout in rollouts) // block)
    table = torch.arange(N * blocks, dtype=torch.int32).view(N, blocks)
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

    def steps_of(count: int) -> list[tuple[Any, ...]]:
        """Return number of requests, arguments of attention, gates and routes of each step."""
        found = []
        for place in range(4, task.max_tokens, 8):
            running = [n for n in range(0, N, count) if rollouts[n].num_response_tokens > place]
            if not running:
                break
            lengths = [
                len(rollouts[n].tokens_T) - rollouts[n].num_response_tokens + place for n in running
            ]
            routes = np.stack(
                [rollouts[n].routed_experts[t - 1] for n, t in zip(running, lengths, strict=True)]
            )
            of_step, last = table[running], torch.tensor(lengths) - 1
            slots = of_step.gather(1, last[:, None] // block)[:, 0].long() * block + last % block
            context = slots, of_step, (last + 1).int(), head**-0.5
            chosen = torch.from_numpy(routes.astype(np.int32)).unbind(1)
            gates = torch.full(chosen[0].shape, 1 / shape.topk)
            found.append((len(running), context, gates, [each.contiguous() for each in chosen]))
        return found

    steps, hidden = {count: steps_of(count) for count in (1, 2)}, torch.randn(N, D)

    def run(count: int) -> None:
        for n, context, gates, routes in steps[count]:
            tokens = hidden[:n]
            for (qkv, cache, out, router, experts), chosen in zip(layers, routes, strict=True):
                of_heads = (tokens @ qkv).view(n, -1, head).split([H, G, G], dim=1)
                attended = sampled_attention.attend(*of_heads, cache, *context)
                _ = attended.view(n, -1) @ out, tokens @ router
                sampled_experts.experts(tokens, *experts, gates, chosen)
            _ = tokens @ output

    return run


def sampled(task: Task) -> list[Rollout]:
    """Return a response to each prompt of the task, with its routes."""
    from benchmarks.generation import engine_of, seeds

    prompts, engine = engine_of(task, alone(), "r3")
    return sample_single_turn(
        engine, prompts, seeds=seeds(prompts, 0), policy_version=0, max_tokens=task.max_tokens
    )


# What is measured beside steps, and how often after each of their rounds.
PARTS: dict[str, tuple[Callable[[Task], Callable[[int], Any]], int]] = {
    "products": (run_products, 4),
    "vllm": (run_vllm, 2),
    "kernels": (run_kernels, 12),
}


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
