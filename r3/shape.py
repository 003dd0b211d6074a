"""What a checkpoint's config.json says about the model: sizes, MoE layers, name and shape of every tensor.

Read with json alone, so that a config is checked and a run planned without importing torch or transformers.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

# Hugging Face architecture -> model_type. A new family is a line here and a file in r3/policy/families/.
ARCHITECTURES = {"Qwen3MoeForCausalLM": "qwen3_moe", "Qwen3ForCausalLM": "qwen3"}


class ShapeError(ValueError):
    """A config.json that does not describe a model we can train; the message names the key."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a model. A dense one has no experts: `num_experts` and `topk` are 0, `moe_layers` is empty."""

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
    norm_eps: float
    tied: bool
    num_experts: int = 0
    topk: int = 0
    moe_ffn_size: int = 0
    norm_topk_prob: bool = True
    moe_layers: tuple[int, ...] = ()

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
        architecture = architectures[0] if isinstance(architectures, list) and architectures else None
        if architecture not in ARCHITECTURES:
            raise ShapeError(
                f"architecture {architecture!r} is not known; known are {', '.join(ARCHITECTURES)}"
            )
        rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        if rope_type != "default":
            raise ShapeError(f"rope_type {rope_type!r} is not supported yet, only 'default' is")
        for key in ("use_sliding_window", "attention_bias", "quantization_config"):
            if hf.get(key):
                raise ShapeError(f"{key} is not supported yet")

        def number(*keys: str) -> int:
            found = [hf[key] for key in keys if key in hf]
            if not found or type(found[0]) is not int or found[0] < 1:
                raise ShapeError(
                    f"key {' or '.join(keys)} must be a positive integer, got {found[0] if found else None!r}"
                )
            return found[0]

        num_layers, hidden_size, num_heads = (
            number("num_hidden_layers"),
            number("hidden_size"),
            number("num_attention_heads"),
        )
        shape = dict(
            architecture=architecture,
            model_type=ARCHITECTURES[architecture],
            num_layers=num_layers,
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=number("num_key_value_heads"),
            head_dim=number("head_dim") if hf.get("head_dim") else hidden_size // num_heads,
            ffn_size=number("intermediate_size"),
            vocab_size=number("vocab_size"),
            max_position_embeddings=number("max_position_embeddings"),
            rope_theta=float(rope.get("rope_theta", hf.get("rope_theta", 10000.0))),
            norm_eps=float(hf.get("rms_norm_eps", 1e-6)),
            tied=bool(hf.get("tie_word_embeddings", False)),
        )
        if architecture == "Qwen3MoeForCausalLM":
            dense = hf.get("mlp_only_layers") or ()
            every = hf.get("decoder_sparse_step", 1)
            shape |= dict(
                num_experts=number("num_local_experts", "num_experts"),
                topk=number("num_experts_per_tok"),
                moe_ffn_size=number("moe_intermediate_size"),
                # transformers' own default, and a key that save_pretrained may leave out.
                norm_topk_prob=bool(hf.get("norm_topk_prob", False)),
                moe_layers=tuple(i for i in range(num_layers) if i not in dense and (i + 1) % every == 0),
            )
        return cls(**shape)

    @cached_property
    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every tensor of the model, as Hugging Face checkpoints and vLLM name them.

        A tied output head is no tensor of its own, though some checkpoints store a copy.
        """
        hidden, queries, keys = (
            self.hidden_size,
            self.num_heads * self.head_dim,
            self.num_kv_heads * self.head_dim,
        )
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, hidden)}

        def add_mlp(prefix: str, size: int) -> None:
            shapes[f"{prefix}.gate_proj.weight"] = (size, hidden)
            shapes[f"{prefix}.up_proj.weight"] = (size, hidden)
            shapes[f"{prefix}.down_proj.weight"] = (hidden, size)

        for i in range(self.num_layers):
            layer = f"model.layers.{i}"
            shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
            shapes[f"{layer}.self_attn.q_proj.weight"] = (queries, hidden)
            shapes[f"{layer}.self_attn.k_proj.weight"] = (keys, hidden)
            shapes[f"{layer}.self_attn.v_proj.weight"] = (keys, hidden)
            shapes[f"{layer}.self_attn.o_proj.weight"] = (hidden, queries)
            shapes[f"{layer}.self_attn.q_norm.weight"] = (self.head_dim,)
            shapes[f"{layer}.self_attn.k_norm.weight"] = (self.head_dim,)
            shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
            if i in self.moe_layers:
                shapes[f"{layer}.mlp.gate.weight"] = (self.num_experts, hidden)
                for expert in range(self.num_experts):
                    add_mlp(f"{layer}.mlp.experts.{expert}", self.moe_ffn_size)
            else:
                add_mlp(f"{layer}.mlp", self.ffn_size)
        shapes["model.norm.weight"] = (hidden,)
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        return shapes

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
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


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
            raise ShapeError(f"{len(absent)} of {len(wanted)} shards are missing, {absent[0]} first")
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
