"""Partial rollouts: conversations that continue in a later step (`rollout.step_token_budget`)."""

from r3 import names_of

__getattr__ = names_of(
    __name__,
    source="PartialRollouts assign_engines from_state_dict resumable state_dict",
)
