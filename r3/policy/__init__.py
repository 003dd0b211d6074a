"""The policy: one Megatron-Core shard of the trained model on every rank, and its optimizer."""

import warnings

# Megatron warns in many modules that TransformerEngine and apex are absent, and of its own
# deprecations. They are absent on purpose; r3.runtime.mesh handles what matters.
warnings.filterwarnings("ignore", module=r"megatron\.")
warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")

from r3.policy.memory import chained  # noqa: E402
from r3.policy.objective import NONE_MADE, Passes, policy_loss  # noqa: E402
from r3.policy.policy import Policy, learning_rate  # noqa: E402
from r3.policy.scoring import TokenScores  # noqa: E402
from r3.policy.updates import earlier_passes, kl_of_rollouts, train_on  # noqa: E402
