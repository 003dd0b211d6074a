"""Compare LoRA with full training: steps to an accuracy, memory and time of a step, engine.

    .venv/bin/python -m benchmarks.lora              nine runs and two models, half an hour

Every part writes its figures to benchmarks/results/lora.json, beside those of the other parts.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import date
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.learning_curve import TARGET, hardware, made_by, run, source
from benchmarks.train_step import MIDDLE, MIDDLE_LENGTHS, pack, random_model, recorded
from r3.assets import TINY_MOE_TIES, WORD_PROBLEMS_EVAL
from r3.config import Config, LoraConfig, ModelConfig, ParallelConfig, TrainConfig
from r3.lora.adapters import QuantisedWeight, adapters_of
from r3.lora.peft import adapter_config, write_adapter
from r3.lora.plan import adapted_tensors, quantised_tensors
from r3.models.hf_checkpoint import CheckpointReader, read_small_files
from r3.models.shape import ModelShape
from r3.policy import Policy
from r3.runtime.device import Device, free_port, init_device
from r3.runtime.mesh import Mesh, build_mesh
from r3.runtime.tensors import storage_of
from r3.sync.weights import WeightStream, export

OUT = Path(__file__).parent / "results" / "lora.json"
# Steps, and what is set beside them.
ARMS: Mapping[str, tuple[int, tuple[str, ...]]] = {
    "full": (15, ()),
    "rank 4": (10, ("--lora.rank", "4", "--train.lr", "2e-3")),
    "rank 16": (10, ("--lora.rank", "16", "--train.lr", "2e-3")),
}
SETTINGS: Mapping[str, tuple[LoraConfig, Any]] = {
    "full": (LoraConfig(), "dtype"),
    "rank 16": (LoraConfig(rank=16), "dtype"),
    "rank 16, int8 base": (LoraConfig(rank=16), "int8"),
    "rank 16, fp8 base": (LoraConfig(rank=16), "fp8"),
}


def main() -> None:
    """Run the parts that are asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", default=list(PARTS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    for name in args.parts:
        figures = PARTS[name](args.seeds)
        results = json.loads(OUT.read_text()) if OUT.exists() else {}
        results[name] = {
            "made_by": made_by(f"python -m benchmarks.lora {name}"),
            "date": date.today().isoformat(),
            "source": source(),
            "hardware": hardware(),
            **figures,
        }
        OUT.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        print(json.dumps(figures, indent=1), flush=True)
    os._exit(0)


def curves(seeds: list[int]) -> dict[str, Any]:
    """Train the preset `tiny`, evaluated after every step; the first step at `TARGET`."""
    arms: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="r3-lora-") as folder:
        for seed in seeds:
            for name, (steps, flags) in ARMS.items():
                place = Path(folder) / f"{name.replace(' ', '-')}-{seed}"
                rows, _ = run(place, seed, steps, "--eval.every", "1", *flags)
                accuracy = [
                    row["eval/heldout/accuracy"] for row in rows if "eval/heldout/accuracy" in row
                ]
                reached = (step for step, value in enumerate(accuracy) if value >= TARGET)
                arms.setdefault(name, {})[str(seed)] = {
                    "first_step_at_target": next(reached, None),
                    "heldout_accuracy": accuracy,
                    "k3_max": max(row["mismatch/k3"] for row in rows if "mismatch/k3" in row),
                }
                print(name, seed, arms[name][str(seed)], flush=True)
    return {"target": TARGET, "arms": arms}


def step(_seeds: list[int]) -> dict[str, Any]:
    """Time forward, backward and optimizer with the 52 M model in bfloat16; bytes of its state."""
    device, mesh = alone()
    with tempfile.TemporaryDirectory(prefix="r3-lora-") as folder:
        random_model(MIDDLE, Path(folder))
        shape = ModelShape.read(folder)
        policies = {}
        for name, (lora, base) in SETTINGS.items():
            config = Config(
                model=ModelConfig(path=folder, base=base),
                lora=lora,
                train=TrainConfig(micro_batch_tokens=8192),
            )
            policies[name] = Policy(config, device, mesh, shape)
    batch = recorded(policies["full"], pack(shape, MIDDLE_LENGTHS[:16]))
    seconds: dict[str, list[float]] = {name: [] for name in policies}
    for number in range(-1, 2):
        for name, policy in policies.items():
            began = time.process_time()
            policy.forward_backward(batch)
            policy.step(100)
            if number >= 0:
                seconds[name].append(time.process_time() - began)
    return {
        "parameters": shape.num_params,
        "arms": {
            name: {
                "step_s": round(min(seconds[name]), 2),
                "over_full": round(
                    median(x / y for x, y in zip(seconds[name], seconds["full"], strict=True)), 2
                ),
                **{kind: round(size / 2**20, 1) for kind, size in sizes(policy).items()},
            }
            for name, policy in policies.items()
        },
    }


def sizes(policy: Policy) -> dict[str, int]:
    """Bytes on the device, of the kinds that stay between steps, and of the base on the host."""
    policy.offload()  # frees a layer that was made
    policy.onload()
    weights = {
        storage_of(one): one.untyped_storage().nbytes()
        for chunk in policy.chunks
        for one in chunk.parameters()
    }
    host = device = 0
    for made in (one for adapters in adapters_of(policy.chunks) for one in adapters.bases):
        if isinstance(made.base, QuantisedWeight):
            device += made.base.values.nbytes + made.base.scales.nbytes
        else:
            host += made.base.nbytes
    return {
        "weights_mib": sum(weights.values()) + device,
        "gradients_mib": sum(one.nbytes for one in policy.memory.gradient_buffers()),
        "optimizer_mib": sum(one.nbytes for _, one in policy.memory.optimizer_tensors()),
        "base_on_host_mib": host,
    }


