"""Compare a weight sync with a plain copy of the same bytes and the engine's own repacking.

    .venv/bin/python -m benchmarks.weight_sync       six runs, 6 minutes on two cores

Every run builds a policy and an engine on each rank, and takes turns: the weight sync of a training
step, a copy of as many bytes as every rank's engine has, and what vLLM does to those bytes before
its kernels read them. On CPU it packs linear layers for oneDNN, and experts for its grouped
product. All ranks measure at the same time. A figure is the median over the rounds of the slowest
rank. The script writes weight_sync.json to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.learning_curve import PACKAGES, ROOT, hardware, made_by, source
from r3 import assets
from r3.runtime.device import Device
from r3.sync.residency import State
from tests.engines import World
from tests.families import random_checkpoint
from tests.tiny import tiny_config
from tests.world import run_world

MODELS: dict[str, dict[str, int]] = {
    "tiny": {},
    "50 M": dict(hidden_size=512, moe_intermediate_size=256, num_hidden_layers=4),
    "400 M": dict(hidden_size=1024, moe_intermediate_size=512, num_hidden_layers=8),
}
# Attributes of vLLM's linear layers and embeddings that are the rows and columns of their weight.
_SIZES = (
    ("output_size_per_partition", "output_size", "num_embeddings_per_partition"),
    ("input_size_per_partition", "input_size", "embedding_dim"),
)
BAR = 0.5  # (copy + repacking) / sync


@dataclass(frozen=True, kw_only=True)
class Turns:
    """Seconds of one rank in every round.

    Attributes:
        parameters: of the model.
        nbytes: bytes of the engine's weights on this rank.
        sync: the weight sync, with its barriers.
        copy: a plain copy of `nbytes`.
        repack: vLLM's packing of `nbytes`.
        profile: the functions of the last sync in which most time was spent, if asked for.
    """

    parameters: int
    nbytes: int
    sync: list[float]
    copy: list[float]
    repack: list[float]
    profile: str = ""


def main() -> None:
    """Measure every model on one and two ranks, write the figures and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--profile", action="store_true", help="print where a sync spends its time")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    from benchmarks import weight_sync  # ranks find the case by the module's name

    rows = []
    print("| model | ranks | MB per rank | sync | copy | repacking | (copy + repacking) / sync |")
    print("|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory(prefix="r3-weight-sync-") as folder:
        for name in args.models:
            path = checkpoint(Path(folder) / name.replace(" ", ""), name)
            for ranks in args.ranks:
                load = os.getloadavg()[0]
                turns = run_world(
                    weight_sync.measure,
                    ranks,
                    timeout_s=600,
                    model=str(path),
                    dtype=args.dtype,
                    rounds=args.rounds,
                    profile=args.profile,
                )
                rows.append(row(name, ranks, turns) | {"load_average_before": round(load, 1)})
                print(table_row(rows[-1]), flush=True)
                if args.profile:
                    print(turns[0].profile)
    if not args.profile:
        write(args.out, rows, args.dtype)


def checkpoint(folder: Path, name: str) -> Path:
    """Make a model of random weights, 32 experts per layer; the tiny one is the shipped one."""
    if not MODELS[name]:
        return assets.TINY_MOE
    sizes = dict(num_experts=32, num_attention_heads=8, num_key_value_heads=4, head_dim=64)
    return random_checkpoint(folder, **sizes | MODELS[name])


def measure(device: Device, *, model: str, dtype: str, rounds: int, profile: bool) -> Turns:
    """Take turns on one rank. Every round changes the policy's weights' values first."""
    config = tiny_config(
        model,
        model={"dtype": dtype},
        engine={"dtype": dtype},
        parallel={"ep": device.world_size},
    )
    world = World(device, config)
    world.sync(0)
    world.residency.move(State.TRAIN)
    world.residency.move(State.SYNC)
    parameters = sum(torch.Size(shape).numel() for shape in world.stream.shapes.values())
    nbytes = parameters * getattr(torch, dtype).itemsize
    there, here = (torch.ones(nbytes // 4, dtype=torch.int32) for _ in range(2))
    pack = repacking(world)
    arms: dict[str, Callable[[], Any]] = {
        "sync": lambda: sync(world),
        "copy": lambda: here.copy_(there),
        "repack": pack,
    }
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(-1, rounds):  # the first round warms up
        for name, arm in arms.items():
            world.mesh.world.barrier()
            began = time.perf_counter()
            arm()
            if number >= 0:
                seconds[name].append(time.perf_counter() - began)
    text = profiled(lambda: sync(world)) if profile else ""
    return Turns(parameters=parameters, nbytes=nbytes, profile=text, **seconds)


def sync(world: World) -> None:
    """The weight sync of a step, without waking and sleeping."""
    from r3.sync.weights import sync_weights

    sync_weights(world.stream, world.engine, world.device, world.mesh, policy_version=1)


def repacking(world: World) -> Callable[[], None]:
    """Return what vLLM does on CPU to plain weights, by its own functions."""

    def collect(worker: Any) -> list[Callable[[], Any]]:
        from vllm._custom_ops import cpu_prepack_moe_weight
        from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

        packs: list[Callable[[], Any]] = []
        for module in worker.model_runner.get_model().modules():
            if isinstance(module, RoutedExperts):
                isa = module.quant_method.moe_kernel.fused_experts.isa
                packs += [
                    lambda weight=weight, isa=isa: cpu_prepack_moe_weight(weight, isa)
                    for weight in (module.w13_weight.data, module.w2_weight.data)
                ]
            elif hasattr(module, "cpu_linear"):
                size = [
                    next(getattr(module, name) for name in names if hasattr(module, name))
                    for names in _SIZES
                ]
                plain = nn.Module()
                weight = torch.ones(size, dtype=world.policy.megatron.params_dtype)
                plain.weight = nn.Parameter(weight, requires_grad=False)
                packs.append(
                    lambda plain=plain: dispatch_cpu_unquantized_gemm(plain, remove_weight=False)
                )
        return packs

    (packs,) = world.engine.llm.collective_rpc(collect)

    def run() -> None:
        for pack in packs:
            pack()

    return run


def profiled(function: Callable[[], Any]) -> str:
    """The functions that take most time of their own in a call."""
    import cProfile
    import io
    import pstats

    profile = cProfile.Profile()
    profile.runcall(function)
    stream = io.StringIO()
    pstats.Stats(profile, stream=stream).sort_stats("tottime").print_stats(25)
    return stream.getvalue()


def row(name: str, ranks: int, turns: list[Turns]) -> dict[str, Any]:
    """Medians over the rounds of the slowest rank."""

    def slowest(arm: str) -> float:
        return statistics.median(
            map(max, zip(*(getattr(turn, arm) for turn in turns), strict=True))
        )

    sync_s, copy_s, repack_s = slowest("sync"), slowest("copy"), slowest("repack")
    ratio = (copy_s + repack_s) / sync_s
    return {
        "model": name,
        "parameters": turns[0].parameters,
        "ranks": ranks,
        "bytes_per_rank": turns[0].nbytes,
        "sync_s": sync_s,
        "copy_s": copy_s,
        "repack_s": repack_s,
        "ratio": round(ratio, 3),
        "bar": BAR,
        "reached": ratio >= BAR,
        "rounds": [vars(turn) for turn in turns],
    }


def table_row(row: dict[str, Any]) -> str:
    """One row of the table in benchmarks/README.md."""
    megabytes = row["bytes_per_rank"] / 1e6
    seconds = [f"{1e3 * row[key]:.1f} ms" for key in ("sync_s", "copy_s", "repack_s")]
    return (
        f"| {row['model']} | {row['ranks']} | {megabytes:.0f} | {' | '.join(seconds)} "
        f"| {row['ratio']:.2f} |"
    )


def write(out: Path, rows: list[dict[str, Any]], dtype: str) -> None:
    """Write weight_sync.json."""
    results = {
        "what": f"weight sync against a plain copy and repacking, {dtype}, one thread per rank",
        "made_by": made_by("python -m benchmarks.weight_sync"),
        "date": date.today().isoformat(),
        "source": source(),
        "hardware": hardware(),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in PACKAGES},
        },
        "rows": rows,
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "weight_sync.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
