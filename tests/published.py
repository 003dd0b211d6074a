"""Small checkpoints laid out as their authors publish them: the rows of the matrix of families.

To add one, write one entry in `LAYOUTS`. Sizes are those of `tests.families`, `keys` are the other
keys of the published config.json, also those that transformers leaves out. Weights are random. The
files are two shards with an index, in the published data type, with tensors that R3 leaves out.
"""

from __future__ import annotations

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
        keys: keys of config.json beside the sizes.
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
    keys: dict[str, Any]
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
    def has_engine(self) -> bool:
        """Whether vLLM samples from it on CPU. If not, its runs are supervised."""
        return "rl" not in self.limits

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
        tensors = _stack(tensors)
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


def _stack(tensors: Tensors) -> Tensors:
    """Join the experts of a layer: gate over up, and down."""
    left, joined = dict(tensors), Tensors()
    for layer in [n.rpartition("0.gate_proj")[0] for n in tensors if ".experts.0.gate_proj." in n]:
        count = sum(n.startswith(layer) and n.endswith("gate_proj.weight") for n in tensors)
        gate, up, down = (
            torch.stack([left.pop(f"{layer}{e}.{part}_proj.weight") for e in range(count)])
            for part in ("gate", "up", "down")
        )
        joined |= {f"{layer}gate_up_proj": torch.cat([gate, up], 1), f"{layer}down_proj": down}
    return left | joined


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

_COMMON: dict[str, Any] = dict(
    attention_dropout=0.0,
    hidden_act="silu",
    initializer_range=0.02,
    rms_norm_eps=1e-6,
    rope_scaling=None,
    torch_dtype="bfloat16",
    use_cache=True,
)
_QWEN: dict[str, Any] = _COMMON | dict(
    bos_token_id=1, max_window_layers=28, sliding_window=None, use_sliding_window=False
)
_QWEN_MOE: dict[str, Any] = _QWEN | dict(
    decoder_sparse_step=1, output_router_logits=False, router_aux_loss_coef=0.001
)
_QWEN3_MOE: dict[str, Any] = _QWEN_MOE | dict(
    attention_bias=False, mlp_only_layers=[], rope_theta=1e6, transformers_version="4.51.0"
)
_FP8: dict[str, Any] = dict(
    activation_scheme="dynamic", fmt="e4m3", quant_method="fp8", weight_block_size=[128, 128]
)
_DEEPSEEK: dict[str, Any] = _COMMON | dict(
    attention_bias=False,
    aux_loss_alpha=0.001,
    ep_size=1,
    moe_layer_freq=1,
    norm_topk_prob=True,
    num_nextn_predict_layers=0,
    pretraining_tp=1,
    scoring_func="sigmoid",
    seq_aux=True,
    topk_method="noaux_tc",
)
_GLM: dict[str, Any] = _COMMON | dict(
    eos_token_id=[2, 0],
    n_group=1,
    norm_topk_prob=True,
    num_nextn_predict_layers=1,
    rms_norm_eps=1e-5,
    rope_theta=1e6,
    topk_group=1,
    transformers_version="4.54.0",
)


def _remote(kind: str, name: str) -> dict[str, str]:
    """The auto_map of a repository with code of its own."""
    classes = (
        ("AutoConfig", "Config"),
        ("AutoModel", "Model"),
        ("AutoModelForCausalLM", "ForCausalLM"),
    )
    file = {"Config": "configuration", "Model": "modeling", "ForCausalLM": "modeling"}
    return {auto: f"{file[end]}_{kind}.{name}{end}" for auto, end in classes}


def _yarn_of_16(kind: str, factor: float, **more: Any) -> dict[str, Any]:
    """A published rope_scaling, from a context of 16 tokens."""
    return {kind: "yarn", "factor": factor, "original_max_position_embeddings": 16} | more


