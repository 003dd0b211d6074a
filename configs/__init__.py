"""Presets: a name and the function that returns its Config; its docstring is its help.

To add one, write the function in the file of its model family and add its line here. This folder
is also the package r3.configs: r3/configs is a link to it, so that wheels contain the presets.
"""

from collections.abc import Callable, Mapping
from typing import Any

from r3.config import Config
from r3.configs import glm, gpt_oss, kimi, qwen3, qwen3_5, qwen3_moe, tiny

PRESETS: Mapping[str, Callable[[], Config]] = {
    "tiny": tiny.tiny,
    "tiny-smoke": tiny.tiny_smoke,
    "tiny-tools": tiny.tiny_tools,
    "qwen3-moe-30b-a3b": qwen3_moe.qwen3_moe_30b_a3b,
    "qwen3-moe-30b-80gb": qwen3_moe.qwen3_moe_30b_80gb,
    "qwen3-30b-a3b-lora": qwen3_moe.qwen3_30b_a3b_lora,
    "qwen3.5-35b-a3b": qwen3_5.qwen3_5_35b_a3b,
    "qwen3.5-35b-a3b-lora": qwen3_5.qwen3_5_35b_a3b_lora,
    "gpt-oss-20b": gpt_oss.gpt_oss_20b,
    "glm-4.7-flash": glm.glm_4_7_flash,
    "glm-4.5-air": glm.glm_4_5_air,
    "kimi-k2": kimi.kimi_k2,
    "qwen3-0.6b": qwen3.qwen3_0_6b,
}

KNOWN_SHAPES: Mapping[str, Mapping[str, Any]] = {
    **qwen3_moe.SHAPES,
    **qwen3_5.SHAPES,
    **gpt_oss.SHAPES,
    **glm.SHAPES,
    **kimi.SHAPES,
    **qwen3.SHAPES,
}
"""config.json of models on the hub, so that `--dry-run` works before they are downloaded."""
