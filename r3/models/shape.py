"""What a checkpoint's config.json says about the model: sizes, MoE layers, name and shape of every tensor.

Read with json alone, so that a config is checked and a run planned without importing torch or transformers.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import log, prod
from pathlib import Path
from typing import Any, Literal


class ShapeError(ValueError):
    """A config.json that does not describe a model we can train; the message names the key."""


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Sizes of DeepSeek's multi-head latent attention: keys and values of all heads come from one small vector a token.

    A query or key head is `nope_size` numbers that know no position and `rope_size` rotated ones. `query_rank` is 0 where
    queries are projected directly.
    """

    query_rank: int
    kv_rank: int
    nope_size: int
    rope_size: int
    value_size: int


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are slowed for a context longer than the `original` one; `r3.policy.rope` has the formulas.

    `llama3` (Llama 3.1) knows wavelengths by how often they fit into the original context: `fast` times and more stay,
    `slow` times and less are slowed by `factor`. `yarn` (arXiv 2309.00071) counts in the same way, and multiplies the cosine
    and sine by `attention_factor`. `mscale_all_dim` is DeepSeek's: it multiplies all of an attention score.
    """

    kind: Literal["llama3", "yarn"]
    factor: float
    original: int
    fast: float
    slow: float
    truncate: bool = True
    attention_factor: float = 1.0
    mscale_all_dim: float = 0.0


@dataclass(frozen=True, kw_only=True)
class MoeNames:
    """How a family names the tensors of a MoE layer, after `model.layers.N.`; `{e}` is the number of an expert."""

    router: str = "mlp.gate"
    expert: str = "mlp.experts.{e}"
    gate_up_down: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    shared_expert: str = "mlp.shared_experts"
    shared_gate: str = ""
    router_bias: str = ""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a model. A dense one has no experts: `num_experts` and `topk` are 0, `moe_layers` is empty.

    `qk_norm` says over what queries and keys are normalised: not at all, each head, or all heads together.
    `shared_ffn_size` is the width of the experts that see every token, taken together. `num_mtp_layers` counts
    multi-token-prediction layers, which are left out: not trained, not pushed, not exported.
    """

    architecture: str
    model_type: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    max_position_embeddings: int
    rope_theta: float
    rope_scaling: RopeScaling | None
    norm_eps: float
    tied: bool
    qkv_bias: bool = False
    qk_norm: Literal["none", "head", "all"] = "none"
    latent: LatentAttention | None = None
    num_experts: int = 0
    topk: int = 0
    moe_ffn_size: int = 0
    shared_ffn_size: int = 0
    norm_topk_prob: bool = True
    moe_layers: tuple[int, ...] = ()
    moe_names: MoeNames = MoeNames()
    num_mtp_layers: int = 0

    @classmethod
    def read(cls, folder: str | Path) -> ModelShape:
        """The shape of the checkpoint in a folder; raises `ShapeError`, or OSError where there is no config.json."""
        try:
            hf = json.loads((Path(folder) / "config.json").read_bytes())
        except ValueError as error:
            raise ShapeError(f"config.json is not JSON ({error})") from None
        if not isinstance(hf, dict):
            raise ShapeError("config.json is not a JSON object")
        return cls.from_hf(hf)

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> ModelShape:
        """The shape that the contents of a config.json describe."""
        architectures = hf.get("architectures")
        architecture = (
            architectures[0] if isinstance(architectures, list) and architectures else None
        )
        if architecture not in ARCHITECTURES:
            raise ShapeError(
                f"architecture {architecture!r} is not known; known are {', '.join(ARCHITECTURES)}"
            )
        model_type, of_family = ARCHITECTURES[architecture]
        keys = _Keys(hf)
        keys.only("model_type", model_type)
        keys.only("hidden_act", "silu")
        keys.refuse(
            "use_sliding_window", "attention_bias", "mlp_bias", "clip_qkv", "quantization_config"
        )
        keys.refuse(
            "attention_dropout", "router_jitter_noise"
        )  # scores of one text would differ from pass to pass
        if any(kind != "full_attention" for kind in hf.get("layer_types") or ()):
            raise ShapeError("layer_types other than 'full_attention' are not supported yet")
        rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
        if any(isinstance(value, Mapping) for value in rope.values()):
            raise ShapeError(
                "rope_parameters that differ between kinds of layers are not supported"
            )
        _Keys(dict(hf) | rope).only("partial_rotary_factor", 1.0)
        num_heads, hidden_size = keys.number("num_attention_heads"), keys.number("hidden_size")
        common = dict(
            architecture=architecture,
            model_type=model_type,
            num_layers=keys.number("num_hidden_layers"),
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=keys.number("num_key_value_heads", default=num_heads),
            head_dim=keys.number("head_dim", default=hidden_size // num_heads),
            ffn_size=keys.number("intermediate_size"),
            vocab_size=keys.number("vocab_size"),
            max_position_embeddings=keys.number("max_position_embeddings"),
            rope_theta=float(
                rope.get("rope_theta")
                or hf.get("rope_theta")
                or _ROPE_THETA.get(model_type, 10000.0)
            ),
            rope_scaling=_rope_scaling(_Keys(rope), keys.number("max_position_embeddings")),
            norm_eps=float(hf.get("rms_norm_eps", 1e-6)),
            tied=bool(hf.get("tie_word_embeddings", False)),
        )
        shape = cls(**(common | of_family(keys)))
        if shape.num_heads % shape.num_kv_heads:
            raise ShapeError(
                f"num_attention_heads {shape.num_heads} is no multiple of num_key_value_heads {shape.num_kv_heads}"
            )
        if shape.moe_layers and shape.topk == 1 and shape.norm_topk_prob:
            raise ShapeError(
                "num_experts_per_tok 1 with renormalised gates: every gate is 1, no router can learn"
            )
        if shape.topk > shape.num_experts:
            raise ShapeError(
                f"num_experts_per_tok {shape.topk} exceeds the {shape.num_experts} experts"
            )
        return shape

    @cached_property
    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every tensor of the model, as Hugging Face checkpoints and vLLM name them.

        A tied output head is no tensor of its own, though some checkpoints store a copy.
        """
        hidden, names = self.hidden_size, self.moe_names
        attention = self._latent_attention(self.latent) if self.latent else self._attention()
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab_size, hidden)
        }

        def add_mlp(
            prefix: str, size: int, gate_up_down: tuple[str, str, str] = MoeNames.gate_up_down
        ) -> None:
            gate, up, down = gate_up_down
            shapes[f"{prefix}.{gate}.weight"] = (size, hidden)
            shapes[f"{prefix}.{up}.weight"] = (size, hidden)
            shapes[f"{prefix}.{down}.weight"] = (hidden, size)

        for i in range(self.num_layers):
            layer = f"model.layers.{i}"
            shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
            shapes |= {f"{layer}.self_attn.{name}": shape for name, shape in attention.items()}
            shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
            if i not in self.moe_layers:
                add_mlp(f"{layer}.mlp", self.ffn_size)
                continue
            shapes[f"{layer}.{names.router}.weight"] = (self.num_experts, hidden)
            if names.router_bias:
                shapes[f"{layer}.{names.router_bias}"] = (self.num_experts,)
            for expert in range(self.num_experts):
                add_mlp(
                    f"{layer}.{names.expert.format(e=expert)}",
                    self.moe_ffn_size,
                    names.gate_up_down,
                )
            if self.shared_ffn_size:
                add_mlp(f"{layer}.{names.shared_expert}", self.shared_ffn_size)
            if names.shared_gate:
                shapes[f"{layer}.{names.shared_gate}.weight"] = (1, hidden)
        shapes["model.norm.weight"] = (hidden,)
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        return shapes

    def _attention(self) -> dict[str, tuple[int, ...]]:
        hidden, queries, keys = (
            self.hidden_size,
            self.num_heads * self.head_dim,
            self.num_kv_heads * self.head_dim,
        )
        widths = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
        shapes: dict[str, tuple[int, ...]] = {
            f"{name}.weight": (width, hidden) for name, width in widths.items()
        }
        if self.qkv_bias:
            shapes |= {f"{name}.bias": (width,) for name, width in widths.items()}
        shapes["o_proj.weight"] = (hidden, queries)
        if self.qk_norm != "none":
            whole = self.qk_norm == "all"
            shapes["q_norm.weight"] = (queries if whole else self.head_dim,)
            shapes["k_norm.weight"] = (keys if whole else self.head_dim,)
        return shapes

    def _latent_attention(self, latent: LatentAttention) -> dict[str, tuple[int, ...]]:
        hidden, heads, query_rank = self.hidden_size, self.num_heads, latent.query_rank
        queries = heads * (latent.nope_size + latent.rope_size)
        shapes: dict[str, tuple[int, ...]] = {"q_proj.weight": (queries, hidden)}
        if query_rank:
            shapes = {
                "q_a_proj.weight": (query_rank, hidden),
                "q_a_layernorm.weight": (query_rank,),
                "q_b_proj.weight": (queries, query_rank),
            }
        return shapes | {
            "kv_a_proj_with_mqa.weight": (latent.kv_rank + latent.rope_size, hidden),
            "kv_a_layernorm.weight": (latent.kv_rank,),
            "kv_b_proj.weight": (heads * (latent.nope_size + latent.value_size), latent.kv_rank),
            "o_proj.weight": (hidden, heads * latent.value_size),
        }

    def faults(self, tensors: Mapping[str, tuple[int, ...]]) -> list[str]:
        """What keeps a checkpoint with these tensors from being this model, a line for each tensor; empty when nothing does."""
        expected = self.tensor_shapes
        missing = [f"missing {name}" for name in expected if name not in tensors]
        unknown = [
            f"unknown {name}"
            for name in tensors
            if name not in expected and not self.leaves_out(name)
        ]
        misshaped = [
            f"{name} has shape {tuple(tensors[name])}, config.json implies {size}"
            for name, size in expected.items()
            if name in tensors and tuple(tensors[name]) != size
        ]
        return missing + unknown + misshaped

    def leaves_out(self, name: str) -> bool:
        """Whether a checkpoint may hold this tensor without its being part of the model as it is trained.

        Such are the copy of a tied head, rotary frequencies that old versions stored, multi-token-prediction layers.
        """
        if name.startswith("model.layers."):
            number = name.split(".")[2]
            in_mtp = number.isdigit() and 0 <= int(number) - self.num_layers < self.num_mtp_layers
            return in_mtp or name.endswith(".rotary_emb.inv_freq")
        return self.tied and name == "lm_head.weight"

    @cached_property
    def num_params(self) -> int:
        """Parameters of the whole model."""
        return sum(prod(shape) for shape in self.tensor_shapes.values())

    @property
    def num_expert_params(self) -> int:
        """Parameters that expert parallelism shards: the experts', without the routers'."""
        return len(self.moe_layers) * self.num_experts * 3 * self.hidden_size * self.moe_ffn_size

    @property
    def kv_values_per_token(self) -> int:
        """Numbers that one token leaves in the KV cache."""
        if self.latent:
            return self.num_layers * (self.latent.kv_rank + self.latent.rope_size)
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


class _Keys:
    """A config.json that says which key is absent, senseless or not supported."""

    def __init__(self, hf: Mapping[str, Any]) -> None:
        self.hf = hf

    def number(self, *names: str, default: int | None = None, least: int = 1) -> int:
        """A whole number under the first of these names that is there; null counts as absent where there is a default."""
        found = [self.hf[name] for name in names if name in self.hf]
        value = found[0] if found else None
        if value is None and default is not None:
            return default
        if type(value) is not int or value < least:
            kind = "a positive integer" if least == 1 else f"an integer of at least {least}"
            raise ShapeError(f"key {' or '.join(names)} must be {kind}, got {value!r}")
        return value

    def real(self, name: str, default: float | None = None) -> float:
        """A number above 0, or the default where the key is absent or null, as 0 is too where there is a default."""
        value = self.hf.get(name)
        if not value and default is not None:
            return default
        if not isinstance(value, int | float) or value is True or value <= 0:
            raise ShapeError(f"key {name} must be a positive number, got {value!r}")
        return float(value)

    def refuse(self, *names: str) -> None:
        """None of these may be set."""
        for name in names:
            if self.hf.get(name):
                raise ShapeError(f"{name} is not supported yet")

    def only(self, name: str, value: object) -> None:
        """A key that, where it is given, must have this value."""
        given = self.hf.get(name)
        if given is not None and given != value:
            raise ShapeError(f"{name} {given!r} is not supported, only {value!r} is")

    def must(self, name: str, value: object) -> None:
        """A key that has to be there, with this value: the engine's default is another one."""
        if self.hf.get(name) != value:
            raise ShapeError(f"{name} must be {value!r} in config.json, got {self.hf.get(name)!r}")


def _rope_scaling(rope: _Keys, context: int) -> RopeScaling | None:
    """What `rope_parameters`, which old files call rope_scaling, say beyond the base frequency."""
    kind = rope.hf.get("rope_type", rope.hf.get("type", "default"))
    if kind == "default":
        return None
    if kind not in ("llama3", "yarn"):
        raise ShapeError(f"rope_type {kind!r} is not supported, only default, llama3 and yarn are")
    factor, original = rope.real("factor"), rope.number("original_max_position_embeddings")
    if kind == "llama3":
        fast, slow = rope.real("high_freq_factor"), rope.real("low_freq_factor")
        if not slow < fast:
            raise ShapeError(f"low_freq_factor {slow} must be below high_freq_factor {fast}")
        return RopeScaling(kind="llama3", factor=factor, original=original, fast=fast, slow=slow)
    if factor * original < context:
        raise ShapeError(
            f"factor {factor} * original_max_position_embeddings {original} is less than max_position_embeddings {context}: "
            "the engine has no rotations for the last positions"
        )
    mscale, mscale_all_dim = (
        rope.real("mscale", default=0.0),
        rope.real("mscale_all_dim", default=0.0),
    )
    both = mscale and mscale_all_dim
    usual = (
        yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)
        if both
        else yarn_mscale(factor, 1.0)
    )
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original=original,
        fast=rope.real("beta_fast", default=32.0),
        slow=rope.real("beta_slow", default=1.0),
        truncate=bool(rope.hf.get("truncate", True)),
        attention_factor=rope.real("attention_factor", default=usual),
        mscale_all_dim=mscale_all_dim,
    )


