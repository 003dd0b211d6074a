"""The training world: one Megatron-Core shard of the policy in every rank, and its optimizer."""

import warnings

# Megatron warns, module by module, that TransformerEngine and apex are absent, and of its own deprecations. They are absent
# on purpose; what matters of them is handled in device_cpu.
warnings.filterwarnings("ignore", module=r"megatron\.")
warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")

from r3.policy.policy import Policy, TokenScores  # noqa: E402

__all__ = ["Policy", "TokenScores"]
