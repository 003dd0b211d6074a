"""Build a vLLM engine inside an existing process group and undo its side effects on the process."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from r3 import extras
from r3.engine.route_slots import capturing
from r3.errors import Explained
from r3.models.families import FAMILIES, implied_keys
from r3.models.hub import folder_of
from r3.models.shape import BYTES_OF, ModelShape
from r3.runtime.device import GIB, preserved_random_state
from r3.runtime.process import importing
from r3.runtime.terminal import say

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.config import VllmConfig

    from r3.config import Config
    from r3.runtime.device import Device

_DENSE_MLA = "DeepseekV3ForCausalLM"  # latent attention without indexers
_OVERWRITTEN_ENVIRONMENT = ("LOCAL_WORLD_SIZE", "LD_PRELOAD", "LD_LIBRARY_PATH")


class EngineConfigError(Explained):
    """vLLM built an engine whose routes, weights or log-probabilities cannot be trusted."""


class DeviceMemoryError(Explained):
    """Another process has memory of the device that the engine needs."""

    advice = (
        "End the other processes, or use another device. engine.kv_cache_gib, or a smaller "
        "engine.memory_fraction, lets the engine ask for less"
    )


def share_of_device(config: Config, shape: ModelShape, total_gib: float) -> float:
    """Fraction of the device's memory that must be free when vLLM builds the engine.

    With `engine.kv_cache_gib` that is what the cache and the weights take: then vLLM uses the
    fraction for nothing else.
    """
    engine = config.engine
    if not engine.kv_cache_gib:
        return engine.memory_fraction
    weights = shape.num_params * BYTES_OF[engine.dtype] / config.parallel.engine_tp
    return min(1.0, (weights / GIB + engine.kv_cache_gib) / total_gib)


def refuse_unfit(built: VllmConfig, config: Config) -> None:
    """Compare the engine that vLLM built with what R3 relies on.

    The built engine is compared, not its arguments: defaults, the environment, the checkpoint's
    config.json and later fields of `EngineConfig` all have their effect there.

    Args:
        built: vLLM's configuration of the engine.

    Raises:
        EngineConfigError: lists every difference.
    """
    cache_dtype = str(built.cache_config.cache_dtype)
    rows = "rows are read by KV slot: a block that leaves the device takes its routes along"
    part = "a rank captures a part only"
    pushed = "the weight sync writes plain full tensors into the engine"
    facts: dict[str, tuple[object, str]] = {
        "model_config.quantization": (None, pushed),
        "model_config.dtype": (getattr(torch, config.engine.dtype), "engine.dtype"),
        "model_config.logprobs_mode": (
            "processed_logprobs",
            "log-probabilities must be those of the distribution that was sampled from",
        ),
        "parallel_config.tensor_parallel_size": (config.parallel.engine_tp, "as configured"),
        "parallel_config.pipeline_parallel_size": (1, "a stage captures its own layers only"),
        "parallel_config.decode_context_parallel_size": (1, part),
        "parallel_config.prefill_context_parallel_size": (1, part),
        "parallel_config.data_parallel_size": (1, "R3 has one engine for each such rank"),
        "parallel_config.enable_eplb": (
            False,
            "experts move between slots, ids returned would not be the checkpoint's experts",
        ),
        "parallel_config.enable_dbo": (False, "half batches would be captured over one another"),
        "kv_transfer_config": (None, rows),
        "cache_config.kv_offloading_size": (None, rows),
        "cache_config.cache_dtype": (
            # Naming the engine's own type means the same as "auto".
            cache_dtype if cache_dtype.endswith(config.engine.dtype) else "auto",
            "a rounded KV cache is a mismatch that replay cannot remove",
        ),
        "offload_config.uva.cpu_offload_gb": (0, pushed),
        "offload_config.prefetch.offload_group_size": (0, pushed),
        "lora_config": (None, pushed),
        "quant_config": (None, pushed),
        "speculative_config": (
            None,
            "a row of routes and a log-probability belong to one sampled token",
        ),
    }
    faults = [
        f"{path.rpartition('.')[2]} is {actual!r}, must be {wanted!r}: {why}"
        for path, (wanted, why) in facts.items()
        if (actual := attrgetter(path)(built)) != wanted
    ]
    if faults:
        raise EngineConfigError(
            "\n".join(["the engine cannot be used", *(f"  - {fault}" for fault in faults)])
        )


@contextmanager
def kept_process_state() -> Iterator[None]:
    """Restore what `LLM()` (vLLM 0.30) overwrites.

    It reseeds torch, numpy and random, replaces `torch.set_num_threads` by a stub on CPU, and sets
    LOCAL_WORLD_SIZE to its own tensor parallel size.
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


