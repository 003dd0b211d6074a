"""An engine on CPU: what vLLM needs to start, and layers in place of those that are inexact."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from r3.backends.cpu.memory import discard
from r3.runtime.process import importing

if TYPE_CHECKING:
    from vllm import LLM

    from r3.config import Config
    from r3.models.shape import ModelShape

# KV cache when the config does not say: enough for a small model, small enough for a laptop.
DEFAULT_CPU_KV_CACHE_BYTES = 256 << 20
# Packages that vLLM 0.30 imports if they are installed, and that an engine on CPU does not use.
# They take a fifth of the time of all imports.
UNUSED = (
    "cv2",  # videos
    "opentelemetry",  # traces of requests
    "pandas",  # tuned products of AMD's GPUs
    "torch._inductor.lowering",  # vLLM's operators in compiled graphs; here nothing is compiled
)


def import_engine() -> None:
    """Import what an engine will import when it is built, but for the model's module."""
    with importing(without=UNUSED):
        import vllm.entrypoints.llm
        import vllm.model_executor.layers.fused_moe.experts.cpu_moe
        import vllm.model_executor.layers.quantization.online.base
        import vllm.v1.attention.backends.cpu_attn
        import vllm.v1.core.sched.scheduler
        import vllm.v1.worker.cpu_worker  # noqa: F401


def arguments(config: Config, shape: ModelShape, max_model_len: int) -> dict[str, Any]:
    """Prepare vLLM for this model, and return further arguments of its `LLM`."""
    _inspect_models_in_this_process()
    _replace_kernels_of_vllm_alone()
    _rank_with_biases()
    if shape.delta and not shape.delta.interleaved:
        _do_without_torchvision()
    return dict(
        enforce_eager=True,
        # A seeded request whose prefill is split crashes the CPU engine: CPU generators have no
        # offset.
        enable_chunked_prefill=False,
        max_num_batched_tokens=max(4096, max_model_len, config.engine.max_num_seqs),
        # With the default of 128 short prompts would not be cached, and the cache not tested.
        block_size=32,
        # For latent attention only: with AMX vLLM would choose a backend that refuses float32.
        attention_backend="CPU_MLA",
        kv_cache_memory_bytes=DEFAULT_CPU_KV_CACHE_BYTES,
    )


