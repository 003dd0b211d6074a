"""Time the forward and backward pass of one optimizer step.

    .venv/bin/python -m benchmarks.train_step                one process, ten minutes on one core

The arms are replay on and off, packed and padded sequences, the ways to run experts, bfloat16, and
transformers.

All arms compute the loss and all gradients of the same tokens with the same random Qwen3-MoE of 64
experts and 28 M parameters. Precisions are compared once more with the 52 M model of
`against_trl.py`, on one of two ranks' share of its step.

Every round runs each arm once, in another order. A ratio is the median over the rounds of the two
times of one round, so other load on the machine affects both sides alike. The report also has the
ratio of the fastest times. Replayed routes are the live choices, recorded beforehand, so both arms
send equally many tokens to every expert. The script writes train_step.json to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.learning_curve import PACKAGES, ROOT, hardware, made_by, source
from r3.algo import packing
from r3.config import Config, ModelConfig, ReplayConfig, TrainConfig
from r3.models.shape import ModelShape
from r3.policy import Policy
from r3.runtime.device import Device, free_port, init_device
from r3.runtime.mesh import Mesh, build_mesh
from r3.types import Batch, MicroBatch, Rollout

MODEL = dict(
    vocab_size=4096,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=32,
    num_experts=64,
    num_experts_per_tok=8,
    moe_intermediate_size=128,
    norm_topk_prob=True,
    max_position_embeddings=2048,
    tie_word_embeddings=False,
)
# 52 million parameters; the embedded tokenizer has 512 tokens.
MIDDLE = MODEL | dict(vocab_size=512, num_hidden_layers=8, eos_token_id=2, pad_token_id=0)
MIDDLE_LENGTHS = [240] * 32  # half of 64 responses of 210 tokens, with prompts of 30
Arms = dict[str, Callable[[], Any]]
BARS: dict[str, tuple[str, str, float]] = {
    # name -> (numerator, denominator, target for the ratio of their times)
    "live / replay": ("live", "replay", 0.98),  # replay costs at most 2 %
    "padded / packed": ("padded", "packed", 1.5),
    "transformers / r3": ("transformers", "equal", 1.0),
    "grouped / fused": ("grouped", "packed", 1.0),
    "sequential / fused": ("sequential", "packed", 1.0),
    "float32 / bfloat16": ("packed", "bfloat16", 1.6),
}


def main() -> None:
    """Build the arms, run them in turns and write the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    os.environ.update(
        RANK="0",
        LOCAL_RANK="0",
        WORLD_SIZE="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(free_port()),
    )
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # `init_device` hands it to torch
    device = init_device()

    mesh = build_mesh(device, Config().parallel)
    models = {"28 M": small_model(device, mesh), "52 M": middle_model(device, mesh)}
    results = {
        name: (lengths, take_turns(arms, args.rounds)) for name, (lengths, arms) in models.items()
    }
    report(args.out, results)
    os._exit(0)


