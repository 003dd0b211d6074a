"""A small model of every family, the only ones of the tests: keys of config.json, and random
checkpoints that transformers makes and writes itself.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml

from r3 import assets
from r3.models import families
from r3.models.shape import ModelShape
from tests.tiny import edit_json

_TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
_SIZES: dict[str, Any] = _TABLE["sizes"]
# Name -> (model_type, keys of its config beside the common sizes).
FAMILIES: Mapping[str, tuple[str, dict[str, Any]]] = {
    name: (each["model_type"], each["keys"]) for name, each in _TABLE["families"].items()
}
DENSE_FAMILIES = ("qwen3", "qwen2", "qwen3_5", "llama", "llama3.1", "qwen3-yarn")
HYBRID = ("qwen3_next", "qwen3_5_moe", "qwen3_5")  # gated delta layers and attention
HALF_ENGINE_FAMILIES = ("qwen3_next", "qwen3_5_moe", "qwen3_5", "gpt_oss")
"""What vLLM computes on CPU in bfloat16 only."""
MOE_FAMILIES = tuple(name for name in FAMILIES if name not in DENSE_FAMILIES)
ENGINE_FAMILIES = (
    # One of each of vLLM's ways to weights and routers. tests/e2e/test_engine.py has qwen3_moe, and
    # tests/matrix every family.
    *("qwen2_moe", "deepseek_v3", "glm-4.7-flash", "granitemoe", "minimax-m2", "ernie4_5_moe"),
    *("ling", "glm-5"),
    "llama3.1",
    # Tied embeddings: one family without experts, one with.
    "qwen3-tied",
    "qwen3_moe-tied",
)
"""Checkpoints whose weights and routes are tried in vLLM."""


def engine_sizes(name: str) -> dict[str, Any]:
    """Sizes for vLLM's CPU kernels: heads of 32, experts of multiples of 32, DeepSeek's latents."""
    model_type, specific = FAMILIES[name]
    sizes: dict[str, Any] = dict(hidden_size=128, num_attention_heads=4, num_key_value_heads=2)
    if "moe_intermediate_size" in specific:
        sizes["moe_intermediate_size"] = 64
    if model_type == "bailing_moe":
        sizes["moe_shared_expert_intermediate_size"] = 64
    if model_type in ("granitemoe", "gpt_oss", "minimax_m2"):
        sizes["intermediate_size"] = 64  # of an expert
    if "head_dim" in specific:
        sizes["head_dim"] = 32
    if name in ("glm-4.7-flash", "glm-5"):
        latents = dict(kv_lora_rank=512, qk_nope_head_dim=192, qk_rope_head_dim=64, v_head_dim=256)
        sizes |= latents | dict(num_key_value_heads=4)
    if "index_topk" in specific:
        sizes |= dict(index_head_dim=128)
    if "linear_key_head_dim" in specific:
        sizes |= dict(linear_key_head_dim=64, linear_value_head_dim=64)
    if model_type in ("deepseek_v3", "deepseek_v32"):
        latents = dict(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
        sizes |= latents | dict(num_key_value_heads=4)
    return sizes


def family(name: str, **changes: Any) -> dict[str, Any]:
    """Keys of the family's config.json; those of one value, and defaults, may be absent."""
    model_type, specific = FAMILIES[name]
    (architecture,) = (
        each for each, known in families.FAMILIES.items() if known.model_type == model_type
    )
    return {"architectures": [architecture], "model_type": model_type} | _SIZES | specific | changes


def family_checkpoint(
    folder: Path, name: str, *, seed: int = 0, tied: bool = False, **changes: Any
) -> Path:
    """Write a random float32 checkpoint of the family into `folder`, with the shipped tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    keys = family(name, tie_word_embeddings=tied, **changes)
    if name == "ling":
        config = AutoConfig.for_model(**glm_keys(keys))
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        return as_ling(save_perturbed(model, folder), keys)
    config = AutoConfig.for_model(**keys)
    return save_perturbed(AutoModelForCausalLM.from_config(config, dtype=torch.float32), folder)


def engine_checkpoint(folder: Path, name: str, **changes: Any) -> Path:
    """Write one that vLLM's kernels on CPU take; NAME-tied has tied embeddings."""
    family = name.removesuffix("-tied")
    sizes = engine_sizes(family) | changes
    return family_checkpoint(folder, family, tied=name != family, **sizes)


# Ling 2.0 is code of its authors, not of transformers. It is GLM-4.5's model under other names.
_LING_NAMES = {
    "model.embed_tokens.": "model.word_embeddings.",
    ".self_attn.o_proj.": ".attention.dense.",
    ".self_attn.q_norm.": ".attention.query_layernorm.",
    ".self_attn.k_norm.": ".attention.key_layernorm.",
    ".gate.e_score_correction_bias": ".gate.expert_bias",
}


