"""vLLM with an exported adapter, and vLLM with the merged model."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from r3.config import LoraConfig
from r3.lora import adapted_tensors, adapter_config, write_adapter
from r3.models.shape import ModelShape
from r3.runtime.device import Device
from tests.families import random_pairs

Sampled = tuple[list[int], list[float]]


def adapted(device: Device, *, model: str, out: str) -> tuple[Sampled, Sampled, Sampled]:
    """Tokens and log-probabilities of the base, of the base with the adapter, of the merged."""
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    shape, lora = ModelShape.read(model), LoraConfig(rank=8)
    ranks = adapted_tensors(shape, lora)
    pairs = random_pairs(shape, ranks)
    adapter, merged = Path(out) / "adapter", Path(out) / "merged"
    write_adapter(adapter, pairs, adapter_config(shape, lora, ranks, model), lora)
    shutil.copytree(model, merged)
    (file,) = merged.glob("*.safetensors")
    tensors = load_file(file)
    for name, a, b in pairs:
        tensors[name] += lora.scale(len(a)) * b @ a
    save_file(tensors, file, metadata={"format": "pt"})

    def sampled(llm: Any, request: Any) -> Sampled:
        sampling = SamplingParams(temperature=0, max_tokens=12, logprobs=0, detokenize=False)
        (done,) = llm.generate(
            [{"prompt_token_ids": list(range(5, 30))}],
            sampling,
            lora_request=request,
            use_tqdm=False,
        )
        (found,) = done.outputs
        return list(found.token_ids), [next(iter(x.values())).logprob for x in found.logprobs]

    given: dict[str, Any] = dict(
        dtype="float32", enforce_eager=True, max_model_len=64, max_num_seqs=4
    )
    given |= dict(kv_cache_memory_bytes=1 << 24, skip_tokenizer_init=True)
    own = LLM(model, enable_lora=True, max_lora_rank=8, **given)
    found = sampled(own, None), sampled(own, LoRARequest("adapter", 1, str(adapter)))
    return *found, sampled(LLM(str(merged), **given), None)