def base(_seeds: list[int]) -> dict[str, Any]:
    """Error of a quantised base of the preset's model, and what it does to log-probabilities."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device, mesh = alone()
    path, shape = str(TINY_MOE_TIES), ModelShape.read(TINY_MOE_TIES)
    rows = [json.loads(line) for line in WORD_PROBLEMS_EVAL.read_text().splitlines()[:200]]
    tokenizer = AutoTokenizer.from_pretrained(path)
    texts = [tokenizer(f"{row['question']}\n{row['answer']}").input_ids for row in rows]

    @torch.no_grad()
    def logprobs(folder: str) -> torch.Tensor:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        return torch.cat([model(torch.tensor([ids])).logits[0].log_softmax(-1) for ids in texts])

    results: dict[str, Any] = {}
    with CheckpointReader(path) as reader:
        model = {name: reader.read(name).float() for name in quantised_tensors(shape)}
    whole, expected = sum(float(one.square().sum()) for one in model.values()), logprobs(path)
    kinds: tuple[Any, ...] = ("int8", "fp8")
    for kind in kinds:
        config = Config(model=ModelConfig(path=path, base=kind), lora=LoraConfig(rank=1))
        policy = Policy(config, device, mesh, shape)
        stream = WeightStream(policy, device, mesh)
        off = sum(
            float((tensor.float() - model[name]).square().sum())
            for name, tensor in stream.read()
            if name in model
        )
        with tempfile.TemporaryDirectory(prefix="r3-lora-") as folder:
            small = read_small_files(path)
            place = Path(folder) / "model"
            export(place, stream, policy, device, mesh, small_files=small, metadata={})
            got = logprobs(str(place))
        results[kind] = {
            "weight_error": (off / whole) ** 0.5,
            "kl_mean": float((expected.exp() * (expected - got)).sum(-1).mean()),
            "first_token_changed": float((got.argmax(-1) != expected.argmax(-1)).float().mean()),
        }
    return results


def engine(_seeds: list[int]) -> dict[str, Any]:
    """Time vLLM's own adapters beside merged weights, with a dense model of 12 M parameters.

    vLLM's CPU build has no adapters for a model with experts.
    """
    from transformers import LlamaConfig, LlamaForCausalLM
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    sampling = SamplingParams(
        temperature=0, max_tokens=32, logprobs=0, ignore_eos=True, detokenize=False
    )
    prompts = [{"prompt_token_ids": list(range(5 + i, 30 + i))} for i in range(64)]
    with tempfile.TemporaryDirectory(prefix="r3-lora-") as folder:
        torch.manual_seed(0)
        LlamaForCausalLM(
            LlamaConfig(
                vocab_size=512, hidden_size=256, intermediate_size=1024, num_hidden_layers=12,
                num_attention_heads=8, num_key_value_heads=4, bos_token_id=1, eos_token_id=2,
            )
        ).save_pretrained(folder)  # fmt: skip
        shape, lora = ModelShape.read(folder), LoraConfig(rank=16)
        ranks = adapted_tensors(shape, lora)
        pairs = [
            (name, torch.randn(rank, wide) * 0.1, torch.randn(rows, rank) * 0.02)
            for name, rank in ranks.items()
            for rows, wide in [shape.tensor_shapes[name]]
        ]
        adapter = Path(folder) / "adapter"
        write_adapter(adapter, pairs, adapter_config(shape, lora, ranks, folder), lora)
        options: dict[str, Any] = dict(
            dtype="float32", enforce_eager=True, max_model_len=256, max_num_seqs=64,
            kv_cache_memory_bytes=1 << 26, skip_tokenizer_init=True,
        )  # fmt: skip
        plain = LLM(folder, **options)
        own = LLM(folder, enable_lora=True, max_lora_rank=16, max_loras=1, **options)
        requests = [LoRARequest(f"a{i}", i, str(adapter)) for i in range(1, 7)]
        arms = {"merged": (plain, None), "own adapters": (own, requests[0])}
        rates: dict[str, list[float]] = {name: [] for name in arms}
        for _ in range(6):
            for name, (llm, request) in arms.items():
                began = time.process_time()
                llm.generate(prompts, sampling, lora_request=request, use_tqdm=False)
                rates[name].append(64 * 32 / (time.process_time() - began))
        loading = []
        for request in requests[1:]:
            began = time.perf_counter()
            own.llm_engine.add_lora(request)
            loading.append(time.perf_counter() - began)
    return {
        "parameters": shape.num_params,
        "tokens_per_cpu_s": {name: round(max(rate)) for name, rate in rates.items()},
        "load_adapter_s": round(min(loading), 4),
        "adapter_mib": round(sum(4 * (a.numel() + b.numel()) for _, a, b in pairs) / 2**20, 2),
    }


PARTS: Mapping[str, Callable[[list[int]], dict[str, Any]]] = {
    "curves": curves,
    "step": step,
    "base": base,
    "engine": engine,
}


@cache
def alone() -> tuple[Device, Mesh]:
    """This process as the only rank."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
    os.environ["MASTER_PORT"] = str(free_port())
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    device = init_device()
    return device, build_mesh(device, ParallelConfig())


if __name__ == "__main__":
    main()
