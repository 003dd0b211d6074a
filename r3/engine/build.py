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

from r3.device import preserved_random_state

if TYPE_CHECKING:
    from vllm import LLM

    from r3.config import Config
    from r3.device import Device

# KV cache on CPU when the config does not say: enough for a small model, small enough for a laptop.
DEFAULT_CPU_KV_CACHE_BYTES = 256 << 20
_OVERWRITTEN_ENVIRONMENT = ("LOCAL_WORLD_SIZE", "LD_PRELOAD", "LD_LIBRARY_PATH")


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
        segment.unlink(missing_ok=True)  # mapped by all ranks now; a killed run leaves nothing behind
    if not device.is_cuda:
        llm.collective_rpc(_rotate_slices_in_torch)
    return llm


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