def yarn_mscale(factor: float, weight: float) -> float:
    """0.1 weight ln(factor) + 1: how much colder attention gets over a longer context (arXiv 2309.00071, eq. 22)."""
    return 0.1 * weight * log(factor) + 1.0 if factor > 1 else 1.0


# What each family adds to the common keys: fields of ModelShape.


def _plain(_keys: _Keys) -> dict[str, Any]:
    return {}


def _qwen2(_keys: _Keys) -> dict[str, Any]:
    return {"qkv_bias": True}


def _qwen3(_keys: _Keys) -> dict[str, Any]:
    return {"qk_norm": "head"}


def _qwen_moe(keys: _Keys) -> dict[str, Any]:
    keys.only("scoring_func", "softmax")
    dense, every = (
        keys.hf.get("mlp_only_layers") or (),
        keys.number("decoder_sparse_step", default=1),
    )
    num_layers = keys.number("num_hidden_layers")
    return dict(
        num_experts=keys.number("num_local_experts", "num_experts"),
        topk=keys.number("num_experts_per_tok"),
        moe_ffn_size=keys.number("moe_intermediate_size"),
        # transformers' own default, and a key that save_pretrained may leave out.
        norm_topk_prob=bool(keys.hf.get("norm_topk_prob", False)),
        moe_layers=tuple(i for i in range(num_layers) if i not in dense and (i + 1) % every == 0),
    )


