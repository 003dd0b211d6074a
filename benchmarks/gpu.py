"""Single experiments of benchmarks/gpu.sh. Each prints one line of JSON and needs a CUDA device.

.venv/bin/python -m benchmarks.gpu attention     (all: benchmarks/gpu.md)

With --rehearse, the CPU takes the place of the device, and sizes are small.
"""

from __future__ import annotations

import argparse
import gzip
import json
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import torch.nn.functional as F

from r3 import assets
from r3.config import from_yaml
from r3.layers.attention import causal_varlen
from r3.models.shape import ModelShape
from r3.run.folder import RunDir, read_metrics
from r3.runtime.device import Device, has_gpu
from r3.runtime.tensors import Stash, open_shared, share
from r3.tools.planning.memory_plan import fit
from tests.runs import is_wall_clock

Figures = dict[str, Any]
PEAK_TFLOPS = {"a100": 312, "h100": 989, "h200": 989, "b200": 2250}  # dense bfloat16
NO_GPU = 3  # exit code
PACKAGES = ("torch", "vllm", "megatron-core", "transformers", "triton", "numpy")


def device(rank: int = 0) -> Device:
    """The first device, without a process group."""
    return Device(
        torch=torch.device("cuda", 0) if has_gpu() else torch.device("cpu"),
        is_cuda=has_gpu(),
        rank=rank,
        local_rank=0,
        world_size=1,
        host="here",
    )


def seconds(run: Callable[[], Any], *, rounds: int = 10) -> float:
    """Median time of a call, after two calls to warm up."""
    times = []
    for _ in range(rounds + 2):
        device().synchronize()
        start = time.perf_counter()
        run()
        device().synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times[2:])[rounds // 2]


def said(*command: str) -> str:
    """Output of a program; empty if it is missing or fails."""
    if not shutil.which(command[0]):
        return ""
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def relative_errors(pairs: Any) -> list[float]:
    """Norm of the difference of each pair, relative to the second one's."""
    return [float((a - b).float().norm() / b.float().norm()) for a, b in pairs]


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
        "name": device().name(),
        "gib": device().memory_gib()[1],
        **device().versions(),
        "python": sys.version.split()[0],
        "versions": versions,
        # Triton compiles its launchers with a C compiler.
        "compiler": shutil.which("gcc") or shutil.which("cc") or "absent",
        "host_cores": len(os.sched_getaffinity(0)),
        "source": said("git", "rev-parse", "HEAD"),
    }


def attention() -> Figures:
    """Packed attention against one sequence at a time, forward and backward, grouped queries."""
    lengths, where = [1, 7, 128, 513, 64, 1300], device()
    torch.manual_seed(0)

    def draw(heads: int) -> torch.Tensor:
        shape = (sum(lengths), heads, 64)
        values = torch.randn(shape, device=where.torch, dtype=torch.bfloat16)
        return values.requires_grad_()

    def alone(*packed: torch.Tensor) -> torch.Tensor:
        parts = zip(*(x.split(lengths) for x in packed), strict=True)
        results = [
            F.scaled_dot_product_attention(
                *(x.transpose(0, 1)[None] for x in qkv),
                is_causal=True,
                scale=0.125,
                enable_gqa=True,
            )
            for qkv in parts
        ]
        return torch.cat([result[0].transpose(0, 1) for result in results])

    inputs = (draw(16), draw(4), draw(4))
    if where.is_cuda:
        borders = torch.tensor([0, *accumulate(lengths)], device=where.torch, dtype=torch.int32)
        packed = causal_varlen(*inputs, borders, borders, max(lengths), max(lengths), scale=0.125)
    else:  # the kernel has no CPU version
        packed = alone(*(x.float() for x in inputs)).to(torch.bfloat16)
    single = alone(*inputs)
    weights = torch.randn_like(single)
    ours = torch.autograd.grad((packed * weights).sum(), inputs, retain_graph=True)
    theirs = torch.autograd.grad((single * weights).sum(), inputs)
    pairs = zip((packed.detach(), *ours), (single.detach(), *theirs), strict=True)
    errors = relative_errors(pairs)
    # Rounding of bfloat16 is 4e-3; a wrong mask or head gives 0.1 and more.
    return {"relative_errors": errors, "passed": max(errors) < 0.02}


