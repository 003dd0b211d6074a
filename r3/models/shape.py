"""The shape of a model from config.json: sizes, MoE layers, name and shape of every tensor.

Reads JSON only, so that settings are checked and a run is planned without torch or transformers.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from r3 import extras
from r3.models.families import FAMILIES, REFUSED, text_model
from r3.models.hf_config import (
    HfConfig,
    ShapeError,
    require_agreement,
    require_kinds,
    require_tokens,
)
from r3.models.hub import folder_of
from r3.models.sizes import ModelSizes, MoeNames
from r3.models.tensors import conversion_rules

BYTES_OF = {"float32": 4, "bfloat16": 2}
"""Bytes per value of the data types that weights and arithmetic may have."""


# Keys that change what transformers or vLLM compute. Dropouts and router_jitter_noise do not: they
# act in pre-training.
_REFUSED = (
    *("use_sliding_window", "dual_chunk_attention_config", "attention_chunk_size", "rswa_window"),
    *("mlp_bias", "clip_qkv", "layer_scale", "llama_4_scaling"),
)
_VISION = ("model.visual.", "vision_tower.", "mm_projector.")


@dataclass(frozen=True, kw_only=True)
class ModelShape(ModelSizes):
    """Sizes and architecture of a model, its tensors, and what both need in memory."""

    @classmethod
    def read(cls, folder: str | Path) -> ModelShape:
        """Read the shape of the checkpoint in a folder.

        Raises:
            ShapeError: config.json does not describe a model that R3 can train.
            OSError: the folder has no config.json.
        """
        try:
            values = json.loads((Path(folder_of(folder)) / "config.json").read_bytes())
        except (ValueError, RecursionError) as error:
            raise ShapeError(f"config.json is not JSON ({error})") from None
        if not isinstance(values, dict):
            raise ShapeError("config.json is not a JSON object")
        return replace(cls.from_hf(values), source=str(folder))

    @classmethod
    def from_hf(cls, values: Mapping[str, Any]) -> ModelShape:
        """Return the shape that the contents of a config.json describe.

        Raises:
            ShapeError: a key is missing, invalid or not supported.
        """
        is_wrapped = values is not (values := text_model(values))
        require_kinds(values)
        require_agreement(values)
        architectures = values.get("architectures")
        architecture = (
            architectures[0] if isinstance(architectures, list) and architectures else None
        )
        if architecture not in FAMILIES:
            why = REFUSED.get(architecture or "")
            what = f"is not supported: {why}" if why else "is not known"
            raise ShapeError(
                f"architecture {architecture!r} {what}; known are {', '.join(FAMILIES)}"
            )
        hf = HfConfig(values)
        try:
            shape = cls._of_family(architecture, hf)
        except ShapeError as error:  # keys that do not go together, or follow from another fault
            hf.faults[:] = hf.faults or [str(error)]
        if hf.faults:
            raise ShapeError("; ".join(hf.faults))
        return replace(shape, is_wrapped=is_wrapped)

    @classmethod
    def _of_family(cls, architecture: str, hf: HfConfig) -> ModelShape:
        """Read the keys; what a key has wrong is added to `hf.faults`."""
        family, values = FAMILIES[architecture], hf.values
        if values.get("model_type") not in family.aliases:
            hf.only("model_type", family.model_type)
        for name, value in family.implied.items():
            hf.only(name, value)
        hf.only("hidden_act", "silu")
        hf.refuse(*_REFUSED)
        hf.refuse(*{"attention_bias"} - family.reads)
        hf.only("is_causal", True)
        kinds = () if "layer_types" in family.reads else values.get("layer_types") or ()
        if any(kind != "full_attention" for kind in kinds):
            hf.faults.append("layer_types other than 'full_attention' are not supported yet")
        partial = HfConfig({**values, **hf.rope.values}, hf.faults)
        if "partial_rotary_factor" not in family.reads:
            partial.only("partial_rotary_factor", 1.0)
        num_heads, hidden_size = hf.number("num_attention_heads"), hf.number("hidden_size")
        head_dim = hf.number("head_dim", default=hidden_size // num_heads)
        rotated = partial.real("partial_rotary_factor", default=family.partial_rotary_factor)
        common: dict[str, Any] = dict(
            architecture=architecture,
            model_type=family.model_type,
            num_layers=hf.number("num_hidden_layers"),
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=hf.number("num_key_value_heads", default=num_heads),
            head_dim=head_dim,
            rotary_size=int(head_dim * rotated),
            ffn_size=hf.number(family.ffn_key),
            vocab_size=hf.number("vocab_size"),
            max_position_embeddings=hf.number("max_position_embeddings"),
            rope_theta=hf.rope.real(
                "rope_theta", default=hf.real("rope_theta", default=family.rope_theta)
            ),
            rope_scaling=hf.rope_scaling(),
            norm_eps=hf.real("rms_norm_eps", default=family.norm_eps),
            tied=bool(values.get("tie_word_embeddings", False)),
        )
        fields = family.fields(hf)
        hf.refuse(*{"index_topk"} - fields.keys())
        alternate = fields.get("moe_names", MoeNames()).alternates
        if values.get("quantization_config"):
            common["quantised"] = extras.quantised().quantised_by(hf, stacks_alternate=alternate)
        shape = cls(**(common | fields))
        require_tokens(values, shape.vocab_size)
        if shape.rotary_size % 2 or not 0 < shape.rotary_size <= shape.head_dim:
            raise ShapeError(
                f"partial_rotary_factor {rotated} of head_dim {shape.head_dim} rotates "
                f"{shape.rotary_size} dimensions: it must be an even number of them, at most all"
            )
        if shape.num_heads % shape.num_kv_heads:
            raise ShapeError(
                f"num_attention_heads {shape.num_heads} is no multiple of "
                f"num_key_value_heads {shape.num_kv_heads}"
            )
        if shape.moe_layers and shape.topk == 1 and shape.norm_topk_prob:
            raise ShapeError(
                "num_experts_per_tok 1 with renormalised gates: "
                "every gate is 1, no router can learn"
            )
        if shape.topk > shape.num_experts:
            raise ShapeError(
                f"num_experts_per_tok {shape.topk} exceeds the {shape.num_experts} experts"
            )
        return shape

    @cached_property
    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every tensor, with names of Hugging Face checkpoints that vLLM loads.

        Some checkpoints join several of them in one tensor: `stored`.

        A tied output head is not a tensor of its own, although some checkpoints store a copy.
        """
        rules = conversion_rules(self)
        shapes = dict(rules.top["embedding.word_embeddings.weight"].hf)
        for number, layer in enumerate(rules.layers):
            prefix = f"model.layers.{number}."
            for rule in layer.values():
                shapes |= {prefix + name: size for name, size in rule.hf.items()}
            for e in range(self.num_experts if number in self.moe_layers else 0):
                for rule in rules.expert.values():
                    shapes |= {prefix + name.format(e=e): size for name, size in rule.hf.items()}
        shapes |= rules.top["decoder.final_layernorm.weight"].hf
        return shapes | dict(rules.top["output_layer.weight"].hf)

    @cached_property
    def stored(self) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
        """Name in the checkpoint -> shape there, and the tensors that it joins, one after another.

        Only those whose names differ from `tensor_shapes`. Experts are joined expert by expert;
        with `moe_names.alternates` as [experts, inputs, outputs], where the outputs of the joined
        tensors alternate.
        """
        joins = {}
        for layer in self.moe_layers:
            prefix = f"model.layers.{layer}."
            for name, parts in self.moe_names.stacked:
                experts = range(self.num_experts) if "{e}" in parts[0] else (0,)
                names = tuple(prefix + part.format(e=e) for e in experts for part in parts)
                rows, *width = self.tensor_shapes[names[0]]
                size = (len(parts) * rows, *width)
                if self.moe_names.alternates:
                    size = (*width, len(parts) * rows)
                is_row = parts == (self.moe_names.router_bias,)
                lead = (len(experts),) if len(experts) > 1 or is_row else ()
                joins[prefix + name] = (*lead, *size), names
        for name, joined in self.renamed:
            for layer in range(self.num_layers) if "{n}" in name else (0,):
                names = tuple(part.format(n=layer) for part in joined)
                sizes = [self.tensor_shapes[part] for part in names]
                rows = sum(size[0] for size in sizes)
                joins[name.format(n=layer)] = (rows, *sizes[0][1:]), names
        return joins

    @cached_property
    def stored_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every tensor in the checkpoint's files: some are joined (`stored`)."""
        whole = {part: name for name, (_, parts) in self.stored.items() for part in parts}
        return {
            whole.get(name, name): self.stored[whole[name]][0] if name in whole else shape
            for name, shape in self.tensor_shapes.items()
        }

    def faults(self, tensors: Mapping[str, tuple[int, ...] | None]) -> list[str]:
        """Compare a checkpoint's tensors (name -> shape, None = not known) with the model's.

        Returns:
            One line per missing, unknown or misshaped tensor; empty if the checkpoint matches.
        """
        expected = self.as_stored(tensors).stored_shapes
        if self.quantised:
            expected = extras.quantised().stored_shapes(self.quantised, expected, tensors)
        missing = [f"missing {name}" for name in expected if name not in tensors]
        unknown = [
            f"unknown {name}"
            for name in tensors
            if name not in expected and not (self.is_ignored(name) or self.is_kept(name))
        ]
        misshaped = [
            f"{name} has shape {tuple(shape)}, config.json implies {size}"
            for name, size in expected.items()
            if (shape := tensors.get(name)) is not None and tuple(shape) != size
        ]
        return missing + unknown + misshaped

    def as_stored(self, names: Collection[str]) -> ModelShape:
        """Return the shape with the stacked tensors of a checkpoint that has these names."""
        stacked = self.moe_names.may_be_stacked
        if not any(f"model.layers.{self.moe_layers[0]}.{name}" in names for name, _ in stacked):
            return self
        return replace(self, moe_names=replace(self.moe_names, stacked=stacked))

    @property
    def context(self) -> str:
        """The longest conversation, as messages name it."""
        why = " (index_topk: R3 has no sparse attention)" if self.index_topk else ""
        return f"{self.max_position_embeddings} tokens{why}"

    def is_kept(self, name: str) -> bool:
        """Whether R3 does not read this tensor, and exports it as it is: those of indexers."""
        part = name.removeprefix("model.layers.").partition(".")
        return bool(self.index_topk) and part[2].startswith("self_attn.indexer.")

    def is_ignored(self, name: str) -> bool:
        """Whether R3 ignores a tensor of this name when a checkpoint has one.

        These are the copy of a tied head, stored rotary frequencies, multi-token-prediction layers
        and the vision model.
        """
        # Also if config.json does not count prediction layers, as that of Qwen3-Next.
        if name.startswith("mtp.") or (self.is_wrapped and name.startswith(_VISION)):
            return True
        if self.num_mtp_layers and name.startswith("model.mtp_"):
            return True
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
        """Parameters that expert parallelism shards: those of the experts, not of the routers."""
        biases = 2 * self.moe_ffn_size + self.hidden_size if self.has_biases else 0
        of_expert = 3 * self.hidden_size * self.moe_ffn_size + biases
        return len(self.moe_layers) * self.num_experts * of_expert

    def kv_values(self, tokens: int) -> int:
        """Numbers in the KV cache for a conversation of so many tokens, over all layers.

        Layers with a window keep the tokens that it shows: vLLM frees the blocks before them. While
        a prompt is computed they hold all of it.
        """
        layers = self.num_layers - len(self.delta_layers)
        kept = (layers - len(self.window_layers)) * tokens
        kept += len(self.window_layers) * min(tokens, self.window)
        if self.latent:
            return kept * (self.latent.kv_rank + self.latent.rope_size)
        return 2 * kept * self.num_kv_heads * self.head_dim