def build(llm: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Build vLLM's `LLM`. All ranks must call."""
    names = _own_shared_memory() if arguments["tensor_parallel_size"] > 1 else ""
    built = llm(**arguments)
    for segment in Path("/dev/shm").glob(f"{names}*") if names else ():
        # All ranks have mapped it: unlinked now, it cannot outlive a run that is killed.
        segment.unlink(missing_ok=True)
    return built


def _inspect_models_in_this_process() -> None:
    """Let vLLM (0.30) ask the class of a model about itself without a process for it.

    That process, which must not initialise CUDA here, imports vLLM again: 8 s for each rank when a
    machine meets a model for the first time.
    """
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda fn: fn()


def _replace_kernels_of_vllm_alone() -> None:
    """Let vLLM (0.31 and later) look for kernels that it replaces in its own modules.

    It looks at every object of every module that is imported, and dies of one in numba.
    """
    if find_spec("vllm.triton_utils.dispatcher") is None:
        return
    dispatcher: Any = import_module("vllm.triton_utils.dispatcher")
    rebind = dispatcher._rebind_kernels

    def in_vllm(overrides: Any) -> None:
        own = {name: module for name, module in sys.modules.items() if name.startswith("vllm.")}
        dispatcher.sys = SimpleNamespace(modules=own)
        try:
            rebind(overrides)
        finally:
            dispatcher.sys = sys

    dispatcher._rebind_kernels = in_vllm


def _rank_with_biases() -> None:
    """Let vLLM's router on CPU (0.30) add its biases without groups of experts: in one group.

    By itself it leaves them out of softmax scores (ERNIE 4.5) and refuses sigmoid scores
    (MiniMax-M2). On CUDA vLLM has another router, which adds them.
    """
    # By its name: vLLM 0.26 has no such router.
    factory = import_module("vllm.model_executor.layers.fused_moe.router.router_factory")
    made = factory.CPURouter
    if not isinstance(made, type):
        return  # done before

    def in_one_group(**arguments: Any) -> Any:
        if arguments["e_score_correction_bias"] is not None and not arguments["use_grouped_topk"]:
            arguments |= dict(use_grouped_topk=True, num_expert_group=1, topk_group=1)
        return made(**arguments)

    factory.CPURouter = in_one_group  # type: ignore[attr-defined]


def _do_without_torchvision() -> None:
    """Let vLLM's module of Qwen3.5 import where torchvision is missing, as on CPU.

    It also has the model that sees images, and takes one function for it (`smart_resize`) from a
    module of transformers that needs torchvision. The same function is in that module's variant for
    PIL, which transformers falls back to by itself everywhere else.
    """
    if find_spec("torchvision") is None:
        name = "transformers.models.qwen2_vl.image_processing_"
        sys.modules.setdefault(f"{name}qwen2_vl", import_module(f"{name}pil_qwen2_vl"))


def _own_shared_memory() -> str:
    """Give the shared memory of this run's engines names of their own. All ranks must call.

    Under the external launcher vLLM 0.30 names the segments only by group and ranks. A second run
    on the machine, or segments of a killed run, would make it fail with errno 17.

    Returns:
        The prefix of the names.
    """
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    token = [f"r3-{uuid.uuid4().hex[:12]}"]
    torch.distributed.broadcast_object_list(token, src=0)
    prefix = token[0]

    def group_name(communicator: Any) -> str:
        ranks = "-".join(str(rank) for rank in communicator.ranks)
        return f"{prefix}-{communicator.unique_name}-{ranks}"

    _CPUSHMDistributed.make_group_name = staticmethod(group_name)
    return prefix


class KVCache:
    """The cache of an engine that sleeps and wakes.

    Asleep, its pages go back to the system. When the engine wakes, the cache is all zeros at the
    same addresses, and takes memory only where it is written. A cache whose pages stay (`discard`)
    has its storage shrunk to nothing and grown again in place.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._freed: list[tuple[torch.UntypedStorage, int]] = []

    def free(self) -> None:
        """Free its memory."""
        kept = [storage for storage in self._storages() if not discard(storage)]
        self._freed = [(storage, storage.nbytes()) for storage in kept]
        for storage, _ in self._freed:
            storage.resize_(0)

    def restore(self) -> None:
        """Make it usable again."""
        for storage, size in self._freed:
            storage.resize_(size)
            # Attention multiplies masked slots by zero, and uninitialised memory may hold NaN.
            torch.empty(0, dtype=torch.uint8).set_(storage, 0, (size,)).zero_()
        self._freed = []

    def fill(self) -> None:
        """Write all of it."""
        for storage in self._storages():
            torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),)).fill_(0)

    def _storages(self) -> list[torch.UntypedStorage]:
        executor: Any = self._llm.llm_engine.model_executor
        storages: dict[int, torch.UntypedStorage] = {}
        for layer in executor.driver_worker.worker.model_runner.kv_caches:
            for tensor in layer if isinstance(layer, (list, tuple)) else [layer]:
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage
        return list(storages.values())


def replace_layers(modules: Sequence[Any]) -> None:
    """Replace rotary embeddings and norms of a built engine."""
    rotate_slices_in_torch(modules)
    rotate_to_nearest(modules)
    normalise_in_one_call(modules)


@cache
def cuts_off() -> bool:
    """Whether vLLM's kernels cut results off where they should round to the nearest bfloat16.

    Its build for processors without AVX-512 does. One kernel is asked here. Those for rotations,
    experts and attention were measured and did the same.
    """
    from vllm._custom_ops import rms_norm

    row = torch.arange(1.0, 65.0).bfloat16()
    result, exact = torch.empty_like(row), torch.empty(64)
    rms_norm(result, row, torch.ones_like(row), 1e-6)
    rms_norm(exact, row.float(), torch.ones(64), 1e-6)
    return not torch.equal(result, exact.bfloat16())


def rotate_to_nearest(modules: Iterable[Any]) -> None:
    """Let vLLM's kernel rotate positions in float32 where it would cut bfloat16 off."""
    from vllm._custom_ops import rotary_embedding
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    def rotating(rotary: RotaryEmbedding) -> Callable[..., tuple[torch.Tensor, Any]]:
        vllms = rotary._forward_method

        def forward(
            positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
        ) -> tuple[torch.Tensor, Any]:
            if query.dtype != torch.bfloat16:
                return vllms(positions, query, key)
            # Only the rows that are used: there is one for each position of the longest context.
            angles = rotary._match_cos_sin_cache_dtype(query)[positions].float()
            wide = query.float(), None if key is None else key.float()
            rows = torch.arange(len(positions))
            rotary_embedding(rows, *wide, rotary.head_size, angles, rotary.is_neox_style)
            for stored, exact in zip((query, key), wide, strict=True):
                if stored is not None:
                    stored.copy_(exact)
            return query, key

        return forward

    for module in modules:
        kernel = type(module).forward_cpu if isinstance(module, RotaryEmbedding) else None
        if kernel is RotaryEmbedding.forward_cpu and module.is_neox_style and cuts_off():
            module._forward_method = rotating(module)


def rotate_slices_in_torch(modules: Iterable[Any]) -> None:
    """Let torch rotate positions in latent attention, where vLLM 0.30's CPU kernel is wrong.

    Latent attention rotates a slice of each head, and the CPU kernel treats the slice as whole
    heads, without an error. The CUDA kernel reads strides (vLLM PR 18046); YaRN, which vLLM's own
    tests use, takes another path. Only latent attention rotates interleaved pairs.
    """
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    for module in modules:
        if isinstance(module, RotaryEmbedding) and not module.is_neox_style:
            module._forward_method = module.forward_native


def normalise_in_one_call(modules: Iterable[torch.nn.Module]) -> None:
    """Let vLLM's CPU kernel compute norms, for which vLLM 0.30 makes six calls of torch or more.

    vLLM registers the kernel for GPUs only. Two things it does otherwise than the policy, and so
    they are done outside in bfloat16: it multiplies by the weight before it rounds, and in the
    variant with a residual it normalises the sum before that is rounded. In float32 neither
    changes a bit. The kernel also reads slices as if their rows followed each other, without an
    error. Where it would cut bfloat16 off (`cuts_off`), it computes in float32 and torch rounds.
    """
    from vllm._custom_ops import fused_add_rms_norm, rms_norm
    from vllm.model_executor.layers.layernorm import RMSNorm

    def normalising(norm: RMSNorm) -> Callable[..., Any]:
        ones = torch.ones_like(norm.weight)
        rounds = ones.dtype != torch.float32
        is_wide = ones.dtype == torch.bfloat16 and cuts_off()
        if is_wide:
            ones = ones.float()

        def forward(x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
            if residual is not None:
                if not rounds and x.is_contiguous() and residual.is_contiguous():
                    fused_add_rms_norm(x, residual, norm.weight, norm.variance_epsilon)
                    return x, residual  # written in place, as on GPUs
                x = residual = x + residual
            dtype = torch.float32 if is_wide else x.dtype
            normed, weight = torch.empty(x.shape, dtype=dtype), ones if rounds else norm.weight
            rms_norm(normed, x.to(dtype).contiguous(), weight, norm.variance_epsilon)
            if rounds:
                normed = normed.to(x.dtype).mul_(norm.weight)
            return normed if residual is None else (normed, residual)

        return forward

    for module in modules:
        # A class of its own, no weight and a part of the row have formulas of their own.
        plain = type(module) is RMSNorm and module.has_weight
        if plain and module.variance_size_override is None:
            module._forward_method = normalising(module)