def _qwen3_moe(keys: _Keys) -> dict[str, Any]:
    return _qwen3(keys) | _qwen_moe(keys)


def _qwen2_moe(keys: _Keys) -> dict[str, Any]:
    return _qwen_moe(keys) | dict(
        qkv_bias=bool(keys.hf.get("qkv_bias", True)),
        shared_ffn_size=keys.number("shared_expert_intermediate_size"),
        moe_names=MoeNames(shared_expert="mlp.shared_expert", shared_gate="mlp.shared_expert_gate"),
    )


def _olmoe(keys: _Keys) -> dict[str, Any]:
    keys.only(
        "norm_topk_prob", False
    )  # these two are constants in vLLM, the second for q and k only
    keys.only("rms_norm_eps", 1e-5)
    keys.only("scoring_func", "softmax")
    return dict(
        qk_norm="all",
        num_experts=keys.number("num_local_experts", "num_experts"),
        topk=keys.number("num_experts_per_tok"),
        moe_ffn_size=keys.number("intermediate_size"),
        norm_topk_prob=False,
        moe_layers=tuple(range(keys.number("num_hidden_layers"))),
    )


def _mixtral(keys: _Keys) -> dict[str, Any]:
    keys.refuse("sliding_window")
    keys.only("scoring_func", "softmax")
    return dict(
        num_experts=keys.number("num_local_experts"),
        topk=keys.number("num_experts_per_tok"),
        moe_ffn_size=keys.number("intermediate_size"),
        moe_layers=tuple(range(keys.number("num_hidden_layers"))),
        moe_names=MoeNames(
            router="block_sparse_moe.gate",
            expert="block_sparse_moe.experts.{e}",
            gate_up_down=("w1", "w3", "w2"),
        ),
    )


