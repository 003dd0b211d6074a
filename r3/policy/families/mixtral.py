"""Mixtral (arXiv 2401.04088): names of its own for router and experts, gates always renormalised."""

from __future__ import annotations

from typing import Any

from r3.policy.families.family import ATTENTION, NORMS, TOP, Family, rule, softmax_router


def _megatron(hf: Any) -> dict[str, Any]:
    return softmax_router(
        hf.num_local_experts, hf.num_experts_per_tok, hf.intermediate_size, norm_topk_prob=True
    )


_EXPERT = "block_sparse_moe.experts.{e}"

MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    megatron=_megatron,
    layer=NORMS
    | ATTENTION
    | {"mlp.router.weight": rule("replicated", "block_sparse_moe.gate.weight")},
    expert={
        "linear_fc1.weight": rule("gated", f"{_EXPERT}.w1.weight", f"{_EXPERT}.w3.weight"),
        "linear_fc2.weight": rule("row", f"{_EXPERT}.w2.weight"),
    },
    top=TOP,
)
