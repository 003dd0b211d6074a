"""One supervised update of the same rows under many layouts, and by transformers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from r3 import extras
from r3.algo.packing import with_advantages
from r3.config import OF_OBJECTIVE, Config, with_values
from r3.metrics import Mean
from r3.policy import Policy
from r3.policy.weight_slots import named
from r3.rollout import Task, read_task
from r3.runtime.device import Device
from r3.runtime.mesh import Mesh
from r3.sync import PackingSpec, distribute
from r3.types import Batch
from tests.policies import build, full_gradients, one_update
from tests.tiny import tiny_config


def _task(rows: str, model: str, **sections: Any) -> tuple[Config, Task]:
    config = tiny_config(
        model,
        data={"path": (rows,), "prompt_key": "messages", "answer_key": ""},
        train={"objective": "sft", "lr": 1e-3, "micro_batch_tokens": 256},
        rollout={"prompts_per_step": 12},
        eval={"path": (), "max_prompts": ()},
        **sections,
    )
    config = with_values(config, OF_OBJECTIVE["sft"])
    return config, read_task(config)


def _batch(policy: Policy, mesh: Mesh, task: Task) -> Batch:
    scored, _ = extras.rows_of_step(task, policy.config, mesh.world, 1)
    spec = PackingSpec.of_step(policy.config, policy.replay.layers, 0)
    (batch,), _ = distribute(scored, mesh, policy.shape, spec)
    return with_advantages(batch, torch.ones(len(task.prompts.prompts)))


def update(device: Device, *, data: str, model: str, parallel: dict[str, int]) -> SimpleNamespace:
    """Learn all rows in one update.

    Returns:
        One update.
        nll: sum of -log pi over this rank's loss tokens, and their number.
        loss: this rank's share.
        replayed: whether any router replayed or recorded a route.
        mismatch: keys of metrics that compare with an engine.
    """
    config, task = _task(data, model, parallel=parallel)
    mesh, policy = build(device, config)
    found, metrics = one_update(policy, _batch(policy, mesh, task), total_updates=1)
    nll: Mean = metrics.get("loss/nll", Mean(0.0, 0.0))
    loss: Mean = metrics.get("loss/total", Mean(0.0, 0.0))
    return SimpleNamespace(
        nll=(nll.total, nll.count),
        loss=loss.total,
        grad_norm=found.grad_norm,
        replayed=any(key.startswith("routing/rows_replayed") for key in metrics),
        mismatch=[key for key in metrics if key.startswith("mismatch/")],
    )


def against_transformers(device: Device, *, data: str, model: str) -> SimpleNamespace:
    """Loss and gradients of all rows, against the cross-entropy of transformers row by row.

    Returns:
        Cross-entropy by both, and the largest relative error of a tensor's gradient by its name.
    """
    from transformers import AutoModelForCausalLM

    config, task = _task(data, model)
    mesh, policy = build(device, config)
    batch = _batch(policy, mesh, task)
    metrics = policy.forward_backward(batch)
    own = {
        name: part
        for slot in policy.slots
        for name, part in named(slot, full_gradients(policy)[slot.name][2], policy.shape)
    }
    reference = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
    expected = tokens = 0.0
    for row in task.prompts.prompts:
        ids = torch.tensor([row.tokens_T])
        labels = torch.full_like(ids, -100)  # what transformers leaves out
        for first, end in row.spans:
            labels[0, first:end] = ids[0, first:end]
            tokens += end - first
        loss = torch.nn.functional.cross_entropy(
            reference(ids).logits[0, :-1], labels[0, 1:], reduction="sum"
        )
        loss.backward()
        expected += float(loss)
    theirs = _by_checkpoint_name(reference)
    assert theirs.keys() == own.keys()
    errors = {
        name: float(
            (own[name] * tokens - theirs[name]).norm() / theirs[name].norm().clamp(min=1e-6)
        )
        for name in own
    }
    return SimpleNamespace(
        loss=metrics["loss/total"].total,
        expected=expected / tokens,
        tokens=batch[0].num_loss_tokens,
        errors=errors,
    )


def _by_checkpoint_name(model: Any) -> dict[str, torch.Tensor]:
    """Gradients under the names of the checkpoint, which has a tensor per expert."""
    found: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(gradient):
                prefix = f"{name.removesuffix('.gate_up_proj')}.{expert}"
                found[f"{prefix}.gate_proj.weight"], found[f"{prefix}.up_proj.weight"] = both.chunk(
                    2
                )
        elif name.endswith("experts.down_proj"):
            for expert, down in enumerate(gradient):
                found[f"{name.removesuffix('.down_proj')}.{expert}.down_proj.weight"] = down
        else:
            found[name] = gradient
    return found