def _check_latent_rope(keys: _Keys) -> None:
    """What vLLM's YaRN for latent attention leaves out must not be asked for."""
    rope = _Keys(keys.hf.get("rope_parameters") or keys.hf.get("rope_scaling") or {})
    scaling = _rope_scaling(rope, keys.number("max_position_embeddings"))
    if scaling is None:
        return
    if scaling.kind != "yarn":
        raise ShapeError(
            f"rope_type {scaling.kind!r} is not supported with latent attention, only default and yarn are"
        )
    rope.refuse("attention_factor")
    rope.only("truncate", True)
    if scaling.attention_factor != 1.0:
        raise ShapeError(
            f"mscale {rope.hf.get('mscale')!r} and mscale_all_dim {rope.hf.get('mscale_all_dim')!r} must be given and equal, "
            "as in DeepSeek-V3: rotated and other parts of a head are scaled alike"
        )


def _deepseek_v3(keys: _Keys) -> dict[str, Any]:
    _check_latent_rope(keys)
    # transformers knows no other; vLLM takes softmax and no bias unless config.json says so.
    keys.must("scoring_func", "sigmoid")
    keys.must("topk_method", "noaux_tc")
    keys.only("norm_topk_prob", True)
    keys.only("moe_layer_freq", 1)
    keys.only("rope_interleave", True)
    keys.only("num_key_value_heads", keys.hf.get("num_attention_heads"))
    num_experts, topk = (
        keys.number("num_local_experts", "n_routed_experts"),
        keys.number("num_experts_per_tok"),
    )
    groups, chosen = keys.number("n_group"), keys.number("topk_group")
    if num_experts % groups or chosen > groups:
        raise ShapeError(
            f"{num_experts} experts do not make n_group {groups} groups, topk_group {chosen} of which count"
        )
    if chosen < groups and topk // chosen != 2:
        raise ShapeError(
            f"num_experts_per_tok {topk} // topk_group {chosen} must be 2, as in DeepSeek-V3: Megatron rates a group by "
            "that many of its best experts, transformers and vLLM by the best 2"
        )
    moe_ffn_size, num_layers = (
        keys.number("moe_intermediate_size"),
        keys.number("num_hidden_layers"),
    )
    latent = LatentAttention(
        query_rank=keys.number("q_lora_rank", default=0),
        kv_rank=keys.number("kv_lora_rank"),
        nope_size=keys.number("qk_nope_head_dim"),
        rope_size=keys.number("qk_rope_head_dim"),
        value_size=keys.number("v_head_dim"),
    )
    return dict(
        latent=latent,
        num_kv_heads=keys.number("num_attention_heads"),
        head_dim=latent.nope_size + latent.rope_size,
        num_experts=num_experts,
        topk=topk,
        moe_ffn_size=moe_ffn_size,
        shared_ffn_size=moe_ffn_size * keys.number("n_shared_experts"),
        moe_layers=tuple(range(keys.number("first_k_dense_replace", least=0), num_layers)),
        moe_names=MoeNames(router_bias="mlp.gate.e_score_correction_bias"),
        num_mtp_layers=keys.number(
            "num_mtp_layers", "num_nextn_predict_layers", default=0, least=0
        ),
    )


