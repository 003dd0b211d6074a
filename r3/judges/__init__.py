"""Judges: chat models over HTTP, the policy itself, a reward model, a verifier of mathematics."""

from r3 import names_of

__getattr__ = names_of(
    __name__,
    chat="parsed",
    reward_model="Batches RewardModel",
    self_judge="SelfJudge",
)
