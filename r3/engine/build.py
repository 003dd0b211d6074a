"""Builds an in-process vLLM engine inside an existing process group, and undoes what its constructor does to the process."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
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
        )
        arguments.setdefault("kv_cache_memory_bytes", DEFAULT_CPU_KV_CACHE_BYTES)
    with kept_process_state():
        return LLM(**arguments)
