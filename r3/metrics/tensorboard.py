"""Which charts TensorBoard shows first."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any


def tensorboard_layout(eval_names: Sequence[str]) -> dict[str, dict[str, list[Any]]]:
    """TensorBoard's custom scalars: the page to watch, then what replay is worth in this very run."""
    pages = {
        "1 health": {
            "reward and evaluation": [
                "reward/mean",
                *(f"eval/{name}/accuracy" for name in eval_names),
            ],
            "mismatch k3": ["mismatch/k3"],
            "mismatch tail": ["mismatch/f2", "mismatch/abs_p99", "mismatch/abs_max"],
            "routes": ["routing/agreement", "routing/coverage"],
            "importance-weight ESS": ["mismatch/ess"],
            "gradient norms": ["optim/grad_norm", "optim/router_grad_norm"],
            "entropy": ["policy/entropy"],
            "response length": ["rollout/response_tokens_mean"],
        },
        "2 replay against live routes": {
            "k3": ["mismatch/k3_replay", "mismatch/k3_live"],
            "k3, live / replayed": ["mismatch/k3_ratio"],
            "f2": ["mismatch/f2_replay", "mismatch/f2_live"],
            "largest difference": ["mismatch/abs_max_replay", "mismatch/abs_max_live"],
        },
    }
    # TensorBoard takes a tag for the beginning of a regular expression's match: mismatch/f2 would draw f2_live too.
    return {
        page: {
            chart: ["Multiline", [f"^{re.escape(tag)}$" for tag in tags]]
            for chart, tags in charts.items()
        }
        for page, charts in pages.items()
    }
