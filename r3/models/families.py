"""The model families: a line for each architecture.

To add a family, write one function in r3/models/softmax_families.py or sigmoid_families.py, and one
line in `FAMILIES`. Everything else follows from the shape: tensor names and sizes
(r3/models/tensors.py), which load, sync and export weights, and Megatron's settings
(r3/policy/build.py). A family with a part that no other one has (a new router, a new
attention) needs a field of `ModelSizes` too, and that part in r3/layers/.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from r3.models import sigmoid_families as sigmoid
from r3.models import softmax_families as softmax
from r3.models.hf_config import HfConfig, ShapeError


@dataclass(frozen=True, kw_only=True)
class Family:
    """One architecture.

    Attributes:
        model_type: as in config.json.
        aliases: other values of model_type for the same keys.
        fields: reads the fields of `ModelShape` that are not common to all families.
        norm_eps, rope_theta, partial_rotary_factor: values where config.json has none. transformers
            and vLLM have the same defaults.
        implied: keys that have one value in this family. transformers' class has no other, so
            `save_pretrained` leaves them out; vLLM must be told.
        wrapper: architecture of published checkpoints that have it as `text_config`.
        engine: architecture that vLLM has in its place. `GLM4_MOE` only.
        reads: keys that `fields` reads and that are refused in other families.
        ffn_key: has the width of dense layers.
        models: models of this family that people train.
        proved: keys of `PROOFS`. A test compares them with what the tests cover.
    """

    model_type: str
    models: str
    fields: Callable[[HfConfig], dict[str, Any]]
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    partial_rotary_factor: float = 1.0
    reads: frozenset[str] = frozenset()
    aliases: tuple[str, ...] = ()
    ffn_key: str = "intermediate_size"
    implied: Mapping[str, Any] = field(default_factory=dict)
    wrapper: str = ""
    engine: str = ""
    proved: tuple[str, ...] = ("policy", "engine")


GLM4_MOE = "Glm4MoeForCausalLM"

PROOFS = {
    "policy": "logits, gradients and export equal those of transformers, under tp, pp, ep and cp",
    "engine": "weights reach vLLM bit for bit; captured routes are those of transformers' routers",
    "runs": "the accuracy of complete runs rises",
}
"""What is tested for a family, on small random checkpoints and on the embedded model."""


FAMILIES: dict[str, Family] = {
    "Qwen3MoeForCausalLM": Family(
        model_type="qwen3_moe",
        fields=softmax.qwen3_moe,
        models="Qwen3-30B-A3B, Qwen3-235B-A22B",
        proved=("policy", "engine", "runs"),
    ),
    "Qwen3ForCausalLM": Family(model_type="qwen3", fields=softmax.qwen3, models="Qwen3, dense"),
    "Qwen2MoeForCausalLM": Family(
        model_type="qwen2_moe", fields=softmax.qwen2_moe, models="Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B"
    ),
    "Qwen2ForCausalLM": Family(
        model_type="qwen2", fields=softmax.qwen2, models="Qwen2 and Qwen2.5, dense"
    ),
    "Qwen3NextForCausalLM": Family(
        model_type="qwen3_next",
        fields=softmax.qwen3_next,
        models="Qwen3-Next-80B-A3B",
        partial_rotary_factor=0.25,
        reads=frozenset({"layer_types", "partial_rotary_factor"}),
    ),
    "Qwen3_5MoeForCausalLM": Family(
        model_type="qwen3_5_moe_text",
        fields=softmax.qwen3_5_moe,
        models="text models of Qwen3.5-35B-A3B and 3.6",
        wrapper="Qwen3_5MoeForConditionalGeneration",
        ffn_key="moe_intermediate_size",  # it has no dense layer
        partial_rotary_factor=0.25,
        reads=frozenset({"layer_types", "partial_rotary_factor"}),
    ),
    "Qwen3_5ForCausalLM": Family(
        model_type="qwen3_5_text",
        fields=softmax.qwen3_5,
        models="text models of Qwen3.5-4B, 9B and 27B, Qwen3.6-27B, dense",
        wrapper="Qwen3_5ForConditionalGeneration",
        partial_rotary_factor=0.25,
        reads=frozenset({"layer_types", "partial_rotary_factor"}),
    ),
    "OlmoeForCausalLM": Family(
        model_type="olmoe", fields=softmax.olmoe, models="OLMoE-1B-7B", norm_eps=1e-5
    ),
    "MixtralForCausalLM": Family(
        model_type="mixtral",
        fields=softmax.mixtral,
        models="Mixtral",
        norm_eps=1e-5,
        rope_theta=1e6,
    ),
    "DeepseekV3ForCausalLM": Family(
        model_type="deepseek_v3",
        fields=sigmoid.deepseek_v3,
        models="Moonlight-16B-A3B, DeepSeek-V3, Kimi-K2, text model of Kimi-K2.5",
        aliases=("kimi_k2",),
        wrapper="KimiK25ForConditionalGeneration",
        # vLLM takes softmax without biases where they are absent.
        implied={"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    ),
    "DeepseekV32ForCausalLM": Family(
        model_type="deepseek_v32",
        fields=sigmoid.sparse_mla,
        models="DeepSeek-V3.2, conversations of at most 2,048 tokens",
        reads=frozenset({"layer_types"}),
        implied={"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    ),
    "GlmMoeDsaForCausalLM": Family(
        model_type="glm_moe_dsa",
        fields=sigmoid.sparse_mla,
        models="GLM-5, 5.1 and 5.2, conversations of at most 2,048 tokens",
        norm_eps=1e-5,
        reads=frozenset({"layer_types"}),
        implied={"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    ),
    "Glm4MoeForCausalLM": Family(
        model_type="glm4_moe",
        fields=sigmoid.glm4_moe,
        models="GLM-4.5-Air, GLM-4.5, GLM-4.6, GLM-4.7",
        norm_eps=1e-5,
        partial_rotary_factor=0.5,
        reads=frozenset({"attention_bias", "partial_rotary_factor"}),
    ),
    "SolarOpenForCausalLM": Family(
        model_type="solar_open",
        fields=sigmoid.solar_open,
        models="Solar-Open-100B",
        norm_eps=1e-5,
        rope_theta=1e6,
        ffn_key="moe_intermediate_size",  # it has no dense layer
        engine=GLM4_MOE,
    ),
    "Dots1ForCausalLM": Family(
        model_type="dots1", fields=sigmoid.dots1, models="dots.llm1", engine=GLM4_MOE
    ),
    "Glm4MoeLiteForCausalLM": Family(
        model_type="glm4_moe_lite",
        fields=sigmoid.glm4_moe_lite,
        models="GLM-4.7-Flash",
        norm_eps=1e-5,
    ),
    "BailingMoeV2ForCausalLM": Family(
        model_type="bailing_moe",
        aliases=("bailing_moe_v2",),
        fields=sigmoid.bailing_moe_v2,
        models="Ling-mini-2.0, Ring-mini-2.0, Ling-flash-2.0, Ring-flash-2.0",
        rope_theta=600000.0,
        reads=frozenset({"partial_rotary_factor"}),
        implied={
            "score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "use_qk_norm": True,
            "use_rmsnorm": True,
        },
    ),
    "GraniteMoeForCausalLM": Family(
        model_type="granitemoe",
        fields=softmax.granitemoe,
        models="Granite 3.0 and 3.1, 1B-A400M and 3B-A800M",
    ),
    "GptOssForCausalLM": Family(
        model_type="gpt_oss",
        fields=softmax.gpt_oss,
        models="gpt-oss-20b and 120b",
        norm_eps=1e-5,
        rope_theta=150000.0,
        reads=frozenset({"attention_bias", "layer_types"}),
    ),
    "MiniMaxM2ForCausalLM": Family(
        model_type="minimax_m2",
        fields=sigmoid.minimax_m2,
        models="MiniMax-M2",
        rope_theta=5e6,
        reads=frozenset({"partial_rotary_factor"}),
        implied={"scoring_func": "sigmoid", "use_routing_bias": True},
    ),
    "Ernie4_5_MoeForCausalLM": Family(
        model_type="ernie4_5_moe",
        fields=softmax.ernie4_5_moe,
        models="ERNIE-4.5-21B-A3B, ERNIE-4.5-300B-A47B",
        norm_eps=1e-5,
        rope_theta=500000.0,
    ),
    "LlamaForCausalLM": Family(
        model_type="llama", fields=softmax.llama, models="Llama 2 and 3, and models of their layout"
    ),
}
"""Architecture, as in config.json -> its family."""


REFUSED = {
    "NemotronHForCausalLM": (
        "R3 has no Mamba-2 layers, no experts without a gate, no layers of attention or MLP alone"
    ),
}
"""Architectures that people train and R3 does not build: what is missing."""


def text_model(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config.json of the text model in that of a model that has others beside it.

    Raises:
        ShapeError: there is none.
    """
    architectures = values.get("architectures")
    for name, family in FAMILIES.items():
        if family.wrapper and architectures == [family.wrapper]:
            text = values.get("text_config")
            if not isinstance(text, Mapping):
                raise ShapeError(f"key text_config must be the text model's keys, got {text!r}")
            whole = {key: values[key] for key in _OF_THE_WHOLE if key in values}
            return {**whole, **text, "architectures": [name]}
    return values


# Keys that such a config.json has outside of the section.
_OF_THE_WHOLE = ("quantization_config", "tie_word_embeddings", "transformers_version")


def implied_keys(architecture: str) -> Mapping[str, Any]:
    """Keys that config.json may lack, with the value that they have then."""
    return FAMILIES[architecture].implied if architecture in FAMILIES else {}
