"""What the parts of the memory plan really take, counted tensor by tensor and allocation by
allocation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from r3.algo import packing
from r3.cli import memory_plan as plan
from r3.configs.tiny import tiny_smoke
from r3.engine import Engine
from r3.models.shape import ModelShape
from r3.policy import Policy
from r3.rollout.task import read_task
from r3.runtime.device import Device
from r3.runtime.mesh import build_mesh
from r3.types import Batch
from tests.tiny import random_rollouts


def peak_bytes(work: Callable[[], Any]) -> int:
    """Most bytes that `work` had allocated at one time, beyond what was there before: torch's own
    record of allocations.
    """
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        work()
    assert profile.profiler is not None
    events: Sequence[Any] = profile.profiler.kineto_results.events()
    live = peak = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def engine_weight_bytes(model: Any) -> int:
    """Bytes of a vLLM model's parameters. What oneDNN has packed out of torch's sight is counted by
    the layer's sizes.
    """
    packed = sum(
        4 * module.input_size_per_partition * module.output_size_per_partition
        for module in model.modules()
        if hasattr(module, "cpu_linear")
        and hasattr(module, "input_size_per_partition")
        and not module.weight.numel()
    )
    return packed + sum(parameter.nbytes for parameter in model.parameters())


def plan_and_measurement(device: Device) -> dict[str, dict[str, tuple[float, float]]]:
    """Per setting and part of the plan: bytes planned, bytes measured."""
    config = replace(tiny_smoke(), parallel=replace(tiny_smoke().parallel, ep=1))
    mesh = build_mesh(device, config.parallel)
    task = read_task(config)
    shape: ModelShape = task.shape
    engine = Engine(config, device, shape, task.tokenizer, max_model_len=task.max_model_len)
    runner: Any = engine.llm.llm_engine.model_executor
    model = runner.driver_worker.worker.model_runner.get_model()
    generate = plan.memory(config, shape, 1)["GENERATE"]
    engine.wake("weights")
    engine.wake("kv_cache")
    found = {
        "engine": {
            "engine weights": (generate["engine weights"], engine_weight_bytes(model)),
            "KV cache": (
                generate["KV cache"],
                sum(storage.nbytes() for storage in engine._sleeper._kv_storages()),
            ),
        }
    }
    engine.sleep()

    rollouts = random_rollouts(shape, [64] * (config.train.micro_batch_tokens // 64))
    micro_batch = packing.pack(
        rollouts,
        range(len(rollouts)),
        [1.0] * len(rollouts),
        num_experts=shape.num_experts,
        num_layers=len(shape.moe_layers),
        topk=shape.topk,
    )
    assert micro_batch.num_tokens == config.train.micro_batch_tokens
    batch = Batch(
        micro_batches=(micro_batch,),
        num_loss_tokens=packing.count_loss_tokens([micro_batch]),
        num_sequences=len(rollouts),
    )
    for dtype in ("float32", "bfloat16"):
        for recompute in ("none", "moe", "full"):
            setting = replace(config, model=replace(config.model, dtype=dtype, recompute=recompute))
            policy = Policy(setting, device, mesh, shape)
            policy.update(batch, total_updates=2)  # the optimizer makes its state in its first step
            peak = peak_bytes(lambda policy=policy: policy.forward_backward(batch))  # type: ignore[misc]
            train = plan.memory(setting, shape, 1)["TRAIN"]
            found[f"{dtype}, recompute {recompute}"] = {
                "policy weights": (
                    train["policy weights"],
                    sum(t.nbytes for t in policy.parameter_buffers()),
                ),
                "gradients": (
                    train["gradients"],
                    sum(t.nbytes for t in policy.memory.gradient_buffers()),
                ),
                "optimizer": (
                    train["optimizer"],
                    sum(tensor.nbytes for _, tensor in policy.memory.optimizer_tensors()),
                ),
                "activations and output layer": (
                    train["activations"] + train["output layer"],
                    peak,
                ),
            }
            del policy
    return found