def grouped() -> Figures:
    """The grouped product against a loop, with empty groups and odd sizes, forward and backward."""
    counts = [0, 5, 1, 0, 33, 128, 7, 0]
    leaf: dict[str, Any] = dict(device=device().torch, dtype=torch.bfloat16, requires_grad=True)
    tokens, weight = torch.randn(sum(counts), 256, **leaf), torch.randn(8, 128, 256, **leaf)
    ends = torch.tensor([*accumulate(counts)], device=device().torch, dtype=torch.int32)
    ours = F.grouped_mm(tokens, weight.transpose(1, 2), offs=ends)
    theirs = torch.cat([x @ w.t() for x, w in zip(tokens.split(counts), weight, strict=True)])
    grads = [
        torch.autograd.grad(out.float().square().sum(), (tokens, weight)) for out in (ours, theirs)
    ]
    pairs = [(ours.detach(), theirs.detach()), *zip(*grads, strict=True)]
    errors = relative_errors(pairs)
    return {"relative_errors": errors, "passed": max(errors) < 0.02}


def kernels() -> Figures:
    """R3's Triton kernels against plain torch, in bfloat16, with sizes that fit no block."""
    from r3.backends import expert_kernels
    from r3.layers import kernels

    slots, width, hidden, tokens, topk = 1000, 1030, 1500, 333, 5
    half = dict(device=device().torch, dtype=torch.bfloat16)
    both, gates = torch.randn(slots, 2 * width, **half), torch.rand(slots, device=device().torch)
    places = torch.randint(0, slots + 200, (tokens, topk), device=device().torch)
    # Logits of 3001 rows of the output weight, 11 of them padding, at temperature 0.7.
    of_targets = (torch.randn(tokens, 3001, **half), places[:, 0] % 2990, 2990, 1 / 0.7)
    top, total, *per_token = torch.rand(6, tokens, device=device().torch).add_(1).unbind()
    arguments: dict[Callable[..., Any], tuple[Any, ...]] = {
        expert_kernels.weighted_swiglu: (both, gates),
        expert_kernels.weighted_swiglu_backward: (both, gates, torch.randn(slots, width, **half)),
        expert_kernels.sum_rows: (torch.randn(slots, hidden, **half), places),
        kernels.logit_sums: of_targets,
        kernels.logit_gradient: (*of_targets, top, total, *per_token, False),
        kernels.norm: (both, both[0], 1e-6),
        kernels.norm_backward: (both, both[0], gates, both.flip(0)),
        kernels.turn: (
            both.view(slots, 20, -1),
            *torch.randn(2, slots, 1, 70, **half).unbind(),
            -1,
        ),
    }
    errors = {}
    for plain, inputs in arguments.items():
        name = plain.__name__
        pairs = [getattr(torch.ops.r3, name)(*inputs), plain(*inputs)]
        ours, theirs = ([one] if torch.is_tensor(one) else list(one) for one in pairs)
        errors[name] = relative_errors(zip(ours, theirs, strict=True))
    # The exponential's last bit seldom moves a result to the next bfloat16. Sums have one order.
    passed = max(map(max, errors.values())) < 1e-3 and errors["sum_rows"] == [0.0]
    return {"relative_errors": errors, "passed": passed}


