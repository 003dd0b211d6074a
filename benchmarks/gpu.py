"""Single experiments of benchmarks/gpu.sh. Each prints one line of JSON and needs a CUDA device.

.venv/bin/python -m benchmarks.gpu attention     (all: benchmarks/gpu.md)
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from r3 import assets
from r3.metrics.glossary import is_wall_clock
from r3.policy.modules import causal_varlen
from r3.run.folder import read_metrics
from r3.runtime.device import Device, Stash, open_shared, share

Figures = dict[str, Any]
NO_GPU = 3  # exit code
PACKAGES = ("torch", "vllm", "megatron-core", "transformers", "triton", "numpy")


def cuda(rank: int = 0) -> Device:
    """The first device, without a process group."""
    return Device(
        torch=torch.device("cuda", 0),
        is_cuda=True,
        rank=rank,
        local_rank=0,
        world_size=1,
        host="here",
    )


def seconds(run: Callable[[], Any], *, rounds: int = 10) -> float:
    """Median time of a call, after two calls to warm up."""
    times = []
    for _ in range(rounds + 2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times[2:])[rounds // 2]


def said(*command: str) -> str:
    """Output of a program; empty if it is missing or fails."""
    if not shutil.which(command[0]):
        return ""
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def facts() -> Figures:
    """Device, driver and versions."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "absent"
    query = ["--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    return {
        "gpus": said("nvidia-smi", *query).splitlines(),
        "name": torch.cuda.get_device_name(),
        "gib": torch.cuda.get_device_properties(0).total_memory / 2**30,
        "capability": ".".join(map(str, torch.cuda.get_device_capability())),
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "python": sys.version.split()[0],
        "versions": versions,
        # Triton compiles its launchers with a C compiler.
        "compiler": shutil.which("gcc") or shutil.which("cc") or "absent",
        "host_cores": len(os.sched_getaffinity(0)),
        "source": said("git", "rev-parse", "HEAD"),
    }


def attention() -> Figures:
    """Packed attention against one sequence at a time, forward and backward, grouped queries."""
    lengths = [1, 7, 128, 513, 64, 1300]
    total = sum(lengths)
    torch.manual_seed(0)

    def draw(heads: int) -> torch.Tensor:
        shape = (total, heads, 64)
        values = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        return values.requires_grad_()

    query, key, value = draw(16), draw(4), draw(4)
    borders = torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)
    packed = causal_varlen(
        query, key, value, borders, borders, max(lengths), max(lengths), scale=0.125
    )
    parts = zip(*(x.split(lengths) for x in (query, key, value)), strict=True)
    single = torch.cat(
        [
            F.scaled_dot_product_attention(
                *(x.transpose(0, 1)[None] for x in qkv),
                is_causal=True,
                scale=0.125,
                enable_gqa=True,
            )[0].transpose(0, 1)
            for qkv in parts
        ]
    )
    weights = torch.randn_like(single)
    inputs = (query, key, value)
    ours = torch.autograd.grad((packed * weights).sum(), inputs, retain_graph=True)
    theirs = torch.autograd.grad((single * weights).sum(), inputs)
    errors = [
        float((a - b).float().norm() / b.float().norm())
        for a, b in zip((packed.detach(), *ours), (single.detach(), *theirs), strict=True)
    ]
    # Rounding of bfloat16 is 4e-3; a wrong mask or head gives 0.1 and more.
    return {"relative_errors": errors, "passed": max(errors) < 0.02}


