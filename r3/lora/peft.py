"""Adapters in PEFT's format: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from r3.config import LoraConfig
from r3.lora.plan import factor_names, matrices, scale_in
from r3.models.families import FAMILIES
from r3.models.hf_checkpoint import save, whole_folder
from r3.models.hub import is_hub, parsed
from r3.models.shape import ModelShape

# Model types whose experts PEFT 0.21 converts to the tensors of transformers 5.19.
_CONVERTED_BY_PEFT = (
    *("deepseek_v3", "deepseek_v32", "dots1", "ernie4_5_moe", "glm4_moe", "glm4_moe_lite"),
    *("glm_moe_dsa", "minimax_m2", "mixtral", "olmoe", "qwen3_moe", "qwen3_next", "solar_open"),
)


def joined_in(shape: ModelShape, adapted: Iterable[str]) -> str:
    """Return the tensor of the checkpoint that joins matrices with adapters; "" if none does.

    PEFT's adapters belong to modules, and such a tensor has none for its parts.
    """
    of_part = {part: name for name, (_, parts) in shape.stored.items() for part in parts}
    return next((of_part[name] for name in adapted if name in of_part), "")


def lost_in_peft(shape: ModelShape, adapted: Collection[str]) -> list[str]:
    """Return the matrices whose adapters PEFT 0.21 with transformers 5 drops without an error.

    transformers stores the experts of a layer in two tensors. PEFT converts adapters to them for
    the model types of its table. There, everything that is named like a matrix of an expert counts
    as one, and adapters of gate and up need one of down.
    """
    of_target = matrices(shape)
    experts = [name for name in adapted if of_target[name] == "experts"]
    if shape.renamed:  # code of its authors, with a module per matrix
        return []
    if shape.model_type not in _CONVERTED_BY_PEFT:
        return experts
    gate, up, down = shape.moe_names.gate_up_down
    leaf = {name: name.split(".")[-2] for name in adapted}
    lost = [n for n in adapted if leaf[n] in (gate, up, down) and of_target[n] != "experts"]
    if down not in leaf.values():
        lost += [name for name in experts if leaf[name] in (gate, up)]
    return lost


def adapter_notes(shape: ModelShape, adapted: Collection[str]) -> list[str]:
    """Return what a user of an exported adapter must know: which programs would not apply it."""
    notes = []
    if lost := lost_in_peft(shape, adapted):
        targets = dict.fromkeys(map(matrices(shape).__getitem__, lost))
        notes.append(
            f"PEFT with transformers 5 drops {len(lost)} of the {len(adapted)} adapters without an "
            f"error, those of {' and '.join(targets)}. Use the merged model there"
        )
    if shape.is_wrapped:
        wrapper = FAMILIES[shape.architecture].wrapper
        notes.append(
            f"the adapter is for the text model, {shape.architecture}. Programs that load the "
            f"model as {wrapper}, such as vLLM, would ignore it. Use the merged model there"
        )
    return notes


def base_names(path: str) -> dict[str, Any]:
    """Return the keys of adapter_config.json that name the base, as PEFT loads it."""
    if not is_hub(path):
        return {"base_model_name_or_path": str(Path(path).resolve()), "revision": None}
    name, revision = parsed(path)
    return {"base_model_name_or_path": name, "revision": revision}


def adapter_config(
    shape: ModelShape, lora: LoraConfig, ranks: Mapping[str, int], base: str
) -> dict[str, Any]:
    """Return the content of adapter_config.json, where all products have one scale.

    `write_adapter` moves the difference into B.

    Args:
        shape: the model's.
        lora: the settings.
        ranks: tensor of the checkpoint -> rank, for all with an adapter.
        base: the model, as the settings name it.
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
        **base_names(base),
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
