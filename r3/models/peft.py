"""Adapters in PEFT's format: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from r3.config import LoraConfig
from r3.models.hf_checkpoint import save, whole_folder
from r3.models.lora import factor_names, scale_in
from r3.models.shape import ModelShape


def joined_in(shape: ModelShape, adapted: Iterable[str]) -> str:
    """Return the tensor of the checkpoint that joins matrices with adapters; "" if none does.

    PEFT's adapters belong to modules, and such a tensor has none for its parts.
    """
    of_part = {part: name for name, (_, parts) in shape.stored.items() for part in parts}
    return next((of_part[name] for name in adapted if name in of_part), "")


def dropped_by_peft(adapted: Iterable[str]) -> bool:
    """Whether PEFT with transformers 5 loses some of these adapters without an error.

    It takes all that are named as matrices of experts for these, also in dense layers and shared
    experts.
    """
    ends = {True: set[str](), False: set[str]()}
    for name in adapted:
        ends[".experts." in name].add(name.split(".")[-2])
    return not ends[True].isdisjoint(ends[False])


def adapter_config(
    shape: ModelShape, lora: LoraConfig, ranks: Mapping[str, int], base: str
) -> dict[str, Any]:
    """Return the content of adapter_config.json, where all products have one scale.

    `write_adapter` moves the difference into B.

    Args:
        shape: the model's.
        lora: the settings.
        ranks: tensor of the checkpoint -> rank, for all with an adapter.
        base: name or folder of the starting model.
    """
    modules = [name.removesuffix(".weight") for name in ranks]
    # One short name for all modules that end with it, unless others do too.
    ends = {module.rpartition(".")[2] for module in modules}
    without = [name.removesuffix(".weight") for name in shape.tensor_shapes if name not in ranks]
    mixed = {end for end in ends if any(module.endswith(f".{end}") for module in without)}
    named = {module if (end := module.rpartition(".")[2]) in mixed else end for module in modules}
    # PEFT's conversion to transformers 5 reads the rank of experts here alone, and vLLM this scale.
    rank = lora.expert_rank if len({*ranks.values()}) > 1 else next(iter(ranks.values()))
    others = {re.escape(name.removesuffix(".weight")): r for name, r in ranks.items() if r != rank}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": lora.scale(rank) * rank,
        "use_rslora": False,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted(named),
        "rank_pattern": others,
        "alpha_pattern": {module: lora.scale(rank) * r for module, r in others.items()},
    }


def write_adapter(
    folder: Path,
    pairs: Iterable[tuple[str, torch.Tensor, torch.Tensor]],
    config: Mapping[str, Any],
    lora: LoraConfig,
) -> None:
    """Write an adapter's folder, completely or not at all.

    Args:
        folder: replaced if it exists.
        pairs: tensor of the checkpoint, A and B.
        config: content of adapter_config.json.
        lora: the settings that A and B were trained with.
    """
    tensors = {}
    for name, a, b in pairs:
        b = b * (lora.scale(len(a)) / scale_in(config, name))
        for factor, tensor in zip(factor_names(name), (a, b), strict=True):
            tensors[factor] = tensor.cpu().contiguous()
    with whole_folder(folder) as partial:
        save(tensors, partial / "adapter_model.safetensors")
        (partial / "adapter_config.json").write_text(json.dumps(dict(config), indent=2))


def adapter_reader(
    folder: str, lora: LoraConfig
) -> Callable[[str], tuple[torch.Tensor, torch.Tensor]]:
    """Return what reads A and B of a matrix, float32, with B for the scale of the settings."""
    config = json.loads((Path(folder) / "adapter_config.json").read_bytes())
    file = safe_open(str(Path(folder) / "adapter_model.safetensors"), framework="pt")

    def read(name: str) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = (file.get_tensor(factor).float() for factor in factor_names(name))
        return a, b * (scale_in(config, name) / lora.scale(len(a)))

    return read