def layer() -> Figures:
    """One MoE layer of the size of Qwen3-30B-A3B on 8 ranks: fused experts, and grouped ones."""
    from megatron.core.transformer.moe.moe_utils import permute, unpermute

    from r3.backends.cuda.fused_experts import _Experts, deferred

    where = device().torch
    rows, experts, hidden, width, topk = (
        (65536, 16, 2048, 768, 8) if where.type == "cuda" else (512, 8, 64, 32, 4)
    )
    count, half = rows // topk, dict(device=where, dtype=torch.bfloat16)
    leaves = [
        torch.randn(count, hidden, **half),
        torch.rand(count, topk, device=where),
        torch.randn(experts, 2 * width, hidden, **half) / hidden**0.5,
        torch.randn(experts, hidden, width, **half) / width**0.5,
    ]
    tokens, gates, w1, w2 = (leaf.requires_grad_() for leaf in leaves)
    chosen = torch.rand(count, experts, device=where).argsort(-1)[:, :topk].sort(-1).values
    routing_map = torch.zeros(count, experts, device=where, dtype=torch.bool)
    routing_map.scatter_(1, chosen, True)
    ends = routing_map.sum(0).cumsum(0).to(torch.int32)

    def products(permuted: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        gate, up = F.grouped_mm(permuted, w1.transpose(1, 2), offs=ends).chunk(2, -1)
        inner = (F.silu(gate) * up * weights).to(permuted.dtype)
        return F.grouped_mm(inner, w2.transpose(1, 2), offs=ends)

    def fused() -> torch.Tensor:
        return _Experts.apply(tokens, gates, chosen, rows, *deferred(w1, w2))

    def grouped() -> torch.Tensor:
        probs = torch.zeros(count, experts, device=where).scatter(1, chosen, gates)
        permuted, weights, order = permute(tokens, routing_map, probs, num_out_tokens=rows)
        return unpermute(products(permuted, weights[:, None]), order, tokens.shape)

    def gradients(run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(run(), (tokens, gates, w1, w2), upstream)

    upstream = torch.randn(count, hidden, **half)
    with torch.no_grad():
        pairs = [(fused(), grouped())]
    pairs += zip(gradients(fused), gradients(grouped), strict=True)
    errors = relative_errors(pairs)
    with torch.no_grad():
        permuted, weights = tokens.repeat(topk, 1), torch.rand(rows, 1, device=where)
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
    where = device()
    kept, gib = Stash(device=where), 10 if where.is_cuda else 1 / 64
    tensor = torch.randn(int(gib * 2**28), device=where.torch)
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
        where.synchronize()
        figures[f"{name}_gib_per_s"] = gib / (time.perf_counter() - start)
    return figures | {"passed": float(tensor[12345]) == before}


def _reader(connection: Connection) -> None:
    """A process that reads a tensor of another one on the same device, and changes it."""
    handle = connection.recv()
    tensor = open_shared(handle, device(rank=1))
    connection.send((str(tensor.device), tensor.double().sum().item()))
    tensor.mul_(2)
    device().synchronize()
    connection.send("written")
    connection.recv()  # the memory must outlive its reader


def ipc() -> Figures:
    """Share a tensor with a second process on the same device, through R3's own handles."""
    tensor = torch.arange(2.0**20, device=device().torch)
    device().synchronize()
    expected = tensor.double().sum().item()
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_reader, args=(there,))
    process.start()
    here.send(share(tensor))
    name, received = here.recv()
    here.recv()
    doubled = tensor.double().sum().item()
    here.send("done")
    process.join(60)
    return {"device": name, "passed": received == expected and doubled == 2 * expected}


# Like one eighth of Qwen3-30B-A3B: its layers, and what differs in the models of two steps.
_LAYER: dict[str, Any] = dict(
    hidden_size=2048,
    intermediate_size=6144,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    num_experts_per_tok=8,
    moe_intermediate_size=768,
    norm_topk_prob=True,
    max_position_embeddings=32768,
    pad_token_id=0,
    eos_token_id=2,
    bos_token_id=None,
    tie_word_embeddings=False,
)
MODELS: dict[str, dict[str, Any]] = {
    # 2.7 billion parameters: engine, policy and optimizer fit one device
    "large": _LAYER | dict(vocab_size=512, num_hidden_layers=16, num_experts=32),
    # 4.4 billion: six whole layers of Qwen3-30B-A3B and its vocabulary
    "cut": _LAYER | dict(vocab_size=151936, num_hidden_layers=6, num_experts=128),
}
_SMALL: dict[str, Any] = dict(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=32,
    num_experts=16,
    num_experts_per_tok=4,
    moe_intermediate_size=32,
    vocab_size=512,
)
# Sizes that CUDA kernels take, of keys that a family of tests/families.py has, and of one alone.
_OF_KEY = dict(
    head_dim=64,
    moe_intermediate_size=128,
    shared_expert_intermediate_size=192,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
)
_LATENT = dict(q_lora_rank=128, kv_lora_rank=512, qk_rope_head_dim=64)
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {},
    "qwen3": {},
    "qwen2_moe": {},
    "qwen2": {},
    "olmoe": {},
    "mixtral": {},
    "deepseek_v3": _LATENT | dict(qk_nope_head_dim=128, v_head_dim=128),
    "llama": {},
    "glm-4.5-air": {},
    "glm-4.5": {},
    "glm-4.7-flash": _LATENT | dict(qk_nope_head_dim=192, v_head_dim=256),
    "granitemoe": dict(num_local_experts=16, intermediate_size=128),
    "minimax-m2": dict(
        intermediate_size=128, rotary_dim=32, scoring_func="sigmoid", use_routing_bias=True
    ),
    "qwen3_next": {},
    "qwen3_5": {},
    "qwen3_5_moe": {},
    "ernie4_5_moe": {},
    # Key heads of 64, experts of multiples of 128.
    "gpt_oss": dict(intermediate_size=256, num_attention_heads=8, head_dim=64, sliding_window=32),
}


