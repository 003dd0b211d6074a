"""OLMoE (arXiv 2409.02060): queries and keys normalised over all heads together, gates not renormalised."""

from __future__ import annotations

from typing import Any

from r3.policy.families.family import (
    ATTENTION,
    EXPERT,
    NORMS,
    QK_NORM,
    ROUTER,
    TOP,
    Family,
    softmax_router,
)
from r3.policy.modules import KeyHeadsNorm, QueryHeadsNorm


def _megatron(hf: Any) -> dict[str, Any]:
    return {
        "qk_layernorm": True,
        **softmax_router(
            hf.num_experts,
            hf.num_experts_per_tok,
            hf.intermediate_size,
            norm_topk_prob=hf.norm_topk_prob,
        ),
    }


OLMOE = Family(
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    megatron=_megatron,
    layer=NORMS | ATTENTION | QK_NORM | ROUTER,
    expert=EXPERT,
    top=TOP,
    attention={"q_layernorm": QueryHeadsNorm, "k_layernorm": KeyHeadsNorm},
)
