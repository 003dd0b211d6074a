"""How far the policy is from the engine on the tokens that the engine sampled."""

from __future__ import annotations

from torch import Tensor

from r3.metrics.reduce import Partial, to_partials


def mismatch(
    policy_logprobs_N: Tensor, rollout_logprobs_N: Tensor, loss_mask_N: Tensor
) -> dict[str, Partial]:
    """The gap between policy and engine at the loss tokens of one micro-batch; formulas in `to_partials`."""
    shapes = [list(tensor.shape) for tensor in (policy_logprobs_N, rollout_logprobs_N, loss_mask_N)]
    if any(shape != shapes[0] or len(shape) != 1 for shape in shapes):
        raise ValueError(
            f"policy and rollout log-probabilities and the loss mask must all be [N], got {shapes}"
        )
    return to_partials(policy_logprobs_N.float() - rollout_logprobs_N.float(), loss_mask_N)


def shadow(
    policy_logprobs_N: Tensor, rollout_logprobs_N: Tensor, loss_mask_N: Tensor
) -> dict[str, Partial]:
    """`k3` and the tail of the panel: what the paired passes with replayed and with live routes are compared by."""
    panel = mismatch(policy_logprobs_N, rollout_logprobs_N, loss_mask_N)
    return {key: panel[key] for key in SHADOW}


SHADOW = ("k3", "f2", "abs_p99", "abs_max")
