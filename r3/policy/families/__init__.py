"""Model families: one table each for load, weight sync and export. Add a file and a line here for a new one."""

from r3.policy.families.family import Family, Rule
from r3.policy.families.qwen3 import QWEN3, QWEN3_MOE

FAMILIES: dict[str, Family] = {family.model_type: family for family in (QWEN3, QWEN3_MOE)}

__all__ = ["FAMILIES", "Family", "Rule"]