_KIMI: dict[str, Any] = _DEEPSEEK | dict(
    auto_map=_remote("deepseek", "DeepseekV3"),
    rms_norm_eps=1e-6,
    rope_theta=50000.0,
    rope_scaling=_yarn_of_16(
        "type", 32.0, beta_fast=1.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0
    ),
    routed_scaling_factor=2.827,
    transformers_version="4.48.3",
)
_KIMIS_INT4: dict[str, Any] = dict(
    config_groups=dict(
        group_0=dict(
            input_activations=None,
            output_activations=None,
            targets=["Linear"],
            weights=dict(actorder=None, block_structure=None, dynamic=False)
            | dict(group_size=32, num_bits=4, observer="minmax", observer_kwargs={})
            | dict(strategy="group", symmetric=True, type="int"),
        )
    ),
    format="pack-quantized",
    ignore=["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"]
    + ["re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
    kv_cache_scheme=None,
    quant_method="compressed-tensors",
    quantization_status="compressed",
)
_KIMIS_TOKENIZER: dict[str, Any] = dict(
    tokenizer_class="TikTokenTokenizer",
    auto_map={"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
)
_ONE_GROUP: dict[str, Any] = dict(n_group=1, topk_group=1)
_QWEN3_5: dict[str, Any] = dict(
    attention_bias=False,
    attention_dropout=0.0,
    attn_output_gate=True,
    bos_token_id=None,
    dtype="bfloat16",
    full_attention_interval=4,
    hidden_act="silu",
    initializer_range=0.02,
    mamba_ssm_dtype="float32",
    mtp_num_hidden_layers=1,
    mtp_use_dedicated_embeddings=False,
    partial_rotary_factor=0.25,
    rms_norm_eps=1e-6,
    use_cache=True,
    rope_parameters=dict(
        mrope_interleaved=True,
        mrope_section=[2, 1, 1],
        partial_rotary_factor=0.25,
        rope_theta=1e7,
        rope_type="default",
    ),
)
_QWEN3_5_WHOLE: dict[str, Any] = dict(
    image_token_id=500,
    tie_word_embeddings=False,
    transformers_version="4.57.0.dev0",
    video_token_id=501,
    vision_config=dict(deepstack_visual_indexes=[], depth=1, hidden_act="gelu_pytorch_tanh")
    | dict(hidden_size=32, in_channels=3, initializer_range=0.02, intermediate_size=32)
    | dict(model_type="qwen3_5_moe", num_heads=2, num_position_embeddings=2304)
    | dict(out_hidden_size=128, patch_size=16, spatial_merge_size=2, temporal_patch_size=2),
    vision_end_token_id=502,
    vision_start_token_id=503,
)


def _in_language_model(name: str) -> str:
    is_text = name.startswith("model.") and not name.startswith("model.visual.")
    return name.replace("model.", "model.language_model.", 1) if is_text else name


_DSA: dict[str, Any] = dict(index_head_dim=128, index_n_heads=4, index_topk=128)
_NO_EP: dict[str, Limit] = {"ep2": NO_EXPERTS}

LAYOUTS: Mapping[str, Published] = {
    "Qwen/Qwen3-30B-A3B": Published(
        family="qwen3_moe",
        keys=_QWEN3_MOE | dict(norm_topk_prob=True, max_window_layers=48),
        tokenizer=dict(tokenizer_class="Qwen2Tokenizer"),
        diagonal=("rl",),
    ),
    "Qwen/Qwen3-Coder-30B-A3B-Instruct-FP8": Published(
        family="qwen3_moe",
        keys=_QWEN3_MOE
        | dict(norm_topk_prob=True, qkv_bias=False, rope_theta=1e7, router_aux_loss_coef=0.0)
        | dict(shared_expert_intermediate_size=0, use_qk_norm=True)
        | dict(quantization_config=_FP8 | dict(modules_to_not_convert=["lm_head"])),
        stored="fp8",
        tokenizer=dict(tokenizer_class="Qwen2Tokenizer"),
        diagonal=("resume",),
    ),
    "Qwen/Qwen3-0.6B": Published(
        family="qwen3",
        keys=_QWEN | dict(attention_bias=False, rope_theta=1e6, transformers_version="4.51.0"),
        tied=True,
        extra=_tied_head,
        tokenizer=dict(tokenizer_class="Qwen2Tokenizer"),
        limits=_NO_EP,
        diagonal=("tp2",),
    ),
    "Qwen/Qwen1.5-MoE-A2.7B-Chat": Published(
        family="qwen2_moe",
        keys=_QWEN_MOE
        | dict(rope_theta=1e6, sliding_window=32768, norm_topk_prob=False)
        | dict(transformers_version="4.39.0.dev0"),
        tokenizer=dict(tokenizer_class="Qwen2Tokenizer"),
        limits={"lora": DROPPED},
        diagonal=("ep2",),
    ),
    "Qwen/Qwen2.5-0.5B-Instruct": Published(
        family="qwen2",
        keys=_QWEN
        | dict(rope_theta=1e6, sliding_window=32768, max_window_layers=21)
        | dict(transformers_version="4.43.1"),
        tied=True,
        tokenizer=dict(tokenizer_class="Qwen2Tokenizer"),
        limits=_NO_EP,
        diagonal=("cp2",),
    ),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": Published(
        family="qwen3_next",
        keys=_QWEN_MOE
        | dict(attention_bias=False, full_attention_interval=4, mlp_only_layers=[])
        | dict(partial_rotary_factor=0.25, rope_theta=1e7, transformers_version="4.57.0.dev0"),
        extra=_mtp,
        tokenizer=dict(tokenizer_class="Qwen2Tokenizer"),
        limits={"tp2": WHOLE_DELTA, "cp2": WHOLE_DELTA},
        diagonal=("pp2",),
    ),
    "Qwen/Qwen3.5-35B-A3B": Published(
        family="qwen3_5_moe",
        keys=_QWEN3_5
        | dict(mlp_only_layers=[], model_type="qwen3_5_moe_text", router_aux_loss_coef=0.001),
        wrapper=_QWEN3_5_WHOLE
        | dict(architectures=["Qwen3_5MoeForConditionalGeneration"], model_type="qwen3_5_moe"),
        renamed=_in_language_model,
        stacked=True,
        extra=_mtp_and_vision,
        tokenizer=dict(tokenizer_class="Qwen2Tokenizer"),
        limits={"tp2": WHOLE_DELTA, "cp2": WHOLE_DELTA, "lora": DROPPED},
        diagonal=("sft",),
    ),
    "Qwen/Qwen3.5-4B": Published(
        family="qwen3_5",
        keys=_QWEN3_5 | dict(mlp_only_layers=[], model_type="qwen3_5_text"),
        wrapper=_QWEN3_5_WHOLE
        | dict(architectures=["Qwen3_5ForConditionalGeneration"], model_type="qwen3_5")
        | dict(tie_word_embeddings=True),
        renamed=_in_language_model,
        extra=_mtp_and_vision,
        tied=True,
        tokenizer=dict(tokenizer_class="Qwen2Tokenizer"),
        limits=_NO_EP | {"tp2": WHOLE_DELTA, "cp2": WHOLE_DELTA},
        diagonal=("rl",),
    ),
    "allenai/OLMoE-1B-7B-0924": Published(
        family="olmoe",
        keys=_COMMON
        | dict(attention_bias=False, clip_qkv=None, norm_topk_prob=False, rms_norm_eps=1e-5)
        | dict(output_router_logits=False, rope_theta=10000.0, router_aux_loss_coef=0.01)
        | dict(transformers_version="4.43.0.dev0"),
        tokenizer=dict(tokenizer_class="GPTNeoXTokenizer"),
        diagonal=("streamed",),
    ),
    "mistralai/Mixtral-8x7B-Instruct-v0.1": Published(
        family="mixtral",
        keys=_COMMON
        | dict(bos_token_id=1, output_router_logits=False, rms_norm_eps=1e-5, rope_theta=1e6)
        | dict(router_aux_loss_coef=0.02, sliding_window=None, transformers_version="4.36.0.dev0"),
        diagonal=("recompute",),
    ),
    "moonshotai/Moonlight-16B-A3B-Instruct": Published(
        family="moonlight",
        keys=_DEEPSEEK
        | dict(auto_map=_remote("deepseek", "DeepseekV3"), rms_norm_eps=1e-5, rope_theta=50000.0)
        | dict(transformers_version="4.48.3"),
        tokenizer=_KIMIS_TOKENIZER,
        diagonal=("export",),
    ),
    "deepseek-ai/DeepSeek-V3": Published(
        family="deepseek_v3",
        keys=_DEEPSEEK
        | dict(auto_map=_remote("deepseek", "DeepseekV3"), num_nextn_predict_layers=1)
        | dict(rope_theta=10000, routed_scaling_factor=2.5, transformers_version="4.33.1")
        | dict(quantization_config=_FP8)
        | dict(
            rope_scaling=_yarn_of_16(
                "type", 40, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0
            )
        ),
        stored="fp8",
        extra=_layer_past_the_last,
        tokenizer=dict(tokenizer_class="LlamaTokenizerFast"),
        diagonal=("check",),
    ),
    "deepseek-ai/DeepSeek-V3.2": Published(
        family="deepseek_v3.2",
        keys=_DEEPSEEK
        | dict(num_nextn_predict_layers=1, rope_theta=10000, routed_scaling_factor=2.5)
        | dict(quantization_config=_FP8 | dict(scale_fmt="ue8m0"), transformers_version="4.44.2")
        | _DSA
        | dict(
            rope_scaling=_yarn_of_16(
                "type", 40, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0
            )
        ),
        stored="fp8",
        extra=_layer_past_the_last,
        tokenizer=dict(tokenizer_class="LlamaTokenizerFast"),
        diagonal=("export",),
    ),
    "moonshotai/Kimi-K2-Instruct": Published(
        family="deepseek_v3",
        keys=_KIMI | dict(quantization_config=_FP8),
        changes=_ONE_GROUP,
        model_type="kimi_k2",
        stored="fp8",
        tokenizer=_KIMIS_TOKENIZER,
    ),
    "moonshotai/Kimi-K2-Thinking": Published(
        family="deepseek_v3",
        keys=_KIMI | dict(quantization_config=_KIMIS_INT4),
        changes=_ONE_GROUP,
        model_type="kimi_k2",
        stored="int4",
        tokenizer=_KIMIS_TOKENIZER,
        diagonal=("sft",),
    ),
    "moonshotai/Kimi-K2.5": Published(
        family="deepseek_v3",
        # A whole PretrainedConfig of transformers 4.
        keys=_KIMI
        | dict(rms_norm_eps=1e-5, ep_size=1, quantization_config=_KIMIS_INT4)
        | dict(_name_or_path="", add_cross_attention=False, chunk_size_feed_forward=0)
        | dict(diversity_penalty=0.0, is_decoder=False, output_attentions=False, pruned_heads={})
        | dict(return_dict=True, tokenizer_class=None, top_k=50, torchscript=False)
        | dict(rope_scaling=_yarn_of_16("type", 64.0, mscale=1.0, mscale_all_dim=1.0)),
        changes=_ONE_GROUP,
        model_type="kimi_k2",
        wrapper=dict(
            architectures=["KimiK25ForConditionalGeneration"],
            auto_map=_remote("kimi_k25", "KimiK25"),
            dtype="bfloat16",
            ignore_index=-100,
            media_placeholder_token_id=500,
            model_type="kimi_k25",
            tie_word_embeddings=False,
            transformers_version="4.57.1",
            use_unified_vision_chunk=True,
            video_placeholder="<|kimi_k25_video_placeholder|>",
            vision_config=dict(init_pos_emb_height=64, init_pos_emb_time=4, init_pos_emb_width=64)
            | dict(merge_kernel_size=[2, 2], merge_type="sd2_tpool", mm_hidden_size=32)
            | dict(mm_projector_type="patchmerger", patch_size=14, text_hidden_size=128)
            | dict(pos_emb_type="divided_fixed", projector_hidden_act="gelu", model_type="")
            | dict(video_attn_type="spatial_temporal", vt_hidden_size=32, vt_intermediate_size=64)
            | dict(projector_ln_eps=1e-5, vt_num_attention_heads=2, vt_num_hidden_layers=1),
        ),
        renamed=lambda name: name if name.startswith(_KIMIS_VISION) else f"language_model.{name}",
        stored="int4",
        extra=_kimis_vision,
        tokenizer=_KIMIS_TOKENIZER,
    ),
    "upstage/Solar-Open-100B": Published(
        family="solar_open",
        keys=_COMMON
        | dict(attention_bias=False, bos_token_id=1, first_k_dense_replace=0, n_group=1)
        | dict(norm_topk_prob=True, partial_rotary_factor=1.0, rms_norm_eps=1e-5, rope_theta=1e6)
        | dict(routed_scaling_factor=1.0, topk_group=1, use_qk_norm=False)
        | dict(auto_map=_remote("solar_open", "SolarOpen"), transformers_version="4.57.1")
        | dict(rope_scaling=_yarn_of_16("type", 16.0)),
        tokenizer=dict(tokenizer_class="PreTrainedTokenizerFast"),
        diagonal=("rl",),
    ),
    "rednote-hilab/dots.llm1.inst": Published(
        family="dots1",
        keys=_COMMON
        | dict(attention_bias=False, max_window_layers=62, moe_layer_freq=1)
        | dict(norm_topk_prob=True, pretraining_tp=1, rms_norm_eps=1e-5, rope_theta=1e7)
        | dict(routed_scaling_factor=2.5, scoring_func="noaux_tc", sliding_window=None)
        | dict(transformers_version="4.46.3"),
        tokenizer=dict(tokenizer_class="Qwen2Tokenizer"),
        diagonal=("export",),
    ),
    "zai-org/GLM-4.5-Air": Published(
        family="glm-4.5-air",
        keys=_GLM | dict(partial_rotary_factor=0.5, use_qk_norm=False, routed_scaling_factor=1.0),
        extra=_layer_past_the_last,
        tokenizer=dict(tokenizer_class="PreTrainedTokenizer"),
        diagonal=("int8",),
    ),
    "zai-org/GLM-4.6": Published(
        family="glm-4.5",
        keys=_GLM | dict(partial_rotary_factor=0.5, use_qk_norm=True, routed_scaling_factor=2.5),
        extra=_layer_past_the_last,
        tokenizer=dict(tokenizer_class="PreTrainedTokenizer"),
    ),
    "zai-org/GLM-4.7-Flash": Published(
        family="glm-4.7-flash",
        keys=_GLM | dict(attention_bias=False, partial_rotary_factor=1.0, topk_method="noaux_tc"),
        extra=_layer_past_the_last,
        tokenizer=dict(tokenizer_class="PreTrainedTokenizer"),
        diagonal=("tools",),
    ),
    "zai-org/GLM-5": Published(
        family="glm-5",
        keys=_GLM
        | _DSA
        | dict(attention_bias=False, ep_size=1, head_dim=64, indexer_rope_interleave=True)
        | dict(moe_layer_freq=1, pretraining_tp=1, qk_head_dim=256, rope_interleave=True)
        | dict(rope_parameters=dict(rope_theta=1e6, rope_type="default"), scoring_func="sigmoid")
        | dict(topk_method="noaux_tc", transformers_version="5.0.2.dev0"),
        extra=_layer_past_the_last,
        tokenizer=dict(tokenizer_class="TokenizersBackend"),
        diagonal=("resume",),
    ),
    "inclusionAI/Ling-mini-2.0": Published(
        family="ling",
        keys=_COMMON
        | dict(auto_map=_remote("bailing_moe_v2", "BailingMoeV2"), embedding_dropout=0.0)
        | dict(eos_token_id=2, max_window_layers=20, mtp_loss_scaling_factor=0, norm_head=False)
        | dict(norm_softmax=False, num_nextn_predict_layers=0, output_dropout=0.0)
        | dict(output_router_logits=False, partial_rotary_factor=0.5, rope_theta=600000)
        | dict(router_dtype="fp32", transformers_version="4.52.3", use_sliding_window=False),
        tokenizer=dict(tokenizer_class="PreTrainedTokenizerFast"),
        limits={"lora": JOINED_ATTENTION},
        diagonal=("rl",),
    ),
    "ibm-granite/granite-3.1-1b-a400m-instruct": Published(
        family="granitemoe",
        keys=_COMMON
        | dict(attention_bias=False, bos_token_id=0)
        | dict(output_router_logits=False, rms_norm_eps=1e-6, rope_theta=1500000.0)
        | dict(router_aux_loss_coef=0.0, transformers_version="4.47.0"),
        tied=True,
        tokenizer=dict(tokenizer_class="GPT2Tokenizer"),
        limits={"lora": JOINED},
        diagonal=("doctor",),
    ),
    "openai/gpt-oss-20b": Published(
        family="gpt_oss",
        keys=dict(
            attention_bias=True,
            attention_dropout=0.0,
            experts_per_token=3,
            hidden_act="silu",
            initial_context_length=4096,
            initializer_range=0.02,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            output_router_logits=False,
            quantization_config=dict(
                modules_to_not_convert=["model.layers.*.self_attn", "model.layers.*.mlp.router"]
                + ["model.embed_tokens", "lm_head"],
                quant_method="mxfp4",
            ),
            rms_norm_eps=1e-5,
            rope_scaling=dict(beta_fast=32.0, beta_slow=1.0, factor=32.0)
            | dict(original_max_position_embeddings=16, rope_type="yarn", truncate=False),
            rope_theta=150000,
            router_aux_loss_coef=0.9,
            swiglu_limit=7.0,
            transformers_version="4.55.0.dev0",
            use_cache=True,
        ),
        stored="mxfp4",
        tokenizer=dict(tokenizer_class="PreTrainedTokenizerFast"),
        limits={"cp2": CP_WINDOW, "lora": JOINED},
        diagonal=("kl",),
    ),
    "MiniMaxAI/MiniMax-M2": Published(
        family="minimax-m2",
        keys=dict(
            attention_dropout=0.0,
            attn_type_list=[1, 1, 1],
            auto_map=_remote("minimax_m2", "MiniMaxM2"),
            hidden_act="silu",
            initializer_range=0.02,
            layernorm_full_attention_beta=1.0,
            layernorm_linear_attention_beta=1.0,
            layernorm_mlp_beta=1.0,
            max_model_len=196608,
            mlp_intermediate_size=8192,
            mtp_transformer_layers=1,
            num_mtp_modules=3,
            output_router_logits=False,
            qk_norm_type="per_layer",
            quantization_config=_FP8
            | dict(fmt="float8_e4m3fn")
            | dict(modules_to_not_convert=["gate", "e_score_correction_bias", "lm_head"]),
            rms_norm_eps=1e-6,
            rope_theta=5000000,
            router_aux_loss_coef=0.001,
            router_jitter_noise=0.0,
            scoring_func="sigmoid",
            shared_intermediate_size=0,
            shared_moe_mode="sigmoid",
            sliding_window=None,
            transformers_version="4.46.1",
            use_cache=True,
            use_mtp=True,
            use_qk_norm=True,
            use_routing_bias=True,
        ),
        stored="fp8",
        tokenizer=dict(tokenizer_class="GPT2Tokenizer"),
        diagonal=("rescore",),
    ),
    "baidu/ERNIE-4.5-21B-A3B-PT": Published(
        family="ernie4_5_moe",
        keys=dict(
            hidden_act="silu",
            hidden_dropout_prob=0.0,
            moe_aux_loss_lambda=1e-5,
            moe_capacity=[64, 64, 64],
            moe_gate="topk",
            moe_layer_end_index=2,
            moe_use_aux_free=True,
            num_nextn_predict_layers=1,
            rms_norm_eps=1e-5,
            rope_scaling=None,
            rope_theta=500000.0,
            torch_dtype="bfloat16",
            transformers_version="4.54.0.dev0",
            use_bias=False,
            use_cache=False,
        ),
        tied=True,
        extra=_ernies_mtp,
        tokenizer=dict(tokenizer_class="LlamaTokenizerFast"),
        diagonal=("check",),
    ),
    "meta-llama/Llama-3.1-8B-Instruct": Published(
        family="llama3.1",
        keys=_COMMON
        | dict(attention_bias=False, bos_token_id=1, eos_token_id=[2, 0], mlp_bias=False)
        | dict(pretraining_tp=1, rms_norm_eps=1e-5, rope_theta=500000.0)
        | dict(transformers_version="4.42.3")
        | dict(
            rope_scaling=dict(factor=8.0, high_freq_factor=4.0, low_freq_factor=1.0)
            | dict(original_max_position_embeddings=16, rope_type="llama3")
        ),
        limits=_NO_EP,
        diagonal=("lora",),
    ),
    "meta-llama/Llama-2-7b-chat-hf": Published(
        family="llama",
        keys=_COMMON
        | dict(bos_token_id=1, pretraining_tp=1, rms_norm_eps=1e-5, torch_dtype="float16")
        | dict(transformers_version="4.32.0.dev0"),
        extra=_frequencies,
        tokenizer=dict(tokenizer_class="LlamaTokenizerFast"),
        limits=_NO_EP,
    ),
}
