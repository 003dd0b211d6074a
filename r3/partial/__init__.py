"""Steps of several rounds: partial rollouts, and dynamic sampling."""

from r3 import names_of

__getattr__ = names_of(
    __name__,
    source="PartialRollouts assign_engines from_state_dict num_stale_tokens resumable state_dict",
)