def grouped() -> Figures:
    """The grouped product against a loop, with empty groups and odd sizes, forward and backward."""
    counts = [0, 5, 1, 0, 33, 128, 7, 0]
    tokens = torch.randn(sum(counts), 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(8, 128, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    ends = torch.tensor(counts, device="cuda").cumsum(0).to(torch.int32)
    ours = F.grouped_mm(tokens, weight.transpose(1, 2), offs=ends)
    theirs = torch.cat([x @ w.t() for x, w in zip(tokens.split(counts), weight, strict=True)])
    grads = [
        torch.autograd.grad(out.float().square().sum(), (tokens, weight)) for out in (ours, theirs)
    ]
    pairs = [(ours.detach(), theirs.detach()), *zip(*grads, strict=True)]
    errors = [float((a - b).float().norm() / b.float().norm()) for a, b in pairs]
    return {"relative_errors": errors, "passed": max(errors) < 0.02}


def kernels() -> Figures:
    """R3's Triton kernels against plain torch, in bfloat16, with sizes that fit no block."""
    from r3.kernels import logits, moe

    slots, width, hidden, tokens, topk = 1000, 1030, 1500, 333, 5
    half = dict(device="cuda", dtype=torch.bfloat16)
    both, gates = torch.randn(slots, 2 * width, **half), torch.rand(slots, device="cuda")
    places = torch.randint(0, slots + 200, (tokens, topk), device="cuda")
    # Logits of 3001 rows of the output weight, 11 of them padding, at temperature 0.7.
    of_targets = (torch.randn(tokens, 3001, **half), places[:, 0] % 2990, 2990, 1 / 0.7)
    top, total, *per_token = torch.rand(6, tokens, device="cuda").add_(1).unbind()
    arguments: dict[Callable[..., Any], tuple[Any, ...]] = {
        moe.weighted_swiglu: (both, gates),
        moe.weighted_swiglu_backward: (both, gates, torch.randn(slots, width, **half)),
        moe.sum_rows: (torch.randn(slots, hidden, **half), places),
        logits.logit_sums: of_targets,
        logits.logit_gradient: (*of_targets, top, total, *per_token, False),
    }
    errors = {}
    for plain, given in arguments.items():
        name = plain.__name__
        pairs = [getattr(torch.ops.r3, name)(*given), plain(*given)]
        ours, theirs = ([one] if torch.is_tensor(one) else list(one) for one in pairs)
        errors[name] = [
            float((a - b).float().norm() / b.float().norm())
            for a, b in zip(ours, theirs, strict=True)
        ]
    # The exponential's last bit seldom moves a result to the next bfloat16. Sums have one order.
    passed = max(map(max, errors.values())) < 1e-3 and errors["sum_rows"] == [0.0]
    return {"relative_errors": errors, "passed": passed}


def layer() -> Figures:
    """One MoE layer of the size of Qwen3-30B-A3B on 8 ranks: fused experts, and grouped ones."""
    from megatron.core.transformer.moe.moe_utils import permute, unpermute

    from r3.policy.device_experts import _Experts, deferred

    rows, experts, hidden, width, topk = 65536, 16, 2048, 768, 8
    count, half = rows // topk, dict(device="cuda", dtype=torch.bfloat16)
    leaves = [
        torch.randn(count, hidden, **half),
        torch.rand(count, topk, device="cuda"),
        torch.randn(experts, 2 * width, hidden, **half) / hidden**0.5,
        torch.randn(experts, hidden, width, **half) / width**0.5,
    ]
    tokens, gates, w1, w2 = (leaf.requires_grad_() for leaf in leaves)
    chosen = torch.rand(count, experts, device="cuda").argsort(-1)[:, :topk].sort(-1).values
    routing_map = torch.zeros(count, experts, device="cuda", dtype=torch.bool)
    routing_map.scatter_(1, chosen, True)
    ends = routing_map.sum(0).cumsum(0).to(torch.int32)

    def products(permuted: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        gate, up = F.grouped_mm(permuted, w1.transpose(1, 2), offs=ends).chunk(2, -1)
        inner = (F.silu(gate) * up * weights).to(permuted.dtype)
        return F.grouped_mm(inner, w2.transpose(1, 2), offs=ends)

    def fused() -> torch.Tensor:
        return _Experts.apply(tokens, gates, chosen, rows, *deferred(w1, w2))

    def grouped() -> torch.Tensor:
        probs = torch.zeros(count, experts, device="cuda").scatter(1, chosen, gates)
        permuted, weights, order = permute(tokens, routing_map, probs, num_out_tokens=rows)
        return unpermute(products(permuted, weights[:, None]), order, tokens.shape)

    def gradients(run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(run(), (tokens, gates, w1, w2), upstream)

    upstream = torch.randn(count, hidden, **half)
    with torch.no_grad():
        pairs = [(fused(), grouped())]
    pairs += zip(gradients(fused), gradients(grouped), strict=True)
    errors = [float((a - b).float().norm() / b.float().norm()) for a, b in pairs]
    with torch.no_grad():
        permuted, weights = tokens.repeat(topk, 1), torch.rand(rows, 1, device="cuda")
        times = {
            "fused": seconds(fused),
            "grouped": seconds(grouped),
            "products": seconds(lambda: products(permuted, weights)),
        }
    times |= {
        f"{run.__name__}_forward_backward": seconds(lambda run=run: gradients(run))  # type: ignore[misc]
        for run in (fused, grouped)
    }
    twice = zip(gradients(fused), gradients(fused), strict=True)
    same = not any(int((a != b).sum()) for a, b in twice)
    return {
        "milliseconds": {name: 1e3 * value for name, value in times.items()},
        "products_tflops": 6 * rows * hidden * width / times["products"] / 1e12,
        "relative_errors": errors,
        "fused_repeats_its_bits": same,
        # Grouped experts round sums to bfloat16 eight times; a wrong row gives 0.1 and more.
        "passed": max(errors) < 0.03 and same,
    }


def stash() -> Figures:
    """Time to register 10 GB of host memory, and the bandwidth of both directions."""
    kept = Stash(device=cuda())
    tensor = torch.randn(10 * 2**28, device="cuda")
    before = float(tensor[12345])
    moves: dict[str, Callable[[], Any]] = {
        "first_offload": lambda: kept.put("x", tensor),
        "onload": lambda: kept.get("x", tensor),
        "offload": lambda: kept.put("x", tensor),
        "onload_again": lambda: kept.get("x", tensor),
    }
    figures: Figures = {}
    for name, move in moves.items():
        start = time.perf_counter()
        move()
        torch.cuda.synchronize()
        figures[f"{name}_gib_per_s"] = 10 / (time.perf_counter() - start)
    return figures | {"passed": float(tensor[12345]) == before}


def _reader(connection: Connection) -> None:
    """A process that reads a tensor of another one on the same device, and changes it."""
    handle = connection.recv()
    tensor = open_shared(handle, cuda(rank=1))
    connection.send((str(tensor.device), tensor.double().sum().item()))
    tensor.mul_(2)
    torch.cuda.synchronize()
    connection.send("written")
    connection.recv()  # the memory must outlive its reader


def ipc() -> Figures:
    """Share a tensor with a second process on the same device, through R3's own handles."""
    tensor = torch.arange(2.0**20, device="cuda")
    torch.cuda.synchronize()
    expected = tensor.double().sum().item()
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_reader, args=(there,))
    process.start()
    here.send(share(tensor))
    device, found = here.recv()
    here.recv()
    doubled = tensor.double().sum().item()
    here.send("done")
    process.join(60)
    return {"device": device, "passed": found == expected and doubled == 2 * expected}


# The model of step `large`.
LARGE: dict[str, Any] = dict(
    vocab_size=512,
    hidden_size=2048,
    intermediate_size=6144,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    num_experts=32,
    num_experts_per_tok=8,
    moe_intermediate_size=768,
    norm_topk_prob=True,
    max_position_embeddings=4096,
    pad_token_id=0,
    eos_token_id=2,
    bos_token_id=None,
    tie_word_embeddings=False,
)


def model(folder: Path) -> Figures:
    """Write a random Qwen3-MoE of 3 billion parameters with the tokenizer of tiny-moe."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    with torch.device("cuda"):
        made = Qwen3MoeForCausalLM(Qwen3MoeConfig(**LARGE)).to(torch.bfloat16)
    made.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(assets.TINY_MOE / name, folder / name)
    return {"parameters": sum(parameter.numel() for parameter in made.parameters())}


def last(run: Path) -> Figures:
    """Figures of a run: its last step."""
    rows = [row for row in read_metrics(run / "metrics.jsonl") if row["step"] > 0]
    wanted = (
        "reward/mean",
        "loss/",
        "mismatch/",
        "routing/agreement",
        "time/",
        "perf/",
        "memory/",
        "optim/grad_norm",
    )
    curve = "reward/mean" if "reward/mean" in rows[-1] else "loss/total"
    return {
        "steps": len(rows),
        curve.partition("/")[0]: [round(row[curve], 4) for row in rows],
        **{name: value for name, value in rows[-1].items() if name.startswith(wanted)},
    }


def same(first: Path, second: Path) -> Figures:
    """Whether two runs have the same figures in every step, but for those of the wall clock."""
    runs = [
        [
            {key: each for key, each in row.items() if key == "step" or not is_wall_clock(key)}
            for row in read_metrics(run / "metrics.jsonl")
        ]
        for run in (first, second)
    ]
    different = sorted(
        {
            key
            for one, other in zip(*runs, strict=False)
            for key in one.keys() | other.keys()
            if repr(one.get(key)) != repr(other.get(key))
        }
    )
    return {"different": different, "passed": not different and len(runs[0]) == len(runs[1]) > 1}


EXPERIMENTS: dict[str, Callable[..., Figures]] = {
    each.__name__: each
    for each in (facts, attention, grouped, kernels, layer, stash, ipc, model, last, same)
}
WITHOUT_GPU = ("last", "same")  # these read files


def main() -> None:
    """Run one experiment and print its figures; exit code 1 if it did not pass."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("experiment", choices=list(EXPERIMENTS))
    parser.add_argument("paths", nargs="*", type=Path, help="of the experiments on files")
    words = parser.parse_args()
    if words.experiment not in WITHOUT_GPU and not torch.cuda.is_available():
        print("no GPU: torch finds no CUDA device")
        sys.exit(NO_GPU)
    figures = EXPERIMENTS[words.experiment](*words.paths)
    print(json.dumps({"experiment": words.experiment} | figures), flush=True)
    if not figures.get("passed", True):
        os._exit(1)


if __name__ == "__main__":
    main()
