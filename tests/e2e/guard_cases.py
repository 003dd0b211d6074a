"""Mistakes that an engine must refuse, and built engines that R3 cannot use."""

from __future__ import annotations

import copy
import os
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from r3 import extras
from r3.config import Config
from r3.engine import Engine, EngineConfigError, EngineStateError, WeightMismatch
from r3.engine.build import refuse_unfit
from r3.layers import RMSNorm as PolicyNorm
from r3.models import Experts
from r3.runtime.device import Device
from r3.sync import ResidencyError, State, SyncError
from r3.tools import prove_sync, sample_single_turn
from r3.types import Rollout
from tests.engines import World, held_tensors, net_of, signature
from tests.errors import message_of
from tests.memory import bytes_of, lock_page, resident_bytes
from tests.tiny import tiny_config


def norms(engine: Engine) -> SimpleNamespace:
    """Compare the norms that R3 replaces in an engine on CPU.

    Returns:
        The engine's norms against the policy's, with the same weights and rows.
        replaced: norms of the engine that one kernel computes, and all of them.
        farthest: largest relative difference of a float32 result, and with a residual.
        of_slices: the same for rows that are slices of longer ones.
        native_of_slices: the same for the kernel without a copy of the slices.
        in_bfloat16: share of results in bfloat16 that differ, with a residual; and vLLM's own.
        left_alone: kinds of norms that keep vLLM's own way.
    """
    from vllm._custom_ops import rms_norm
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm

    def policys(x: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        facts = SimpleNamespace(params_dtype=norm.weight.dtype, sequence_parallel=False)
        own = PolicyNorm(facts, len(norm.weight), norm.variance_epsilon)
        own.load_state_dict({"weight": norm.weight})
        return own(x)

    def far(found: torch.Tensor, expected: torch.Tensor) -> float:
        return float(((found - expected).abs() / expected.abs().clamp_min(1e-3)).max())

    built = [module for module in net_of(engine).modules() if type(module) is RMSNorm]
    with set_current_vllm_config(engine.llm.llm_engine.vllm_config):
        others = {
            "gemma": GemmaRMSNorm(64),
            "part of a row": RMSNorm(64, var_hidden_size=32),
            "no weight": RMSNorm(64, has_weight=False),
        }
        half = RMSNorm(64, dtype=torch.bfloat16)
    extras.engine_on_cpu().normalise_in_one_call([*others.values(), half])
    random = torch.Generator().manual_seed(0)
    farthest, with_residual = [], []
    with torch.no_grad():
        for norm in built:
            x, residual = torch.randn(2, 50, len(norm.weight), generator=random)
            farthest.append(far(norm(x.clone()), policys(x, norm)))
            normed, summed = norm(x.clone(), residual.clone())
            assert torch.equal(summed, x + residual)
            with_residual.append(far(normed, policys(x + residual, norm)))
        norm = built[0]
        longer = torch.randn(50, 3 * len(norm.weight), generator=random)
        slices = longer[:, : len(norm.weight)]
        added = torch.randn(50, len(norm.weight), generator=random)
        wrong = torch.empty_like(slices, memory_format=torch.contiguous_format)
        rms_norm(wrong, slices, norm.weight, norm.variance_epsilon)
        half.weight.copy_(1 + torch.randn(64, generator=random) / 5)
        x, residual = torch.randn(2, 200, 64, generator=random).bfloat16()
        expected = policys(x + residual, half)
        native, _ = half.forward_native(x.clone(), residual.clone())
        return SimpleNamespace(
            replaced=(
                sum(not hasattr(each._forward_method, "__self__") for each in built),
                len(built),
            ),
            farthest=(max(farthest), max(with_residual)),
            of_slices=max(
                far(norm(slices), policys(slices, norm)),
                far(norm(slices, added)[0], policys(slices + added, norm)),
            ),
            native_of_slices=far(wrong, policys(slices, norm)),
            in_bfloat16=tuple(
                float((each != expected).float().mean()) for each in (half(x, residual)[0], native)
            ),
            left_alone=[
                kind for kind, each in others.items() if hasattr(each._forward_method, "__self__")
            ],
        )


def rotations(engine: Engine) -> tuple[float, float]:
    """Share of rotated numbers that are the nearest bfloat16, with R3's layer and with vLLM's."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    sizes: dict[str, Any] = {"rotary_dim": 32, "max_position_embeddings": 128, "base": 10000}
    with set_current_vllm_config(engine.llm.llm_engine.vllm_config):
        rotary = RotaryEmbedding(32, is_neox_style=True, dtype=torch.bfloat16, **sizes)
    random = torch.Generator().manual_seed(0)
    positions = torch.randint(0, 128, (100,), generator=random)
    query, key = (torch.randn(100, n * 32, generator=random).bfloat16() for n in (4, 2))
    cos, sin = rotary.cos_sin_cache[positions].bfloat16().double()[:, None].chunk(2, dim=-1)

    def share() -> float:
        found = [*rotary(positions, query.clone(), key.clone())]
        equal = []
        for heads, rows in zip((query, key), found, strict=True):
            x, y = heads.double().view(100, -1, 32).chunk(2, dim=-1)
            exact = torch.cat([x * cos - y * sin, y * cos + x * sin], -1).bfloat16()
            equal.append((rows.view(100, -1, 32) == exact).double().mean())
        return float(min(equal))

    by_vllm = share()
    extras.engine_on_cpu().rotate_to_nearest([rotary])
    return share(), by_vllm


REFUSALS = (EngineStateError, WeightMismatch, ResidencyError, SyncError, AssertionError)


def refuses(action: Callable[[], object], said: str) -> None:
    """Require that an action is refused with this text."""
    message = message_of(action, *REFUSALS)
    assert said in message, message


def engine_guards(device: Device) -> SimpleNamespace:
    """Make every mistake that the engine must refuse, then use it as usual.

    Returns:
        works: whether the engine samples after all of them.
        unfit: by fact that was changed.
        fit: for the engine as it was built.
        sleeps: the engine that sleeps and wakes several times.
        norms: its norms against the policy's.
        rotated: share of rotated numbers that are the exact ones, rounded to the nearest bfloat16.
        rotated_by_vllm: the same without R3.
        inspected_here: whether vLLM's registry inspects a new model in this process.
    """
    world = World(device, tiny_config())
    engine, stream = world.engine, world.stream

    def sample(policy_version: int = 1) -> list[Rollout]:
        return sample_single_turn(
            engine,
            world.task.prompts.prompts[:1],
            seeds=[1],
            policy_version=policy_version,
            max_tokens=4,
        )

    def push(
        shapes: dict[str, Any] | None = None, change: Callable[[Any], list[Any]] | None = None
    ) -> None:
        """Push with other announced shapes, or with other tensors of experts."""
        blocks = (
            part
            for key, full in stream.read_blocks()
            for part in ([(key, full)] if change is None else change((key, full)))
        )
        given = SimpleNamespace(shapes=shapes or stream.shapes, read_blocks=lambda _: blocks)
        engine.load_weights(given, policy_version=1)

    def without_gate_and_up(item: Any) -> list[Any]:
        key, _ = item
        is_it = isinstance(key, Experts) and (key.layer, key.part) == (1, "linear_fc1.weight")
        return [] if is_it else [item]

    def without_last(item: Any) -> list[Any]:
        key, full = item
        if not isinstance(key, Experts):
            return [item]
        return [(replace(key, count=key.count - 1), full[:-1])]

    gone = "model.layers.1.mlp.experts.3.up_proj.weight"
    refuses(push, "call wake('weights') first")
    refuses(sample, "kv_cache and weights sleep")
    refuses(lambda: engine.wake("kv_cache"), "before wake('weights')")
    refuses(engine.sleep, "asleep already")
    refuses(lambda: world.residency.move(State.GENERATE), "memory is in state TRAIN")
    world.residency.move(State.SYNC)
    refuses(lambda: engine.wake("weights"), "awake already")
    refuses(lambda: push({k: v for k, v in stream.shapes.items() if k != gone}), f"missing {gone}")
    refuses(lambda: push(stream.shapes | {gone: (3, 3)}), "has shape (3, 3)")
    refuses(lambda: push(stream.shapes | {"model.layers.9.x": (3, 3)}), "unknown model.layers.9.x")
    old = "left at its old value: model.layers"
    refuses(lambda: push(change=without_gate_and_up), f"{old}.1.mlp.experts.w13_weight")
    refuses(lambda: push(change=without_last), f"{old}.0.mlp.experts.w2_weight")
    # After a load that stopped half-way, the tensors with adapters are not enough.
    some = {"policy_version": 1, "only": {gone}}
    others = "load_weights of some tensors: the engine has no others"
    refuses(lambda: engine.load_weights(stream, **some), others)
    assert engine.needed({gone}) is None
    refuses(lambda: (engine.wake("kv_cache"), sample()), "the engine holds version -1")
    push()
    refuses(sample, "without reset_cache()")
    engine.reset_cache()
    refuses(lambda: sample(policy_version=2), "holds version 1")
    world.residency.state = State.GENERATE
    refuses(lambda: world.residency.move(State.SYNC), "memory is in state GENERATE")
    proof = engine, world.policy, world.task.prompts.prompts[:2], world.config, world.mesh
    prove_sync(*proof)
    world.perturb()
    refuses(lambda: prove_sync(*proof), "does not have the policy's weights")
    capture_guards(engine)
    found = SimpleNamespace(sleeps=several_sleeps(engine, sample, push), norms=norms(engine))
    found.rotated, found.rotated_by_vllm = rotations(engine)
    from vllm.model_executor.models import registry

    built = engine.llm.llm_engine.vllm_config
    found.unfit, found.fit = _unfit(built, world.config), _refusal(built, world.config)
    found.inspected_here = registry._run_in_subprocess(os.getpid) == os.getpid()
    found.works = sample()[0].num_response_tokens > 0
    return found


def capture_guards(engine: Engine) -> None:
    """Routes that cannot be captured are refused."""
    routes = engine._routes
    assert routes is not None
    table = routes._table

    layers = "the engine has routers in layers [0, 1, 2, 3], the model in [1, 2, 3]"
    refuses(lambda: type(routes)(engine.llm, table.layers[1:]), layers)
    few = "1 blocks of 32 tokens cannot hold the routes of 33 tokens"
    refuses(lambda: table.read([1], 0, table.block_size + 1), few)
    runner = table._runner
    del runner.r3_routes
    refuses(lambda: type(routes)(engine.llm, table.layers), "this engine captures no routes")
    runner.r3_routes = table
    batch, table._batch = table._batch, None
    refuses(lambda: table.read([1], 0, 1), "vLLM replaced its input batch")
    table._batch = batch


def several_sleeps(
    engine: Engine, sample: Callable[[], list[Rollout]], push: Callable[[], None]
) -> list[SimpleNamespace]:
    """Sample, sleep and wake three times, with every call made twice.

    Returns:
        An engine that sampled, slept and woke; every call of it was made twice.
        samples: what was sampled before the sleep.
        ahead: batches that vLLM had scheduled ahead, before the sleep and in it.
        cache_bytes: of the KV cache that are in memory, before and asleep.
        cache_is_zero: whether it is all zeros, awake again.
        weights: digests of all tensors of the model, awake again and pushed.
        refused: messages of the second calls.
    """
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
            SimpleNamespace(
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
        messages[last] = _refusal(changed, config)
    return messages


def _refusal(built: Any, config: Config) -> str:
    return message_of(lambda: refuse_unfit(built, config), EngineConfigError)
