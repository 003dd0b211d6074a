"""Settings and sizes of models that a device cannot run."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from r3.config import Config, Problem
from r3.models.shape import ModelShape

_CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # vLLM 0.30's attention on CPU


def device_problems(config: Config, shape: ModelShape, *, is_cuda: bool) -> list[Problem]:
    """Everything that keeps a config from running on this kind of device."""
    if is_cuda:
        return [*_allocator_problems(os.environ), *_cuda_expert_problems(config, shape)]
    return _cpu_engine_problems(config, shape) if config.uses_engine else []


def _cpu_engine_problems(config: Config, shape: ModelShape) -> list[Problem]:
    """Sizes of a model that vLLM 0.30's CPU kernels cannot run or take new weights into."""
    sizes: list[tuple[str, int, bool, str]] = []
    if shape.latent:
        cached = shape.latent.kv_rank + shape.latent.rope_size
        sizes.append(("kv_lora_rank + qk_rope_head_dim", cached, cached == 576, "is 512 + 64"))
    else:
        known = ", ".join(map(str, _CPU_HEADS))
        sizes.append(
            ("head_dim", shape.head_dim, shape.head_dim in _CPU_HEADS, f"is one of {known}")
        )
    if shape.delta:
        for name, size in (
            ("linear_key_head_dim", shape.delta.key_size),
            ("linear_value_head_dim", shape.delta.value_size),
        ):
            sizes.append((name, size, size in (64, 128), "is 64 or 128"))
    if shape.moe_layers:
        width, tp = shape.moe_ffn_size, config.parallel.engine_tp
        per_rank = f" on each of the {tp} ranks of an engine" if tp > 1 else ""
        rule = f"is a multiple of 32{per_rank}"
        sizes.append(("the experts' width", width, width % (32 * tp) == 0, rule))
        sizes.append(
            ("hidden_size", shape.hidden_size, shape.hidden_size % 32 == 0, "is a multiple of 32")
        )
    problems = []
    half = "gated delta layers" if shape.delta else "attention with sinks" if shape.sinks else ""
    if half and config.engine.dtype == "float32":
        rule = f"vLLM computes {half} on CPU in bfloat16 only"
        fix = "use --engine.dtype bfloat16 and --model.dtype bfloat16"
        problems.append(Problem("engine.dtype", config.engine.dtype, rule, fix))
    return problems + [
        config.model.problem(
            f"{name} is {size}, and the engine runs on CPU only if it {rule}",
            "run on a GPU, or use a model of such a size",
        )
        for name, size, fits, rule in sizes
        if not fits
    ]


def _cuda_expert_problems(config: Config, shape: ModelShape) -> list[Problem]:
    """Experts whose rows the grouped product refuses on CUDA: they must begin at 16 bytes."""
    parallel = config.parallel
    width = shape.moe_ffn_size // parallel.experts_tp
    multiple = 8 if config.model.dtype == "bfloat16" else 4
    if not shape.moe_layers or config.model.experts == "sequential":
        return []
    return [
        Problem(
            "model.experts",
            config.model.experts,
            f"{name} is {size}, and the grouped product takes multiples of {multiple} on CUDA",
            "set model.experts sequential",
        )
        for name, size in (
            ("the experts' width per rank", width),
            ("hidden_size", shape.hidden_size),
        )
        if size % multiple
    ]


def _allocator_problems(environment: Mapping[str, str]) -> list[Problem]:
    """Settings of torch's CUDA allocator under which ranks cannot share weights.

    Memory of expandable segments has no IPC handle. vLLM's sleep mode refuses them too, but reads
    the first of these variables only.
    """
    return [
        Problem(
            name,
            environment[name],
            "ranks share weights as memory handles, which expandable segments do not have",
            f"leave expandable_segments out of {name}",
        )
        for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
        if re.search(r"expandable_segments\s*:\s*true", environment.get(name, ""), re.IGNORECASE)
    ]
