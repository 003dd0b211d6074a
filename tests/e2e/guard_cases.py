"""Mistakes that an engine must refuse, and built engines that R3 cannot use."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from r3.config import Config
from r3.engine import Engine, EngineConfigError, EngineStateError, WeightMismatch
from r3.engine.build import refuse_unfit
from r3.engine.experts import ExpertBlock
from r3.handover.memory import ResidencyError, State
from r3.handover.weights import SyncError, prove_sync
from r3.rollout.single_turn import sample_single_turn
from r3.runtime.device import Device
from r3.types import Rollout
from tests.engines import World, held_tensors, signature
from tests.errors import message_of
from tests.memory import bytes_of, lock_page, resident_bytes
from tests.tiny import tiny_config


@dataclass(frozen=True, kw_only=True)
class Guards:
    """Messages of an engine.

    Attributes:
        messages: by mistake.
        works: whether it samples after all of them.
        unfit: by fact that was changed.
        other_side: for an engine that captures routes although replay.mode is off.
        fit: for the engine as it was built.
        sleeps: the engine that sleeps and wakes several times.
    """

    messages: dict[str, str]
    works: bool
    unfit: dict[str, str]
    other_side: str
    fit: str
    sleeps: list[Sleep]


@dataclass(frozen=True, kw_only=True)
class Sleep:
    """An engine that sampled, slept and woke; every call of it was made twice.

    Attributes:
        samples: what was sampled before the sleep.
        ahead: batches that vLLM had scheduled ahead, before the sleep and in it.
        cache_bytes: of the KV cache that are in memory, before and asleep.
        cache_is_zero: whether it is all zeros, awake again.
        weights: digests of all tensors of the model, awake again and pushed.
        refused: messages of the second calls.
    """

    samples: list[str]
    ahead: list[int]
    cache_bytes: list[int]
    cache_is_zero: bool
    weights: dict[str, str]
    refused: list[str]


def engine_guards(device: Device) -> Guards:
    """Make every mistake that the engine must refuse, then use it as usual."""
    world = World(device, tiny_config())
    engine, stream = world.engine, world.stream
    messages: dict[str, str] = {}

    def provoke(name: str, action: Callable[[], object]) -> None:
        messages[name] = message_of(
            action, EngineStateError, WeightMismatch, ResidencyError, SyncError
        )

    def sample(policy_version: int = 1) -> list[Rollout]:
        return sample_single_turn(
            engine,
            world.task.prompts.prompts[:1],
            seeds=[1],
            policy_version=policy_version,
            max_tokens=4,
        )

    def push(shapes: dict[str, Any] | None = None, skip: str = "") -> None:
        weights = ((name, tensor) for name, tensor in stream.read() if name != skip)
        engine.load_weights(
            shapes if shapes is not None else stream.shapes, weights, policy_version=1
        )

    def push_blocks(change: Callable[[ExpertBlock], list[ExpertBlock]]) -> None:
        items = (
            part
            for item in stream.read_blocks()
            for part in (change(item) if isinstance(item, ExpertBlock) else [item])
        )
        engine.load_weights(stream.shapes, items, policy_version=1)

    gone = "model.layers.1.mlp.experts.3.up_proj.weight"
    provoke("push asleep", push)
    provoke("generate asleep", sample)
    provoke("cache first", lambda: engine.wake("kv_cache"))
    provoke("sleep twice", engine.sleep)
    provoke("train to generate", lambda: world.residency.move(State.GENERATE))
    world.residency.move(State.SYNC)
    provoke("wake twice", lambda: engine.wake("weights"))
    provoke("not announced", lambda: push({k: v for k, v in stream.shapes.items() if k != gone}))
    provoke("misshaped", lambda: push(stream.shapes | {gone: (3, 3)}))
    provoke("unknown", lambda: push(stream.shapes | {"model.layers.9.x": (3, 3)}))
    provoke("not delivered", lambda: push(skip=gone))
    provoke("block twice", lambda: push_blocks(lambda block: [block, block]))
    provoke(
        "narrow block",
        lambda: push_blocks(lambda block: [replace(block, tensor=block.tensor[:, 1:])]),
    )
    provoke("foreign block", lambda: push_blocks(lambda block: [replace(block, first=5)]))
    provoke(
        "short block", lambda: push_blocks(lambda block: [replace(block, tensor=block.tensor[1:])])
    )
    provoke("half pushed", lambda: (engine.wake("kv_cache"), sample()))
    push()
    provoke("cache not reset", sample)
    engine.reset_cache()
    provoke("other version", lambda: sample(policy_version=2))
    world.residency.state = State.GENERATE
    provoke("generate to sync", lambda: world.residency.move(State.SYNC))
    prove_sync(engine, world.policy, world.task.prompts.prompts[:2], world.config, world.mesh)
    world.perturb()
    provoke(
        "stale",
        lambda: prove_sync(
            engine, world.policy, world.task.prompts.prompts[:2], world.config, world.mesh
        ),
    )
    sleeps = several_sleeps(engine, sample, push)
    built = engine.llm.llm_engine.vllm_config
    return Guards(
        messages=messages,
        works=sample()[0].num_response_tokens > 0,
        unfit=_unfit(built, world.config),
        other_side=_refusal(built, world.config, capture=False),
        fit=_refusal(built, world.config, capture=True),
        sleeps=sleeps,
    )


def several_sleeps(
    engine: Engine, sample: Callable[[], list[Rollout]], push: Callable[[], None]
) -> list[Sleep]:
    """Sample, sleep and wake three times, with every call made twice."""
    core = engine.llm.llm_engine.engine_core.engine_core
    # vLLM schedules ahead on GPUs only: its queue is switched on as `EngineCore.__init__` does.
    core.batch_queue_size, core.batch_queue = 2, deque(maxlen=2)
    core.step_fn = core.step_with_batch_queue

    (tensors,) = engine.llm.collective_rpc(lambda worker: worker.model_runner.kv_caches)
    caches = [tensor.untyped_storage() for tensor in tensors]

    def cache_bytes() -> int:
        return sum(resident_bytes(storage) for storage in caches)

    def refused(action: Callable[[], object]) -> str:
        action()
        return message_of(action, EngineStateError)

    def refreshed() -> None:
        push()  # a policy that does not change
        engine.reset_cache()

    refreshed()
    found = []
    for number in range(3):
        if number == 2:
            lock_page(caches[0])  # such a cache is freed and allocated again
        samples, before, ahead = signature(sample()), cache_bytes(), len(core.batch_queue)
        messages = [refused(engine.sleep)]
        asleep, left = cache_bytes(), len(core.batch_queue)
        messages.append(refused(lambda: engine.wake("weights")))
        messages.append(message_of(engine.sleep, EngineStateError))
        messages.append(refused(lambda: engine.wake("kv_cache")))
        messages.append(message_of(sample, EngineStateError))
        refreshed()
        found.append(
            Sleep(
                samples=samples,
                ahead=[ahead, left],
                cache_bytes=[before, asleep],
                cache_is_zero=not any(bool(bytes_of(storage).any()) for storage in caches),
                weights=held_tensors(engine),
                refused=messages,
            )
        )
    return found


def _unfit(built: Any, config: Config) -> dict[str, str]:
    """Message about the built engine's config with one fact changed, for each fact R3 relies on."""
    messages = {}
    for name, value in {
        "model_config.enable_return_routed_experts": False,
        "parallel_config.tensor_parallel_size": 2,
        "parallel_config.pipeline_parallel_size": 2,
        "parallel_config.decode_context_parallel_size": 2,
        "parallel_config.prefill_context_parallel_size": 2,
        "parallel_config.data_parallel_size": 2,
        "parallel_config.enable_eplb": True,
        "parallel_config.enable_dbo": True,
        "kv_transfer_config": "connector",
        "cache_config.kv_offloading_size": 1.0,
        "cache_config.cache_dtype": "fp8",
        "offload_config.uva.cpu_offload_gb": 1.0,
        "offload_config.prefetch.offload_group_size": 2,
        "lora_config": "adapter",
        "model_config.quantization": "fp8",
        "model_config.dtype": torch.float16,
        "model_config.logprobs_mode": "raw_logprobs",
        "quant_config": "fp8",
        "speculative_config": "draft",
    }.items():
        changed = owner = copy.copy(built)
        *path, last = name.split(".")
        for part in path:
            object.__setattr__(owner, part, copy.copy(getattr(owner, part)))
            owner = getattr(owner, part)
        object.__setattr__(owner, last, value)
        messages[last] = _refusal(changed, config, capture=True)
    return messages


def _refusal(built: Any, config: Config, *, capture: bool) -> str:
    return message_of(lambda: refuse_unfit(built, config, capture=capture), EngineConfigError)
