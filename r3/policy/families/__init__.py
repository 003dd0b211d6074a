"""Model families: one table each for load, weight sync and export. Add a file and a line here for a new one."""

from r3.policy.families.deepseek import DEEPSEEK_V3
from r3.policy.families.family import Family, Rule
from r3.policy.families.llama import LLAMA
from r3.policy.families.mixtral import MIXTRAL
from r3.policy.families.olmoe import OLMOE
from r3.policy.families.qwen2 import QWEN2, QWEN2_MOE
from r3.policy.families.qwen3 import QWEN3, QWEN3_MOE

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (QWEN3, QWEN3_MOE, QWEN2, QWEN2_MOE, OLMOE, MIXTRAL, DEEPSEEK_V3, LLAMA)
}

__all__ = ["FAMILIES", "Family", "Rule"]
