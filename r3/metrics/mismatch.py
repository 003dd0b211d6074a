"""The mismatch between policy and engine on the tokens that the engine sampled.

    Delta_t = log pi_old(x_t) - log mu(x_t)

pi_old is the policy at the rollout's weights, mu the distribution from which the engine sampled the
token. Delta is measured before any update, so only the two programs make a difference.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from r3.metrics.reduce import EffectiveSampleSize, LogHistogram, Max, Mean, Partial, Quantile

SHADOW = ("k3", "f2", "abs_p99", "abs_max")
"""Metrics that the paired passes with replayed and with live routes compare."""

# exp of a larger difference would overflow when squared, and ess would be nan.
_MAX_LOG_WEIGHT = 300.0


def mismatch(
    policy_logprobs_N: Tensor, rollout_logprobs_N: Tensor, loss_mask_N: Tensor
) -> dict[str, Partial]:
    """Partials of the mismatch metrics over the n loss tokens of a micro-batch.

        k3        mean( e^Delta - Delta - 1 )   estimates KL(mu || pi_old) (arXiv 2510.11370)
        f2        mean( |Delta| > ln 2 )        share of tokens whose probabilities differ by > 2x
        abs_mean  mean |Delta|
        k1        mean( -Delta )                noisier estimate of the KL; its sign shows a bias
        weight    mean( e^Delta )               1 in expectation
        abs_p50, abs_p90, abs_p99, abs_p999     quantiles of |Delta|
        abs_max   max |Delta|
        abs_log10 histogram of log10 |Delta|
        ess       (sum w)^2 / (n sum w^2)       for the importance weights w = e^Delta

    Routing differences show in the tail first: f2, p99 and max grow tenfold where k3 doubles.

    Args:
        policy_logprobs_N: log pi_old of the target tokens.
        rollout_logprobs_N: log mu of the target tokens.
        loss_mask_N: 1 at loss tokens.

    Raises:
        ValueError: the shapes differ.
        FloatingPointError: a log-probability at a loss token is not finite.
    """
    shapes = [list(tensor.shape) for tensor in (policy_logprobs_N, rollout_logprobs_N, loss_mask_N)]
    if any(shape != shapes[0] or len(shape) != 1 for shape in shapes):
        raise ValueError(
            f"policy and rollout log-probabilities and the loss mask must all be [N], got {shapes}"
        )
    delta_N = policy_logprobs_N.detach().float() - rollout_logprobs_N.float()
    # One transfer from the device; all sums are float64.
    delta, mask = torch.stack([delta_N, loss_mask_N.float()]).cpu().numpy()
    delta = delta[mask > 0].astype(np.float64)
    if broken := int((~np.isfinite(delta)).sum()):
        raise FloatingPointError(
            f"log-probabilities are not finite at {broken} of {len(delta)} loss tokens"
        )
    count = len(delta)
    size = np.abs(delta)
    limited = np.minimum(delta, _MAX_LOG_WEIGHT)
    weights = np.exp(limited)
    sizes = size.astype(np.float32)  # one array object: pickle sends it once
    return {
        "k1": Mean(total=float(-delta.sum()), count=count),
        "k3": Mean(total=float((np.expm1(limited) - delta).sum()), count=count),
        "f2": Mean(total=float((size > math.log(2.0)).sum()), count=count),
        "abs_mean": Mean(total=float(size.sum()), count=count),
        "weight": Mean(total=float(weights.sum()), count=count),
        "abs_p50": Quantile(values=sizes, q=0.5),
        "abs_p90": Quantile(values=sizes, q=0.9),
        "abs_p99": Quantile(values=sizes, q=0.99),
        "abs_p999": Quantile(values=sizes, q=0.999),
        "abs_max": Max(value=float(size.max()) if count else None),
        "abs_log10": LogHistogram(sizes),
        "ess": EffectiveSampleSize(
            sum_w=float(weights.sum()), sum_w2=float((weights**2).sum()), count=count
        ),
    }


def shadow(
    policy_logprobs_N: Tensor, rollout_logprobs_N: Tensor, loss_mask_N: Tensor
) -> dict[str, Partial]:
    """The metrics of `SHADOW`, as `mismatch` computes them."""
    panel = mismatch(policy_logprobs_N, rollout_logprobs_N, loss_mask_N)
    return {key: panel[key] for key in SHADOW}
