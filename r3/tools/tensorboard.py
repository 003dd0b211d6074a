"""TensorBoard: a run's curves and samples."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any


class Events:
    """TensorBoard's event files of a run.

    Args:
        folder: where they are.
        steps_done: steps of the checkpoint that the run resumes from. What the killed run wrote
            after them is hidden.
        eval_names: held-out sets.
        say: writes a line on the console.
    """

    def __init__(
        self, folder: Path, steps_done: int, eval_names: Sequence[str], say: Callable[[str], None]
    ) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._say = say
        purge_step = steps_done + 1 if steps_done else None
        self._writer: Any = SummaryWriter(str(folder), purge_step=purge_step)
        self._excepthook, threading.excepthook = threading.excepthook, self._end_of_thread
        self._writer.add_custom_scalars(tensorboard_layout(eval_names))

    def log(self, row: Mapping[str, float], step: int) -> None:
        """Write the metrics of a step; metrics.jsonl and the report have those of each layer."""

        def write(writer: Any) -> None:
            for key, value in row.items():
                if "_layer/" not in key:
                    writer.add_scalar(key, value, global_step=step)
            writer.flush()

        self._write(write)

    def log_samples(self, texts: Mapping[str, str], step: int) -> None:
        """Write samples as markdown, by a name such as "best"."""

        def write(writer: Any) -> None:
            for name, text in texts.items():
                writer.add_text(f"samples/{name}", text, global_step=step)

        self._write(write)

    def close(self, *, failed: bool) -> None:
        """Write out what is left."""
        self._write(lambda writer: writer.close())
        if threading.excepthook == self._end_of_thread:
            threading.excepthook = self._excepthook

    def _write(self, call: Callable[[Any], None]) -> None:
        """TensorBoard's writer cannot continue after a full disk; the run can."""
        if self._writer is not None:
            try:
                call(self._writer)
            except OSError as error:
                self._say(f"TensorBoard's events end here: {error}")
                self._writer = None

    def _end_of_thread(self, args: threading.ExceptHookArgs) -> None:
        """TensorBoard's thread raises an error of the disk, too: no traceback beside it."""
        module = type(args.thread).__module__
        if not (module.startswith("tensorboard.") and issubclass(args.exc_type, OSError)):
            self._excepthook(args)


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
    advantage = row["advantage"]
    facts = (
        f"reward {row['reward']:.4g}, "
        + ("" if advantage is None else f"advantage {advantage:+.3f}, ")
        + f"{row['response_tokens']} sampled tokens, "
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
