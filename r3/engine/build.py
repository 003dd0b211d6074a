"""Builds an in-process vLLM engine inside an existing process group, and undoes what its constructor does to the process."""

from __future__ import annotations

import gc
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from r3.runtime.device import preserved_random_state

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.config import VllmConfig

    from r3.config import Config
    from r3.runtime.device import Device

# KV cache on CPU when the config does not say: enough for a small model, small enough for a laptop.
DEFAULT_CPU_KV_CACHE_BYTES = 256 << 20
_OVERWRITTEN_ENVIRONMENT = ("LOCAL_WORLD_SIZE", "LD_PRELOAD", "LD_LIBRARY_PATH")


class EngineConfigError(RuntimeError):
    """The engine that was built is not the one that routes, weights and log-probabilities can be trusted from."""


def refuse_unfit(built: VllmConfig, config: Config, *, capture: bool) -> None:
    """Compare what vLLM made of its arguments with what r3 relies on; raises `EngineConfigError` with every difference.

    Asked of the built engine and not of the arguments: defaults, the environment, the checkpoint's config.json and a later
    field of `EngineConfig` all end here.
    """
    model, parallel, cache, offload = (
        built.model_config,
        built.parallel_config,
        built.cache_config,
        built.offload_config,
    )
    dtype = config.engine.dtype
    rows = "rows are read by KV slot: a block that leaves the device takes its routes along"
    ids = "ids returned would not be the checkpoint's experts"
    one_token = "a row of routes and a log-probability belong to one sampled token"
    pushed = "the weight sync writes plain full tensors into the engine"
    facts: tuple[tuple[str, Any, Any, str], ...] = (
        (
            "enable_return_routed_experts",
            model.enable_return_routed_experts,
            capture,
            "engine and replay.mode must agree: routes are captured on both sides or on none",
        ),
        (
            "tensor_parallel_size",
            parallel.tensor_parallel_size,
            config.parallel.engine_tp,
            "as configured",
        ),
        (
            "pipeline_parallel_size",
            parallel.pipeline_parallel_size,
            1,
            "a stage captures its own layers only",
        ),
        (
            "decode_context_parallel_size",
            parallel.decode_context_parallel_size,
            1,
            "a rank captures a part only",
        ),
        (
            "prefill_context_parallel_size",
            parallel.prefill_context_parallel_size,
            1,
            "a rank captures a part only",
        ),
        (
            "data_parallel_size",
            parallel.data_parallel_size,
            1,
            "r3 has an engine of its own for each such rank",
        ),
        ("enable_eplb", parallel.enable_eplb, False, f"experts move between slots, {ids}"),
        (
            "enable_dbo",
            parallel.enable_dbo,
            False,
            "half batches would be captured over one another",
        ),
        ("kv_transfer_config", built.kv_transfer_config, None, rows),
        ("kv_offloading_size", cache.kv_offloading_size, None, rows),
        ("cpu_offload_gb", offload.uva.cpu_offload_gb, 0, pushed),
        ("offload_group_size", offload.prefetch.offload_group_size, 0, pushed),
        ("lora_config", built.lora_config, None, pushed),
        ("quantization", model.quantization, None, pushed),
        ("quant_config", built.quant_config, None, pushed),
        ("speculative_config", built.speculative_config, None, one_token),
        ("dtype", str(model.dtype), f"torch.{dtype}", "engine.dtype"),
        (
            "cache_dtype",
            "auto" if str(cache.cache_dtype).endswith(dtype) else cache.cache_dtype,
            "auto",
            "a rounded KV cache is a mismatch that replay cannot remove",
        ),
        (
            "logprobs_mode",
            model.logprobs_mode,
            "processed_logprobs",
            "log-probabilities must be those of the distribution that was sampled from",
        ),
    )
    faults = [
        f"{name} is {found!r}, must be {wanted!r}: {why}"
        for name, found, wanted, why in facts
        if found != wanted
    ]
    if faults:
        raise EngineConfigError(
            "\n".join(["the engine cannot be used", *(f"  - {fault}" for fault in faults)])
        )


@contextmanager
def kept_process_state() -> Iterator[None]:
    """Put back what `LLM()` (vLLM 0.30) overwrites: random states, `torch.set_num_threads`, environment, frozen garbage.

    It reseeds torch, numpy and random, stubs `torch.set_num_threads` on CPU, rewrites LOCAL_WORLD_SIZE to its own tensor
    parallel size and freezes the garbage collector, after which nothing alive can ever be collected.
    """
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    environment = {name: os.environ.get(name) for name in _OVERWRITTEN_ENVIRONMENT}
    try:
        with preserved_random_state():
            yield
    finally:
        torch.set_num_threads = set_num_threads
        set_num_threads(num_threads)
        for name, value in environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        gc.unfreeze()


