"""Small checkpoints laid out as their authors publish them: the rows of the matrix of families.

To add one, write one entry in published.json with the keys of its published files, and in `_PARTS`
what is no data.
Sizes are those of `tests.families`, `keys` are the others of config.json, also those that
transformers leaves out. Weights are random. The
files are two shards with an index, in the published data type, with tensors that R3 leaves out.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from r3 import assets
from r3.models import families
from tests.families import (
    FAMILIES,
    HALF_ENGINE_FAMILIES,
    engine_sizes,
    family,
    glm_keys,
    in_ling,
    stacked_experts,
)

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Limit:
    """A documented refusal.

    Attributes:
        said: what R3 prints, a regular expression.
        documented: words of a page of docs/ that name the limit.
        page: that page.
    """

    said: str
    documented: str
    page: str = "limits.md"


WHOLE_DELTA = Limit(
    said="gated delta layers are not divided", documented="Gated delta layers (Qwen3-Next, Qwen3.5)"
)
CP_WINDOW = Limit(
    said="windows of attention are not divided", documented="sliding windows are not sharded"
)
NO_EXPERTS = Limit(
    said="it has no experts to shard",
    documented="ep the experts, of which a dense model has none",
    page="parallelism.md",
)
JOINED = Limit(
    said="in one tensor|merged",
    documented="store all experts of a layer in one tensor (Granite-MoE, gpt-oss)",
    page="lora.md",
)
JOINED_ATTENTION = Limit(
    said="in one tensor|merged",
    documented="queries, keys and values (Ling), can only export",
    page="lora.md",
)
DROPPED = Limit(
    said="PEFT with transformers 5 drops",
    documented="PEFT drops some adapters without an error, and an export names them",
    page="lora.md",
)


@dataclass(frozen=True, kw_only=True)
class Published:
    """One checkpoint as it is published.

    Attributes:
        family: name in `tests.families.FAMILIES`.
        keys: keys of config.json beside the sizes, from published.json.
        model_type, architecture: as published, where transformers has another.
        wrapper: keys around `text_config` of a model that has others beside the text model.
        renamed: name of a tensor of transformers' text model -> published name.
        stacked: the experts of a layer are two tensors.
        stored: how the matrices are stored.
        extra: tensors that R3 leaves out, from those of the model.
        tokenizer: keys of tokenizer_config.json.
        tied: config.json says so.
        changes: other sizes than those of the family.
        limits: cell -> why R3 refuses it.
        diagonal: cells that `make test` has.
    """

    family: str
    keys: dict[str, Any] = field(default_factory=dict)
    model_type: str = ""
    architecture: str = ""
    wrapper: dict[str, Any] = field(default_factory=dict)
    renamed: Callable[[str], str] = str
    stacked: bool = False
    stored: Literal["bfloat16", "fp8", "mxfp4", "int4"] = "bfloat16"
    extra: Callable[[Tensors, int], Tensors] = lambda _tensors, _layers: {}
    tokenizer: dict[str, Any] = field(default_factory=dict)
    tied: bool = False
    changes: dict[str, Any] = field(default_factory=dict)
    limits: Mapping[str, Limit] = field(default_factory=dict)
    diagonal: tuple[str, ...] = ()

    @property
    def dtype(self) -> str:
        """Data type in which policy and engine are compared on CPU."""
        return "bfloat16" if self.family in HALF_ENGINE_FAMILIES else "float32"

    @property
    def listed(self) -> str:
        """Architecture in `r3.models.families.FAMILIES`."""
        model_type = FAMILIES[self.family][0]
        return next(n for n, each in families.FAMILIES.items() if each.model_type == model_type)


# --- tensors that R3 leaves out -----------------------------------------------------------------


def _last_layer(tensors: Tensors, layers: int, to: str) -> Tensors:
    """A copy of the last layer under another name."""
    start = f"model.layers.{layers - 1}."
    found = {n.replace(start, to): t.clone() for n, t in tensors.items() if n.startswith(start)}
    assert found
    return found


def _layer_past_the_last(tensors: Tensors, layers: int) -> Tensors:
    """DeepSeek's and GLM's prediction layer."""
    start, norm = f"model.layers.{layers}.", tensors["model.norm.weight"]
    whole = tensors["model.embed_tokens.weight"]
    return _last_layer(tensors, layers, start) | {
        f"{start}embed_tokens.weight": whole.clone(),
        f"{start}enorm.weight": norm.clone(),
        f"{start}hnorm.weight": norm.clone(),
        f"{start}eh_proj.weight": torch.zeros(len(norm), 2 * len(norm)),
        f"{start}shared_head.norm.weight": norm.clone(),
        f"{start}shared_head.head.weight": whole.clone(),
    }


def _mtp(tensors: Tensors, layers: int) -> Tensors:
    """Qwen3-Next's and Qwen3.5's prediction layer."""
    full = next(n for n in tensors if n.endswith("self_attn.q_proj.weight")).split(".")[2]
    norm = tensors["model.norm.weight"]
    start = f"model.layers.{full}."
    return {
        n.replace(start, "mtp.layers.0."): t.clone() for n, t in tensors.items() if start in n
    } | {
        "mtp.fc.weight": torch.zeros(len(norm), 2 * len(norm)),
        "mtp.norm.weight": norm.clone(),
        "mtp.pre_fc_norm_embedding.weight": norm.clone(),
        "mtp.pre_fc_norm_hidden.weight": norm.clone(),
    }


def _mtp_and_vision(tensors: Tensors, layers: int) -> Tensors:
    vision = {
        "model.visual.patch_embed.proj.weight": torch.zeros(32, 3, 2, 16, 16),
        "model.visual.blocks.0.attn.qkv.weight": torch.zeros(96, 32),
        "model.visual.merger.linear_fc2.weight": torch.zeros(64, 128),
    }
    return _mtp(tensors, layers) | vision


def _ernies_mtp(tensors: Tensors, layers: int) -> Tensors:
    norm = tensors["model.norm.weight"]
    return _last_layer(tensors, layers, "model.mtp_block.0.") | {
        "model.mtp_emb_norm.0.weight": norm.clone(),
        "model.mtp_hidden_norm.0.weight": norm.clone(),
        "model.mtp_linear_proj.0.weight": torch.zeros(len(norm), 2 * len(norm)),
    }


def _tied_head(tensors: Tensors, _layers: int) -> Tensors:
    return {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}


def _frequencies(_tensors: Tensors, layers: int) -> Tensors:
    return {
        f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(16) for i in range(layers)
    }


_KIMIS_VISION = ("vision_tower.", "mm_projector.")


def _kimis_vision(_tensors: Tensors, _layers: int) -> Tensors:
    return {
        "vision_tower.patch_embed.proj.weight": torch.zeros(32, 3, 14, 14),
        "vision_tower.encoder.blocks.0.wqkv.weight": torch.zeros(96, 32),
        "mm_projector.proj.0.bias": torch.zeros(128),
    }


# --- how matrices are stored --------------------------------------------------------------------


def _in_fp8(name: str, whole: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Blocks of 128 x 128; the factor is chosen so that the largest value is 448."""
    rows, columns = whole.shape
    grid = [-(-n // 128) for n in whole.shape]
    factors = torch.empty(grid)
    stored, exact = torch.empty_like(whole, dtype=torch.float8_e4m3fn), torch.empty_like(whole)
    for i in range(0, rows, 128):
        for j in range(0, columns, 128):
            block = whole[i : i + 128, j : j + 128].float()
            factors[i // 128, j // 128] = factor = block.abs().max() / 448
            small = (block / factor).to(torch.float8_e4m3fn)
            stored[i : i + 128, j : j + 128] = small
            exact[i : i + 128, j : j + 128] = small.float() * factor
    return {name: stored, f"{name}_scale_inv": factors}, exact.bfloat16()


def _in_int4(name: str, whole: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Kimi-K2-Thinking's: groups of 32 values of a row, eight of them per int32, lowest first."""
    rows, columns = whole.shape
    groups = whole.float().view(rows, -1, 32)
    factors = (groups.abs().amax(-1) / 7).bfloat16()
    values = (groups / factors.float()[..., None]).round().clamp(-8, 7)
    exact = (values * factors.float()[..., None]).view(rows, columns)
    bits = (values.view(rows, -1, 8).long() + 8) << torch.arange(0, 32, 4)
    packed = bits.sum(-1)
    packed = torch.where(packed >= 1 << 31, packed - (1 << 32), packed).int()
    stored = {"packed": packed, "scale": factors, "shape": torch.tensor([rows, columns])}
    return {f"{name}_{part}": each for part, each in stored.items()}, exact.bfloat16()


_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def _in_mxfp4(name: str, whole: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """gpt-oss's: [experts, inputs, outputs] as outputs of groups of 32 inputs, low nibble first."""
    experts, inputs, outputs = whole.shape
    groups = whole.float().mT.reshape(experts, outputs, inputs // 32, 32)
    exponents = (groups.abs().amax(-1) / 6).log2().ceil().clamp(min=-126)
    scaled = groups / exponents.exp2()[..., None]
    codes = (scaled.abs()[..., None] - _FP4).abs().argmin(-1)
    exact = (_FP4[codes] * scaled.sign() * exponents.exp2()[..., None]).view(
        experts, outputs, inputs
    )
    codes = (codes | ((scaled < 0).long() << 3)).to(torch.uint8)
    stored = {
        f"{name}_blocks": codes[..., 0::2] | (codes[..., 1::2] << 4),
        f"{name}_scales": (exponents + 127).to(torch.uint8),
    }
    return stored, exact.mT.bfloat16()


def _store(tensors: Tensors, kind: str) -> tuple[Tensors, Tensors]:
    """Return the tensors as they are stored, and the values that these stand for."""
    stored, exact = Tensors(), Tensors()
    for name, whole in tensors.items():
        is_matrix = ".layers." in name and name.endswith(".weight") and whole.dim() == 2
        is_matrix &= not name.endswith(("gate.weight", "eh_proj.weight", "norm.weight"))
        is_matrix &= ".embed_tokens." not in name and ".head." not in name
        is_matrix &= not name.endswith("weights_proj.weight")
        if kind == "fp8" and is_matrix:
            pair = _in_fp8(name, whole)
        elif kind == "int4" and is_matrix and ".mlp.experts." in name:
            pair = _in_int4(name, whole)
        elif kind == "mxfp4" and name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            pair = _in_mxfp4(name, whole)
        else:
            pair = {name: whole}, whole
        stored, exact[name] = stored | pair[0], pair[1]
    return stored, exact


# --- folders ------------------------------------------------------------------------------------


def _values(layout: Published) -> dict[str, Any]:
    """The text model's config.json as published, without how it is quantised."""
    values = family(layout.family, **engine_sizes(layout.family) | layout.changes)
    if "rope_theta" in layout.keys or "rope_parameters" in layout.keys:
        values.pop("rope_parameters", None)
    return values | layout.keys | {"tie_word_embeddings": layout.tied}


def reference(values: Mapping[str, Any], family: str) -> Any:
    """transformers' configuration of the text model that has these keys."""
    from transformers import CONFIG_MAPPING

    if family == "ling":
        return CONFIG_MAPPING["glm4_moe"].from_dict(glm_keys(values))
    left = {"quantization_config", "torch_dtype", "auto_map", "model_type", "architectures"}
    whole = dict(values)
    text = {**whole, **whole.get("text_config", {})}
    return CONFIG_MAPPING[FAMILIES[family][0]].from_dict(
        {key: value for key, value in text.items() if key not in left}
    )


def _tensors(layout: Published) -> Tensors:
    """Random weights by transformers' names: noise on all of them, norms and biases included."""
    from tempfile import TemporaryDirectory

    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    from tests.families import save_perturbed

    torch.manual_seed(0)
    config = reference(_values(layout), layout.family)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with TemporaryDirectory() as folder:
        save_perturbed(model, Path(folder))
        tensors = load_file(Path(folder) / "model.safetensors")
    return {
        n: t if n.endswith("e_score_correction_bias") else t.bfloat16() for n, t in tensors.items()
    }


def publish(folder: Path, name: str) -> Path:
    """Write a checkpoint of `LAYOUTS` into `folder` as it is published."""
    layout, values = LAYOUTS[name], _values(LAYOUTS[name])
    tensors = _tensors(layout)
    layers = values["num_hidden_layers"]
    if layout.family == "ling":
        tensors = in_ling(tensors)
    extra = {n: t.bfloat16() for n, t in layout.extra(tensors, layers).items()}
    if layout.stacked:
        tensors = stacked_experts(tensors)
    stored, _ = _store(tensors | extra, layout.stored)
    stored = {layout.renamed(n): tensor for n, tensor in stored.items()}
    folder.mkdir(parents=True)
    _write_shards(folder, stored)
    if layout.model_type:
        values["model_type"] = layout.model_type
    if layout.wrapper:
        values.pop("architectures")
        values = {**layout.wrapper, "text_config": values}
    if layout.architecture:
        values["architectures"] = [layout.architecture]
    _write(folder / "config.json", values)
    ends = dict(eos_token_id=[2, 0], pad_token_id=0, transformers_version="4.51.0")
    chosen = dict(do_sample=True, temperature=0.6, top_p=0.95)
    _write(folder / "generation_config.json", ends | chosen)
    _copy_tokenizer(folder, layout.tokenizer)
    return folder


def dequantised(folder: Path, name: str) -> Path:
    """Write the values of a published checkpoint as transformers saves the text model."""
    layout = LAYOUTS[name]
    if layout.family == "ling":
        return publish(folder, name)
    _, exact = _store(_tensors(layout), layout.stored)
    config = reference(_values(layout), layout.family)
    folder.mkdir(parents=True)
    _write_shards(folder, exact)
    config.save_pretrained(folder)
    _copy_tokenizer(folder, {})
    return folder


def _write_shards(folder: Path, tensors: Tensors) -> None:
    """Two shards and an index, as on the hub."""
    from safetensors.torch import save_file

    names = list(tensors)
    files = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    halves = names[: len(names) // 2], names[len(names) // 2 :]
    weight_map = {n: file for file, half in zip(files, halves, strict=True) for n in half}
    for file, half in zip(files, halves, strict=True):
        whole = {n: tensors[n].contiguous() for n in half}
        save_file(whole, folder / file, metadata={"format": "pt"})
    size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    _write(folder / "model.safetensors.index.json", index)


def _copy_tokenizer(folder: Path, keys: Mapping[str, Any]) -> None:
    for file in ("tokenizer.json", "chat_template.jinja"):
        shutil.copyfile(assets.TINY_MOE / file, folder / file)
    settings = json.loads((assets.TINY_MOE / "tokenizer_config.json").read_text())
    _write(folder / "tokenizer_config.json", settings | keys)


def _write(file: Path, values: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=2))


# --- the layouts --------------------------------------------------------------------------------


def _in_language_model(name: str) -> str:
    is_text = name.startswith("model.") and not name.startswith("model.visual.")
    return name.replace("model.", "model.language_model.", 1) if is_text else name


_NO_EP: dict[str, Limit] = {"ep2": NO_EXPERTS}

# What is no data: how tensors are named and stacked, which others there are, what is refused.
_PARTS: Mapping[str, dict[str, Any]] = {
    "Qwen/Qwen3-0.6B": dict(extra=_tied_head, limits=_NO_EP),
    "Qwen/Qwen1.5-MoE-A2.7B-Chat": dict(limits={"lora": DROPPED}),
    "Qwen/Qwen2.5-0.5B-Instruct": dict(limits=_NO_EP),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": dict(
        extra=_mtp, limits={"tp2": WHOLE_DELTA, "cp2": WHOLE_DELTA}
    ),
    "Qwen/Qwen3.5-35B-A3B": dict(
        renamed=_in_language_model,
        stacked=True,
        extra=_mtp_and_vision,
        limits={"tp2": WHOLE_DELTA, "cp2": WHOLE_DELTA, "lora": DROPPED},
    ),
    "Qwen/Qwen3.5-4B": dict(
        renamed=_in_language_model,
        extra=_mtp_and_vision,
        limits=_NO_EP | {"tp2": WHOLE_DELTA, "cp2": WHOLE_DELTA},
    ),
    "deepseek-ai/DeepSeek-V3": dict(extra=_layer_past_the_last),
    "deepseek-ai/DeepSeek-V3.2": dict(extra=_layer_past_the_last),
    "moonshotai/Kimi-K2.5": dict(
        renamed=lambda name: name if name.startswith(_KIMIS_VISION) else f"language_model.{name}",
        extra=_kimis_vision,
    ),
    "zai-org/GLM-4.5-Air": dict(extra=_layer_past_the_last),
    "zai-org/GLM-4.6": dict(extra=_layer_past_the_last),
    "zai-org/GLM-4.7-Flash": dict(extra=_layer_past_the_last),
    "zai-org/GLM-5": dict(extra=_layer_past_the_last),
    "inclusionAI/Ling-mini-2.0": dict(limits={"lora": JOINED_ATTENTION}),
    "ibm-granite/granite-3.1-1b-a400m-instruct": dict(limits={"lora": JOINED}),
    "openai/gpt-oss-20b": dict(limits={"cp2": CP_WINDOW, "lora": JOINED}),
    "baidu/ERNIE-4.5-21B-A3B-PT": dict(extra=_ernies_mtp),
    "meta-llama/Llama-3.1-8B-Instruct": dict(limits=_NO_EP),
    "meta-llama/Llama-2-7b-chat-hf": dict(extra=_frequencies, limits=_NO_EP),
}
_DATA = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
LAYOUTS = {name: Published(**each, **_PARTS.get(name, {})) for name, each in _DATA.items()}