def small_model(device: Device, mesh: Mesh) -> tuple[list[int], Arms]:
    """Lengths of the sequences and all arms, with the 28 M model."""
    with tempfile.TemporaryDirectory(prefix="r3-train-step-") as folder:
        hf = random_model(MODEL, Path(folder))
        config = Config(
            model=ModelConfig(path=folder, dtype="float32"),
            train=TrainConfig(micro_batch_tokens=8192),
        )
        shape = ModelShape.read(folder)
        live = Policy(replace(config, replay=ReplayConfig(mode="off")), device, mesh, shape)
        fused, grouped, sequential = (
            Policy(replace(config, model=replace(config.model, experts=kind)), device, mesh, shape)
            for kind in ("fused", "grouped", "sequential")
        )
        short = replace(config, model=replace(config.model, dtype="bfloat16"))
        bfloat16 = Policy(short, device, mesh, shape)

    rng = np.random.default_rng(0)
    ragged = np.clip(np.exp(rng.normal(4.8, 0.7, 24)), 16, 1024).astype(int).tolist()
    even = [128] * (sum(ragged) // 128)
    packed = recorded(fused, pack(shape, ragged))
    padded = recorded(fused, pack(shape, ragged, pad_to=max(ragged)))
    equal = recorded(fused, pack(shape, even))
    agree(hf, equal, fused)
    return ragged, {
        "packed": lambda: fused.forward_backward(packed),
        "bfloat16": lambda: bfloat16.forward_backward(packed),
        "padded": lambda: fused.forward_backward(padded),
        "grouped": lambda: grouped.forward_backward(packed),
        "sequential": lambda: sequential.forward_backward(packed),
        "replay": lambda: fused.forward_backward(packed),
        "live": lambda: live.forward_backward(packed),
        "equal": lambda: fused.forward_backward(equal),
        "transformers": lambda: in_transformers(hf, equal),
    }


def middle_model(device: Device, mesh: Mesh) -> tuple[list[int], Arms]:
    """Lengths of the sequences and the arms of both precisions, with the 52 M model."""
    with tempfile.TemporaryDirectory(prefix="r3-train-step-") as folder:
        random_model(MIDDLE, Path(folder))
        shape = ModelShape.read(folder)
        policies = []
        for dtype in ("float32", "bfloat16"):
            config = Config(
                model=ModelConfig(path=folder, dtype=dtype),
                train=TrainConfig(micro_batch_tokens=8192),
            )
            policies.append(Policy(config, device, mesh, shape))
    packed = recorded(policies[0], pack(shape, MIDDLE_LENGTHS))
    float32, bfloat16 = policies
    return MIDDLE_LENGTHS, {
        "packed": lambda: float32.forward_backward(packed),
        "bfloat16": lambda: bfloat16.forward_backward(packed),
    }


def random_model(sizes: dict[str, Any], folder: Path) -> Any:
    """Build a random Qwen3-MoE in transformers, and save it for the policy too.

    Its experts run one after the other ("eager").
    """
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes)).float()
    model.set_experts_implementation("eager")
    model.set_attn_implementation("sdpa")
    model.save_pretrained(folder)
    return model


