"""Measured memory of each part of the memory plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from r3.algo import packing
from r3.configs.tiny import tiny_smoke
from r3.engine import Engine
from r3.models.shape import ModelShape
from r3.policy import Policy
from r3.rollout import read_task
from r3.runtime.device import Device
from r3.runtime.mesh import build_mesh
from r3.tools.planning import memory_plan as plan
from tests.engines import net_of
from tests.memory import peak_bytes
from tests.policies import one_update
from tests.tiny import random_rollouts


def engine_weight_bytes(model: Any) -> int:
    """Bytes of a vLLM model's parameters; what oneDNN packed is counted by the layer's sizes."""
    packed = sum(
        4 * module.input_size_per_partition * module.output_size_per_partition
        for module in model.modules()
        if hasattr(module, "cpu_linear")
        and hasattr(module, "input_size_per_partition")
        and not module.weight.numel()
    )
    return packed + sum(parameter.nbytes for parameter in model.parameters())


def plan_and_measurement(device: Device) -> dict[str, dict[str, tuple[int, int]]]:
    """Measure the parts of the memory plan, by setting.

    Returns:
        Bytes of one part of the memory plan, planned and measured.
    """
    config = replace(tiny_smoke(), parallel=replace(tiny_smoke().parallel, ep=1))
    mesh = build_mesh(device, config.parallel)
    task = read_task(config)
    shape: ModelShape = task.shape
    engine = Engine(config, device, shape, task.tokenizer, max_model_len=task.max_model_len)
    generate = plan.memory(config, shape, 1)["GENERATE"]
    engine.wake("weights")
    engine.wake("kv_cache")
    cache = sum(storage.nbytes() for storage in engine._sleeper._cache._storages())
    weights = engine_weight_bytes(net_of(engine))
    of_engine = {
        "engine weights": (generate["engine weights"], weights),
        "KV cache": (generate["KV cache"], cache),
    }
    found = {"engine": of_engine}
    engine.sleep()

    rollouts = random_rollouts(shape, [64] * (config.train.micro_batch_tokens // 64))
    micro_batch = packing.pack(
        rollouts,
        range(len(rollouts)),
        num_experts=shape.num_experts,
        num_layers=len(shape.moe_layers),
        topk=shape.topk,
    )
    assert micro_batch.num_tokens == config.train.micro_batch_tokens
    batch = packing.as_batch(
        (micro_batch,),
        num_loss_tokens=packing.count_loss_tokens([micro_batch]),
        num_sequences=len(rollouts),
    )
    batch = packing.with_advantages(batch, torch.ones(len(rollouts)))
    for dtype, ways in (("float32", ("none", "selective", "moe", "full")), ("bfloat16", ("none",))):
        for recompute in ways:
            # The plan is that of grouped experts, as on a GPU; fused ones keep less.
            model = replace(config.model, dtype=dtype, recompute=recompute, experts="grouped")
            setting = replace(config, model=model)
            policy = Policy(setting, device, mesh, shape)
            # The optimizer makes its state in its first step.
            one_update(policy, batch, total_updates=2)
            peak = peak_bytes(lambda policy=policy: policy.forward_backward(batch))  # type: ignore[misc]
            planned = plan.memory(setting, shape, 1)["TRAIN"]
            measured = {
                "policy weights": sum(t.nbytes for t in policy.parameter_buffers()),
                "gradients": sum(t.nbytes for t in policy.memory.gradient_buffers()),
                "optimizer": sum(t.nbytes for _, t in policy.memory.optimizer_tensors()),
            }
            outputs = planned["activations"] + planned["output layer"]
            found[f"{dtype}, recompute {recompute}"] = {
                **{name: (planned[name], size) for name, size in measured.items()},
                "activations and output layer": (outputs, peak),
            }
            del policy
    return found