def build_llm(
    config: Config,
    device: Device,
    shape: ModelShape,
    *,
    max_model_len: int,
    capture: bool,
    share: float,
    prefix_caching: bool = True,
    from_disk: bool = False,
) -> LLM:
    """Build vLLM's `LLM`. All ranks must call at the same place: it creates process groups.

    Log-probabilities are "processed": those of the distribution that was sampled from, after
    temperature and top-p/k, which vLLM's default ignores. `generation_config="vllm"` keeps the
    checkpoint from changing sampling defaults.

    Args:
        max_model_len: maximum tokens of a conversation.
        capture: whether routed experts are returned.
        share: fraction of the device's memory that must be free (`share_of_device`); GPU only.
        prefix_caching: whether prompts that begin alike share their KV cache.
        from_disk: load the checkpoint's weights instead of random ones.

    Raises:
        EngineConfigError: the engine differs from what R3 relies on.
        DeviceMemoryError: another process has memory of the device that the engine needs.
    """
    cpu = None if device.is_cuda else extras.engine_on_cpu()
    if cpu:
        cpu.import_engine()
    with importing():
        from vllm import LLM
    show_as_lines()

    engine, folder = config.engine, folder_of(shape.source)
    other = FAMILIES[shape.architecture].engine
    require_architecture(_DENSE_MLA if shape.index_topk else other or shape.architecture)
    _register_config(shape.architecture)
    arguments: dict[str, Any] = dict(
        model=folder,
        dtype=engine.dtype,
        tensor_parallel_size=config.parallel.engine_tp,
        distributed_executor_backend="external_launcher",
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
        max_model_len=max_model_len,
        max_num_seqs=engine.max_num_seqs,
        enable_prefix_caching=prefix_caching,
        async_scheduling=None if engine.async_scheduling else False,  # None: vLLM decides
        hf_overrides=overrides(config, shape),
        skip_tokenizer_init=_tokenizer_is_code(folder),
        seed=0,  # every request carries its own
        load_format="auto" if from_disk else "dummy",
        disable_log_stats=True,
        use_tqdm_on_load=False,
    )
    if engine.kv_cache_gib:
        arguments["kv_cache_memory_bytes"] = int(engine.kv_cache_gib * 2**30)
    if cpu:
        arguments = cpu.arguments(config, shape, max_model_len) | arguments
    else:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # `capturing` knows the first one
        arguments |= cuda_arguments(config, share)
    hooks = capturing(is_cuda=device.is_cuda) if capture else nullcontext()
    with kept_process_state(), extras.neighbours_named(device, share), hooks:
        llm: LLM = cpu.build(LLM, arguments) if cpu else LLM(**arguments)
    _unlink_message_queues()
    # From 0.31 on a forgotten engine would destroy the process group that it did not make.
    if finalizer := getattr(llm.llm_engine.engine_core, "_finalizer", None):
        finalizer.detach()
    refuse_unfit(llm.llm_engine.vllm_config, config)
    if cpu:
        llm.collective_rpc(
            lambda worker: cpu.replace_layers(list(worker.model_runner.get_model().modules()))
        )
    require_head_type(llm, config)
    return llm


def overrides(config: Config, shape: ModelShape) -> dict[str, Any] | Callable[[Any], Any]:
    """What vLLM must know in addition to the checkpoint's config.json.

    Of a model that also sees images, it builds the text model alone. One with sparse attention it
    runs without the indexers, which choose everything in conversations of `index_topk` tokens.
    """
    other = FAMILIES[shape.architecture].engine
    keys = {
        # Always set: a checkpoint's config.json may set one that the policy would not follow.
        "head_dtype": "float32" if config.model.fp32_head else "model",
        **implied_keys(shape.architecture),
        # The policy has no quantised weights to push.
        **({"quantization_config": None} if shape.quantised else {}),
    }

    def text_config(whole: Any) -> Any:
        text = whole.get_text_config()
        # Published files have the last key around the section, in it, or both.
        own = {"architectures": [shape.architecture], "tie_word_embeddings": shape.tied}
        text.update({**own, **keys})
        return text

    def without_indexers(whole: Any) -> Any:
        from transformers import DeepseekV3Config

        own = ("model_type", "architectures", "layer_types", "mlp_layer_types")
        theirs = {
            key: value
            for key, value in whole.to_dict().items()
            if key not in own and not key.startswith("index")
        }
        return DeepseekV3Config(**{**theirs, "architectures": [_DENSE_MLA], **keys})

    if shape.index_topk:
        return without_indexers

    def as_glm4_moe(whole: Any) -> Any:
        # vLLM would rotate half of each head. It asks with the raw keys first.
        if rope := getattr(whole, "rope_parameters", None):
            whole.rope_parameters = {**rope, "partial_rotary_factor": 1.0}
        whole.update(
            {
                "architectures": [other],
                "attention_bias": shape.qkv_bias,
                "use_qk_norm": shape.qk_norm == "head",
                "head_dim": shape.head_dim,
                "first_k_dense_replace": shape.moe_layers[0],
                "n_group": shape.expert_groups,
                "topk_group": shape.topk_groups,
                **keys,
            }
        )
        return whole

    if other:
        return as_glm4_moe
    return text_config if shape.is_wrapped else keys