# Hugging Face architecture -> model_type and what it adds. A new family is a line here and a file in r3/policy/families/.
ARCHITECTURES: dict[str, tuple[str, Callable[[_Keys], dict[str, Any]]]] = {
    "Qwen3MoeForCausalLM": ("qwen3_moe", _qwen3_moe),
    "Qwen3ForCausalLM": ("qwen3", _qwen3),
    "Qwen2MoeForCausalLM": ("qwen2_moe", _qwen2_moe),
    "Qwen2ForCausalLM": ("qwen2", _qwen2),
    "OlmoeForCausalLM": ("olmoe", _olmoe),
    "MixtralForCausalLM": ("mixtral", _mixtral),
    "DeepseekV3ForCausalLM": ("deepseek_v3", _deepseek_v3),
    "LlamaForCausalLM": ("llama", _plain),
}


# Base of the rotary frequencies where config.json names none. Both transformers and vLLM use this default.
_ROPE_THETA = {"mixtral": 1e6}


def checkpoint_tensors(folder: str | Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the tensors in a folder's safetensors files, from their headers alone.

    Raises `ShapeError` for a file that is cut short, a git-lfs pointer for instance, or for a shard that the index
    lists and the folder lacks.
    """
    folder = Path(folder)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ShapeError("there are no *.safetensors files")
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            wanted = set(json.loads(index.read_bytes())["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ShapeError(f"{index.name} has no readable weight_map") from None
        if absent := sorted(wanted - {file.name for file in files}):
            raise ShapeError(
                f"{len(absent)} of {len(wanted)} shards are missing, {absent[0]} first"
            )
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        try:
            with file.open("rb") as stream:
                (size,) = struct.unpack("<Q", stream.read(8))
                if size > file.stat().st_size:
                    raise ValueError
                header = json.loads(stream.read(size))
            header.pop("__metadata__", None)
            end = 8 + size + max((entry["data_offsets"][1] for entry in header.values()), default=0)
            shapes |= {name: tuple(entry["shape"]) for name, entry in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError, struct.error):
            raise ShapeError(
                f"{file.name} is not a safetensors file (an unfinished download, a git-lfs pointer?)"
            ) from None
        if file.stat().st_size != end:
            raise ShapeError(
                f"{file.name} has {file.stat().st_size} bytes, its header says {end}: an unfinished download?"
            )
    return shapes
