"""TensorBoard: the charts that it shows first, and samples formatted for its text panel."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any


def tensorboard_layout(eval_names: Sequence[str]) -> dict[str, dict[str, list[Any]]]:
    """TensorBoard's custom scalars: the page to watch, then what replay is worth in this very
    run.
    """
    pages = {
        "1 health": {
            "reward and evaluation": [
                "reward/mean",
                *(f"eval/{name}/{what}" for name in eval_names for what in ("accuracy", "reward")),
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
    # TensorBoard takes a tag for the beginning of a regular expression's match: mismatch/f2 would
    # draw f2_live too.
    return {
        page: {
            chart: ["Multiline", [f"^{re.escape(tag)}$" for tag in tags]]
            for chart, tags in charts.items()
        }
        for page, charts in pages.items()
    }


def sample_markdown(row: Mapping[str, Any]) -> str:
    """A row of a rollout dump as markdown: facts, each message, the reference answer."""
    facts = (
        f"reward {row['reward']:.4g}, advantage {row['advantage']:+.3f}, "
        f"{row['response_tokens']} sampled tokens, "
        f"finish {row['finish_reason']}, {row['prompt_id']} sample {row['sample_index']}"
        + (f" sequence {row['sequence']}" if row.get("sequence") else "")
    )
    parts = [(str(message["role"]), _said(message)) for message in row["messages"]]
    if row.get("reference"):
        parts.append(("reference answer", row["reference"]))
    # Indented by four, a text is shown as it is: nothing in it is taken for markdown or HTML.
    blocks = [
        f"**{title}**\n\n" + "\n".join(f"    {line}" for line in text.splitlines() or [""])
        for title, text in parts
    ]
    return "\n\n".join([facts, *blocks])


def _said(message: Mapping[str, Any]) -> str:
    calls = [str(call.get("function", call)) for call in message.get("tool_calls") or ()]
    return "\n".join(filter(None, [str(message.get("content") or ""), *calls]))