def model(folder: Path) -> Figures:
    """Write the random Qwen3-MoE of `MODELS` that the folder is named after."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    sizes = MODELS[folder.name] | ({} if has_gpu() else _SMALL)
    torch.set_default_dtype(torch.bfloat16)
    with device().torch:
        made = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes))
    made.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(assets.TINY_MOE / name, folder / name)
    return {"parameters": sum(parameter.numel() for parameter in made.parameters())}


def families(folder: Path) -> Figures:
    """Write a small random model of every family, in sizes that CUDA kernels take."""
    from tests.families import FAMILIES as KEYS
    from tests.families import family_checkpoint

    sizes: dict[str, Any] = dict(hidden_size=256, intermediate_size=384, num_attention_heads=8)
    for name, own in FAMILIES.items():
        usual = {key: size for key, size in _OF_KEY.items() if key in KEYS[name][1]}
        family_checkpoint(folder / name, name, tied=name == "qwen3", **sizes | usual | own)
    return {"families": list(FAMILIES)}


def rows(file: Path) -> Figures:
    """Write conversations of about 1,600 tokens (64 without a GPU) to learn from."""
    texts = [json.loads(line) for line in assets.WORD_PROBLEMS_TRAIN.read_text().splitlines()]
    number, problems = 256, 23 if has_gpu() else 2
    draw = random.Random(0)
    with file.open("w") as out:
        for _ in range(number):
            chosen = draw.choices(texts, k=problems)
            answer = "\n".join(f"{one['question']}\n{one['answer']}" for one in chosen)
            turns = [("user", "Go on."), ("assistant", answer)]
            row = {"messages": [{"role": role, "content": text} for role, text in turns]}
            out.write(f"{json.dumps(row)}\n")
    return {"rows": number}


def generation(path: Path, mode: Path) -> Figures:
    """Tokens per second of R3's sampler and of `LLM.generate`, as R3 asks it and as a user does.

    Args:
        path: the model.
        mode: "r3" for an engine that captures routes, "off" for one that does not.
    """
    from benchmarks.generation import in_r3, in_vllm
    from r3.data.prompts import prompts_from
    from r3.rollout import read_task
    from r3.runtime.device import init_device
    from tests.engines import engine_from_disk
    from tests.tiny import tiny_config

    count, limit, cache = (256, 256, 8.0) if has_gpu() else (8, 8, 0.03125)
    config = tiny_config(
        path,
        model={"dtype": "bfloat16"},
        engine={"dtype": "bfloat16", "kv_cache_gib": cache, "max_num_seqs": count},
        rollout={"max_response_tokens": limit},
        replay={"mode": str(mode)},
    )
    where, task = init_device(), read_task(config)
    engine = engine_from_disk(config, where, task)
    prompts = prompts_from(task.prompts, seed=0, start=0, count=count)
    arms: dict[str, Callable[[int], int]] = {
        "r3": lambda turn: in_r3(engine, prompts, limit, turn),
        "vllm": lambda turn: in_vllm(engine, prompts, limit, turn, alone=False),
        "vllm plain": lambda turn: in_vllm(engine, prompts, limit, turn, alone=True),
    }
    speeds: dict[str, list[float]] = {arm: [] for arm in arms}
    for turn in range(4):
        for arm, sample in arms.items():
            engine.reset_cache()  # every arm computes the prompts
            start = time.perf_counter()
            tokens = sample(turn)
            if turn:  # the first round warms up
                speeds[arm].append(tokens / (time.perf_counter() - start))
    return {"mode": str(mode), "tokens_per_s": {arm: median(each) for arm, each in speeds.items()}}


def run(folder: Path) -> Figures:
    """Figures of a run: its curve and memory by step, its last step, the plan; a trace if any."""
    rows = [row for row in read_metrics(folder) if row["step"] > 0]
    config = from_yaml(RunDir(folder).config.read_text())
    shape = ModelShape.read(config.model.path)
    curve = "reward/mean" if "reward/mean" in rows[-1] else "loss/nll"
    by_step = [curve, "optim/grad_norm", "time/step_s"]
    by_step += [name for name in rows[-1] if name.startswith("memory/")]
    wanted = ("loss/", "mismatch/", "routing/agreement", "time/", "perf/")
    usual = [row["perf/tokens_per_s"] for row in rows[1:] or rows]
    ranks = config.parallel.ep
    planned = fit(config, shape, ranks, device().memory_gib()[1]).needs_gib
    figures: Figures = {
        "steps": len(rows),
        "by_step": {name: [float(f"{row[name]:.4g}") for row in rows] for name in by_step},
        "last": {name: value for name, value in rows[-1].items() if name.startswith(wanted)},
        "accuracy": [
            row["eval/heldout/accuracy"] for row in rows if "eval/heldout/accuracy" in row
        ],
        "tokens_per_s": median(usual),
        "planned_gib": planned,
    }
    traces = sorted(RunDir(folder).trace(0, 0).parent.glob("*.json.gz"))
    if config.train.objective == "sft":
        per_step = config.rollout.prompts_per_step
        length = fmean(row["rollout/tokens"] for row in rows) / per_step
        # Forward, and a backward of twice its cost; what is recomputed does not count.
        per_token = 3 * forward_flops(shape, length)
        named = [peak for key, peak in PEAK_TFLOPS.items() if key in device().name().lower()]
        peak = (named or [PEAK_TFLOPS["h100"]])[0]
        share = figures["tokens_per_s"] * per_token / peak / 1e12
        figures |= {"gflop_per_token": per_token / 1e9, "peak_tflops": peak, "peak_share": share}
    if traces:
        figures["trace"] = trace(traces[-1])
        if "peak_share" in figures:
            passes = 1 - figures["trace"]["optimizer_share"]
            figures["peak_share_without_optimizer"] = figures["peak_share"] / passes
    return figures


def active_params(shape: ModelShape) -> float:
    """Parameters that one token is multiplied with: all but the embedding and unchosen experts."""
    unchosen = shape.num_expert_params * (1 - shape.topk / (shape.num_experts or 1))
    embedding = 0 if shape.tied else shape.vocab_size * shape.hidden_size
    return shape.num_params - unchosen - embedding


def forward_flops(shape: ModelShape, tokens: float) -> float:
    """Operations per token of a forward pass over a sequence of `tokens`.

    2 per active parameter; 2 * tokens * query width per layer for causal attention.
    """
    attention = 2 * tokens * shape.num_heads * shape.head_dim * shape.num_layers
    return 2 * active_params(shape) + attention


def trace(file: Path) -> Figures:
    """Where the device's time of a traced step went; of torch's operators without a GPU."""
    with gzip.open(file, "rt") as text:
        events = [event for event in json.load(text)["traceEvents"] if "dur" in event]
    of_device = ("kernel", "gpu_memcpy", "gpu_memset")
    on_gpu = any(event["cat"] == "kernel" for event in events)
    kinds = of_device if on_gpu else ("cpu_op",)
    done = sorted((e for e in events if e["cat"] in kinds), key=lambda event: event["ts"])
    begin, end = done[0]["ts"], max(event["ts"] + event["dur"] for event in done)
    copied = [e["ts"] for e in done if "HtoD" in e["name"] and e["args"].get("bytes", 0) > 2**24]
    marks = "gpu_user_annotation" if on_gpu else "user_annotation"
    # The streamed optimizer begins with a copy to the device: no other copy is that large.
    copied += [e["ts"] for e in events if e["cat"] == marks and "Optimizer.step" in e["name"]]
    total, count = Counter[str](), Counter[str]()
    for event in done:
        total[event["name"][:90]] += event["dur"] / 1e3
        count[event["name"][:90]] += 1
    kernels = [event for event in done if event["cat"] == kinds[0]]
    return {
        "milliseconds": (end - begin) / 1e3,
        "launches": len(done),
        "idle_share": 1 - busy(done) / (end - begin),
        "without_kernel_share": 1 - busy(kernels) / (end - begin),
        "optimizer_share": (end - min(copied)) / (end - begin) if copied else 0.0,
        "largest": [[name, round(ms, 1), count[name]] for name, ms in total.most_common(20)],
    }


def busy(events: Sequence[dict[str, Any]]) -> float:
    """Time in which at least one of the events, which begin in order, runs."""
    time, last = 0.0, float("-inf")
    for event in events:
        end = event["ts"] + event["dur"]
        time += max(0.0, end - max(event["ts"], last))
        last = max(last, end)
    return time


def curves(folder: Path) -> Figures:
    """Rewards and gradient norms of the runs with and without replay, as far as they came."""
    figures: Figures = {"reward": {}, "grad_norm": {}}
    for run in filter(Path.is_dir, sorted(folder.glob("curve-*"))):
        rows = [row for row in read_metrics(run) if row["step"] > 0]
        for name, metric in (("reward", "reward/mean"), ("grad_norm", "optim/grad_norm")):
            figures[name][run.name] = [float(f"{row[metric]:.3g}") for row in rows]
    shortest = min(map(len, figures["reward"].values()), default=0)
    return figures | {"passed": shortest >= (50 if has_gpu() else 2)}


def same(first: Path, *others: Path) -> Figures:
    """Whether runs have the same figures in every step, but for those of the wall clock."""

    def figures(run: Path) -> dict[tuple[float, str], str]:
        """By step and name; text, in which NaN equals NaN."""
        return {
            (row["step"], key): repr(value)
            for row in read_metrics(run / "metrics.jsonl")
            for key, value in row.items()
            if key == "step" or not is_wall_clock(key)
        }

    expected = figures(first)
    different = {
        key
        for other in map(figures, others)
        for step, key in expected.keys() | other.keys()
        if expected.get((step, key)) != other.get((step, key))
    }
    steps = len({step for step, _ in expected})
    return {"different": sorted(different), "passed": not different and steps > 1}


EXPERIMENTS: dict[str, Callable[..., Figures]] = {
    each.__name__: each
    for each in (
        *(facts, attention, grouped, kernels, layer, stash, ipc),
        *(model, families, rows, generation, run, curves, same),
    )
}


def main() -> None:
    """Run one experiment and print its figures; exit code 1 if it did not pass."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("experiment", choices=list(EXPERIMENTS))
    parser.add_argument("paths", nargs="*", type=Path, help="of the experiments on files")
    parser.add_argument("--rehearse", action="store_true", help="small, on the CPU")
    args = parser.parse_args()
    if not (args.rehearse or has_gpu()):
        print("no GPU: torch finds no CUDA device")
        sys.exit(NO_GPU)
    figures = EXPERIMENTS[args.experiment](*args.paths)
    print(json.dumps({"experiment": args.experiment} | figures), flush=True)
    os._exit(0 if figures.get("passed", True) else 1)  # an engine leaves threads


if __name__ == "__main__":
    main()