# What a warning says -> why nobody has to act.
_NEEDS_NO_ACTION = {
    "JIT compilation during inference": "the kernels of R3's training are compiled in this process",
    "VLLM_ENABLE_V1_MULTIPROCESSING is set to False": "R3 restores the random state",
    "Using default MoE config": "no file is tuned for the sizes; results are the same",
}


class _Lines(logging.Handler):
    """Writes each message on a line of its own, with the name of the library."""

    def emit(self, record: logging.LogRecord) -> None:
        said = self.format(record)  # with the traceback, if there is one
        if not any(phrase in said for phrase in _NEEDS_NO_ACTION):
            say(f"vllm {record.levelname.lower()}: {said}", error=True)


def show_as_lines() -> None:
    """Give vLLM's logger this handler, unless the user configures its logging.

    vLLM must have been imported, which installs its own.
    """
    by_user = os.environ.get("VLLM_CONFIGURE_LOGGING") == "0"
    if not (by_user or os.environ.get("VLLM_LOGGING_CONFIG_PATH")):
        logging.getLogger("vllm").handlers[:] = [_Lines()]


def _tokenizer_is_code(folder: str) -> bool:
    """Whether vLLM would run code of the model to tokenise (Kimi-K2.5). R3 gives it token ids."""
    file = Path(folder) / "tokenizer_config.json"
    return file.is_file() and "auto_map" in json.loads(file.read_bytes())


def require_architecture(architecture: str) -> None:
    """Raise EngineConfigError if vLLM would run this model by transformers' code, without routes.

    vLLM 0.26 has the text model of Qwen3.5 only as a part of the one that also sees images.
    """
    from vllm import ModelRegistry, __version__

    if architecture not in ModelRegistry.get_supported_archs():
        raise EngineConfigError(
            f"vLLM {__version__} has no {architecture}: install vLLM 0.32, or train without an "
            "engine (SFT)"
        )


def _register_config(architecture: str) -> None:
    """Let transformers read the config.json of a family whose class is code in the checkpoint.

    That code is not run: vLLM has the model, and needs the keys alone.
    """
    from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

    family = FAMILIES[architecture]
    for name in (family.model_type, *family.aliases):
        if name not in CONFIG_MAPPING:
            AutoConfig.register(name, type("Keys", (PretrainedConfig,), {"model_type": name}))


def cuda_arguments(config: Config, share: float) -> dict[str, Any]:
    """Further arguments of an engine on CUDA; see `build_llm`."""
    return dict(
        enable_sleep_mode=True,
        gpu_memory_utilization=share,
        # These ask the router that has the hook; other kernels choose experts themselves.
        moe_backend="triton",
        # On Hopper vLLM would choose FlashInfer, which may be absent and compiles when first used.
        gdn_prefill_backend="triton",
        # Inductor refuses vLLM's graphs in torch's deterministic mode.
        enforce_eager=config.debug.deterministic,
    )


def require_head_type(llm: LLM, config: Config) -> None:
    """Assert that the engine computes its output layer in the configured type.

    vLLM 0.30 falls back to the model's type with only a warning if a platform lacks float32
    (config/model.py, `head_dtype`). Its logits processor casts the weight in every call, so new
    weights need no further care.
    """
    asked = torch.float32 if config.model.fp32_head else getattr(torch, config.engine.dtype)

    def types(worker: Any) -> set[torch.dtype]:
        from vllm.model_executor.layers.logits_processor import LogitsProcessor

        modules = worker.model_runner.get_model().modules()
        return {module.head_dtype for module in modules if isinstance(module, LogitsProcessor)}

    for dtypes in llm.collective_rpc(types):
        assert dtypes == {asked}, (
            f"model.fp32_head {config.model.fp32_head} and engine.dtype {config.engine.dtype} need "
            f"an output layer in {asked}; the engine has {dtypes or 'no logits processor of vLLM'}"
        )


def _unlink_message_queues() -> None:
    """Unlink the queues between the ranks of an engine, which all ranks have mapped by now.

    vLLM unlinks a queue when it is garbage-collected, and `r3.runtime.device.leave` does not wait
    for that: Python's resource tracker would warn of a leak after every run.
    """
    from vllm.distributed import parallel_state

    for reference in parallel_state._groups.values():
        queue = getattr(reference(), "mq_broadcaster", None)
        if queue is not None and queue.buffer is not None and queue.buffer.is_creator:
            queue.buffer.shared_memory.unlink()
            queue.buffer.is_creator = False  # it must not be unlinked twice
