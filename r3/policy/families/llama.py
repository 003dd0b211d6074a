"""Llama (arXiv 2302.13971, 2307.09288): the plain dense decoder."""

from __future__ import annotations

from typing import Any

from r3.policy.families.family import ATTENTION, DENSE_MLP, NORMS, TOP, Family


def _megatron(_hf: Any) -> dict[str, Any]:
    return {}


LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    megatron=_megatron,
    layer=NORMS | ATTENTION | DENSE_MLP,
    expert={},
    top=TOP,
)