def pack(shape: ModelShape, lengths: Sequence[int], *, pad_to: int = 1) -> Batch:
    """Pack random rollouts as the batch of one optimizer step.

    Args:
        shape: of the model.
        lengths: tokens per rollout.
        pad_to: every sequence is padded to a multiple of it.
    """
    rng = np.random.default_rng(1)
    rollouts = []
    for index, length in enumerate(lengths):
        mask_T = (np.arange(length) >= length // 4).astype(np.float32)
        routes = np.argsort(rng.random((length - 1, len(shape.moe_layers), shape.num_experts)), -1)
        rollouts.append(
            Rollout(
                prompt_id=str(index),
                group=index,
                sample_index=0,
                tokens_T=rng.integers(0, shape.vocab_size, length),
                loss_mask_T=mask_T,
                logprobs_T=-8 * mask_T,
                routed_experts=routes[..., : shape.topk].astype(np.int8),
                finish_reason="stop",
                policy_version=0,
                response="",
            )
        )
    (plan,) = packing.plan_updates(
        [-(-length // pad_to) * pad_to for length in lengths],
        list(range(len(lengths))),
        num_updates=1,
        num_ranks=1,
        micro_batch_tokens=8192,
        multiple=pad_to,
    )
    micro_batches = tuple(
        packing.pack(
            [rollouts[i] for i in members],
            members,
            num_experts=shape.num_experts,
            num_layers=len(shape.moe_layers),
            topk=shape.topk,
            multiple=pad_to,
            sequence_multiple=pad_to,
        )
        for members in plan.micro_batches[0]
    )
    batch = packing.as_batch(
        micro_batches,
        num_loss_tokens=packing.count_loss_tokens(micro_batches),
        num_sequences=len(lengths),
    )
    return packing.with_advantages(batch, 1.0 - 2.0 * (torch.arange(len(lengths)) % 2))


def recorded(policy: Policy, batch: Batch) -> Batch:
    """Return the batch with the policy's own live choices as its routes."""
    routes = policy.score(batch, mode="record").ledger.recorded
    return tuple(
        replace(one, routed_experts_NLK=chosen_NLK.to(one.routed_experts_NLK.dtype))
        for one, chosen_NLK in zip(batch, routes, strict=True)
    )


def in_transformers(hf: Any, batch: Batch) -> torch.Tensor:
    """Compute the same loss and gradients with transformers.

    All sequences have the same length, so the rows need no padding.
    """
    hf.zero_grad(set_to_none=True)
    total = torch.zeros(())
    for micro_batch in batch:
        loss = hf_loss(hf, micro_batch) / micro_batch.num_loss_tokens
        loss.backward()
        total += loss.detach()
    return total


def hf_loss(hf: Any, micro_batch: MicroBatch) -> torch.Tensor:
    """Return the sum over loss tokens of -A log p.

    Its gradient is that of the clipped loss at its first update.
    """
    rows = len(micro_batch.cu_seqlens) - 1
    tokens_RT = micro_batch.tokens_N.view(rows, -1)
    logits_RTV = hf(tokens_RT).logits
    logprobs_N = logits_RTV.flatten(0, 1).log_softmax(-1)
    logprobs_N = logprobs_N.gather(-1, micro_batch.targets_N[:, None]).squeeze(-1)
    return -(logprobs_N * micro_batch.advantages_N * micro_batch.loss_mask_N).sum()


def agree(hf: Any, batch: Batch, policy: Policy) -> None:
    """Assert that both compute the same: gradients of the head differ by less than 1e-4.

    Times of different computations could not be compared.
    """
    policy.forward_backward(batch)
    in_transformers(hf, batch)
    head = next(slot for slot in policy.slots if "output_layer" in slot.name)
    parameter = next(
        p for p in policy.chunks[0].parameters() if p.data_ptr() == head.tensor.data_ptr()
    )
    expected, gradient = hf.lm_head.weight.grad, parameter.main_grad
    difference = float((gradient - expected).norm() / expected.norm())
    assert difference < 1e-4, f"gradients of the two differ by {difference:.1e}"


def take_turns(arms: Arms, rounds: int) -> dict[str, list[float]]:
    """Return the processor seconds of every arm in every round, without a first warm-up round.

    Each round starts with another arm. Arms have one thread, so nothing waits.
    """
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    names = list(arms)
    for number in range(-1, rounds):
        start = number % len(names)
        for name in [*names[start:], *names[:start]]:
            began = time.process_time()
            arms[name]()
            if number >= 0:
                seconds[name].append(time.process_time() - began)
        print(f"round {number + 1} of {rounds}", flush=True)
    return seconds


def report(out: Path, measured: dict[str, tuple[list[int], dict[str, list[float]]]]) -> None:
    """Write figures of every model: lengths of its sequences, and seconds of its arms."""
    results = {
        "what": "forward and backward of a step, random Qwen3-MoE, 64 experts, one thread",
        "made_by": made_by("python -m benchmarks.train_step"),
        "date": date.today().isoformat(),
        "source": source(),
        "hardware": hardware(),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in PACKAGES},
        },
        "load_average_after": round(os.getloadavg()[0], 1),
        "models": {
            name: {"sizes": sizes, "lengths": lengths} | figures(name, seconds)
            for (name, (lengths, seconds)), sizes in zip(
                measured.items(), (MODEL, MIDDLE), strict=True
            )
        },
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "train_step.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def figures(model: str, seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Print and return ratios with their spread and whether each target is reached."""
    ratios: dict[str, Any] = {}
    for name, (over, under, bar) in BARS.items():
        if over not in seconds or under not in seconds:
            continue
        quotients = sorted(a / b for a, b in zip(seconds[over], seconds[under], strict=True))
        middle = statistics.median(quotients)
        fastest = min(seconds[over]) / min(seconds[under])
        ratios[name] = {
            "median": round(middle, 3),
            "of_fastest": round(fastest, 3),
            "quartiles": [
                round(quotients[len(quotients) // 4], 3),
                round(quotients[-1 - len(quotients) // 4], 3),
            ],
            "bar": bar,
            "reached": middle >= bar,
        }
        verdict = f"(bar {bar}){' NOT REACHED' if middle < bar else ''}"
        print(f"{model} {name:28} {middle:.3f}, of the fastest {fastest:.3f}  {verdict}")
    return {
        "ratios": ratios,
        "median_seconds": {
            name: round(statistics.median(times), 3) for name, times in seconds.items()
        },
        "seconds": {name: [round(value, 3) for value in times] for name, times in seconds.items()},
    }


if __name__ == "__main__":
    main()