def glm_keys(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of GLM-4.5's config.json for the model that these of Ling's describe."""
    theirs = {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"}
    found = {theirs.get(name, name): value for name, value in keys.items()}
    rope = dict(rope_type="default", rope_theta=keys["rope_theta"])
    rope["partial_rotary_factor"] = keys["partial_rotary_factor"]
    return found | dict(model_type="glm4_moe", attention_bias=False, rope_parameters=rope)


def in_ling(theirs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of a GLM-4.5 by Ling's names."""
    tensors = {}
    for name, tensor in theirs.items():
        for ours, other in _LING_NAMES.items():
            name = name.replace(ours, other)
        tensors[name] = tensor
    for name in [name for name in tensors if ".self_attn.q_proj." in name]:
        parts = [tensors.pop(name.replace("q_proj", f"{x}_proj")) for x in "qkv"]
        tensors[name.replace("self_attn.q_proj", "attention.query_key_value")] = torch.cat(parts)
    return tensors


def as_ling(folder: Path, keys: Mapping[str, Any] | None = None) -> Path:
    """Give a saved GLM-4.5 Ling's names of tensors, and config.json these keys."""
    from safetensors.torch import load_file, save_file

    tensors = in_ling(load_file(folder / "model.safetensors"))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if keys is not None:
        (folder / "config.json").write_text(json.dumps(dict(keys)))
    return folder


def ling_model(folder: str | Path) -> Any:
    """Load a checkpoint of Ling 2.0 into transformers' GLM-4.5, in float32."""
    from safetensors.torch import load_file
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    keys = json.loads((Path(folder) / "config.json").read_text())
    tensors, heads = {}, ("attention", "key_value", "key_value")
    for file in Path(folder).glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            for ours, theirs in _LING_NAMES.items():
                name = name.replace(theirs, ours)
            if "query_key_value" in name:
                rows = [keys["head_dim"] * keys[f"num_{x}_heads"] for x in heads]
                for x, part in zip("qkv", tensor.split(rows), strict=True):
                    tensors[name.replace("attention.query_key_value", f"self_attn.{x}_proj")] = part
            else:
                tensors[name] = tensor
    model, info = Glm4MoeForCausalLM.from_pretrained(
        None,
        config=Glm4MoeConfig(**glm_keys(keys)),
        state_dict=tensors,
        attn_implementation="eager",
        dtype=torch.float32,
        output_loading_info=True,
    )
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    return model


def transformers_model(folder: str | Path) -> Any:
    """The reference for a checkpoint, in float32."""
    from transformers import AutoModelForCausalLM

    if ModelShape.read(folder).renamed:
        return ling_model(folder)
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )


CLASSIFIER_TOLERANCE = 1e-5
"""float32: a masked row of padding changes the order of sums, and nothing else."""
CLASSIFIER_CONTEXT: int = _SIZES["max_position_embeddings"]


def classifier(folder: Path) -> Path:
    """Write a random Llama with one score, float32, with the shipped tokenizer."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    torch.manual_seed(0)
    sizes = dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    config = AutoConfig.for_model(**family("llama", num_labels=1, **sizes))
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    return save_perturbed(model, folder)


def in_mxfp4(folder: Path) -> dict[str, torch.Tensor]:
    """Store random experts in MXFP4, as gpt-oss is published; return all tensors of the folder."""
    from safetensors.torch import load_file, save_file

    tensors, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(1)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        size = experts, outputs, inputs // 32
        kind = dict(generator=generator, dtype=torch.uint8)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*size, 16), **kind)
        tensors[f"{name}_scales"] = torch.randint(119, 123, size, **kind)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    edit_json(folder / "config.json", quantization_config={"quant_method": "mxfp4"})
    return tensors


def stacked_experts(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Join the experts of a layer: gate over up, and down."""
    left, joined = dict(tensors), {}
    for layer in [n.rpartition("0.gate_proj")[0] for n in tensors if ".experts.0.gate_proj." in n]:
        count = sum(n.startswith(layer) and n.endswith("gate_proj.weight") for n in tensors)
        gate, up, down = (
            torch.stack([left.pop(f"{layer}{e}.{part}_proj.weight") for e in range(count)])
            for part in ("gate", "up", "down")
        )
        joined |= {f"{layer}gate_up_proj": torch.cat([gate, up], 1), f"{layer}down_proj": down}
    return left | joined


def wrapped_checkpoint(folder: Path, *, stacked: bool, dense: bool = False, **sizes: Any) -> Any:
    """Write Qwen3.5 as it is published: a text model with a vision and a prediction model.

    Args:
        stacked: the experts of a layer are one tensor each for gate over up, and down.
        dense: the models without experts.
        sizes: keys of the text model's config.json to change.

    Returns:
        transformers' model.
    """
    import transformers
    from safetensors.torch import load_file, save_file

    torch.manual_seed(0)
    kind = "Qwen3_5" if dense else "Qwen3_5Moe"
    text = _SIZES | FAMILIES["qwen3_5" if dense else "qwen3_5_moe"][1] | sizes
    text |= dict(mtp_num_hidden_layers=1)
    vision = dict(
        depth=1,
        hidden_size=32,
        intermediate_size=32,
        num_heads=2,
        out_hidden_size=text["hidden_size"],
    )
    config = getattr(transformers, f"{kind}Config")(
        text_config=text, vision_config=vision, tie_word_embeddings=False
    )
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    save_perturbed(model, folder)
    tensors = load_file(folder / "model.safetensors") | {"mtp.fc.weight": torch.ones(64, 128)}
    if stacked:
        tensors = stacked_experts(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return model


def random_checkpoint(folder: Path, *, seed: int = 0, tied: bool = False, **overrides: Any) -> Path:
    """Write a random Qwen3-MoE of 16 experts, top 4, with the shipped tokenizer."""
    sizes = dict(num_experts=16, num_experts_per_tok=4) | overrides
    return family_checkpoint(folder, "qwen3_moe", seed=seed, tied=tied, **sizes)


def save_perturbed(model: Any, folder: Path) -> Path:
    """Add noise to all parameters, norms and biases included, and save with the tokenizer."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn_like(buffer) * 0.2)
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(assets.TINY_MOE / file, folder / file)
    return folder


def random_pairs(
    shape: ModelShape, ranks: dict[str, int]
) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """Name, A and B of every adapter, none of them 0."""
    random = torch.Generator().manual_seed(0)
    return [
        (
            name,
            0.1 * torch.randn(rank, shape.tensor_shapes[name][1], generator=random),
            0.1 * torch.randn(shape.tensor_shapes[name][0], rank, generator=random),
        )
        for name, rank in ranks.items()
    ]