def build_llm(config: Config, device: Device, *, max_model_len: int, capture: bool) -> LLM:
    """Construct vLLM's `LLM`. All ranks must call at the same place: it creates process groups.

    Args:
        max_model_len: tokens of the longest conversation.
        capture: whether routed experts are returned.

    Log-probabilities are "processed": those of the distribution that was sampled from, after temperature and top-p/k (the
    default ignores them). `generation_config="vllm"` keeps the checkpoint from changing sampling defaults.
    """
    from vllm import LLM

    engine = config.engine
    arguments: dict[str, Any] = dict(
        model=config.model.path,
        dtype=engine.dtype,
        tensor_parallel_size=config.parallel.engine_tp,
        distributed_executor_backend="external_launcher",
        enable_return_routed_experts=capture,
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
        max_model_len=max_model_len,
        max_num_seqs=engine.max_num_seqs,
        # Said in either case: a checkpoint's config.json may ask for one, and the policy would not know.
        hf_overrides={"head_dtype": "float32" if config.model.fp32_head else "model"},
        seed=0,  # every request carries its own
        disable_log_stats=True,
        use_tqdm_on_load=False,
    )
    if engine.kv_cache_gib:
        arguments["kv_cache_memory_bytes"] = int(engine.kv_cache_gib * 2**30)
    if device.is_cuda:
        arguments |= dict(
            enable_sleep_mode=True,
            gpu_memory_utilization=engine.memory_fraction,
            # Modular Triton experts: routes are captured there; a fused kernel returned all-zero routes up to vLLM 0.27.
            moe_backend="triton",
        )
    else:
        arguments |= dict(
            enforce_eager=True,
            # A seeded request whose prefill is split crashes the CPU engine (its generators have no offset).
            enable_chunked_prefill=False,
            max_num_batched_tokens=max(4096, max_model_len),
            # The default of 128 would leave short prompts without prefix caching, and the cache untested.
            block_size=32,
            # For latent attention only; where the CPU has AMX vLLM would take a backend that refuses float32.
            attention_backend="CPU_MLA",
        )
        arguments.setdefault("kv_cache_memory_bytes", DEFAULT_CPU_KV_CACHE_BYTES)
    names = _own_shared_memory() if not device.is_cuda and config.parallel.engine_tp > 1 else ""
    with kept_process_state():
        llm = LLM(**arguments)
    for segment in Path("/dev/shm").glob(f"{names}*") if names else ():
        segment.unlink(
            missing_ok=True
        )  # mapped by all ranks now; a killed run leaves nothing behind
    _unlink_message_queues()
    refuse_unfit(llm.llm_engine.vllm_config, config, capture=capture)
    if not device.is_cuda:
        llm.collective_rpc(_rotate_slices_in_torch)
    require_head_type(llm, config)
    return llm


def require_head_type(llm: LLM, config: Config) -> None:
    """The engine multiplies hidden states and output weight in the type that was asked for, or AssertionError.

    vLLM 0.30 falls back to the model's with no more than a warning where a platform has no float32 (config/model.py,
    `head_dtype`). Its logits processor casts the weight at every call, so new weights need nothing.
    """
    asked = torch.float32 if config.model.fp32_head else getattr(torch, config.engine.dtype)

    def types(worker: Any) -> set[torch.dtype]:
        from vllm.model_executor.layers.logits_processor import LogitsProcessor

        modules = worker.model_runner.get_model().modules()
        return {module.head_dtype for module in modules if isinstance(module, LogitsProcessor)}

    for found in llm.collective_rpc(types):
        assert found == {asked}, (
            f"model.fp32_head {config.model.fp32_head} with engine.dtype {config.engine.dtype} asks for an output layer in "
            f"{asked}, and the engine's is {found or 'none of vLLM, which cannot be asked'}"
        )


def _unlink_message_queues() -> None:
    """Unlink the queues between the ranks of an engine, which all of them have mapped once it is built.

    vLLM does so when the queue is collected, which `r3.runtime.device.leave` does not wait for: Python's resource tracker would warn
    of a leak after every run.
    """
    from vllm.distributed import parallel_state

    for reference in parallel_state._groups.values():
        queue = getattr(reference(), "mq_broadcaster", None)
        if queue is not None and queue.buffer is not None and queue.buffer.is_creator:
            queue.buffer.shared_memory.unlink()
            queue.buffer.is_creator = False  # what is unlinked must not be unlinked again


def _own_shared_memory() -> str:
    """Give this run's CPU engines shared memory of their own; returns what its names begin with. All ranks must call.

    Under the external launcher vLLM 0.30 names the segments by group and ranks alone: a second run on the machine, or what a
    killed one left behind, makes it fail with errno 17.
    """
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    token = [f"r3-{uuid.uuid4().hex[:12]}"]
    torch.distributed.broadcast_object_list(token, src=0)
    prefix = token[0]

    def group_name(communicator: Any) -> str:
        return f"{prefix}-{communicator.unique_name}-{'-'.join(str(rank) for rank in communicator.ranks)}"

    _CPUSHMDistributed.make_group_name = staticmethod(group_name)
    return prefix


def _rotate_slices_in_torch(worker: Any) -> None:
    """Latent attention rotates a slice of each head, which vLLM 0.30's CPU kernel takes for whole heads: wrong, and silent.

    The CUDA kernel reads strides (vLLM PR 18046); YaRN, which vLLM's own tests use, has another path. Only latent attention
    rotates interleaved pairs.
    """
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    for module in worker.model_runner.get_model().modules():
        if isinstance(module, RotaryEmbedding) and not module.is_neox_style:
            module._forward_method = module.forward_native
