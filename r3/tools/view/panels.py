"""Print conversations in a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.text import Text

from r3.algo.sums import are_equal
from r3.runtime.terminal import visible
from r3.tools.view.samples import Sample, tool_calls_text

ROLE_STYLES = {
    "system": "dim",
    "user": "bold blue",
    "assistant": "bold green",
    "tool": "bold magenta",
}


def conversation(sample: Sample) -> RenderableType:
    """A sample: facts, every message under its role, the reference answer."""
    return Group(*_parts(sample))


def facts(sample: Sample) -> str:
    """One line: `reward 1  (gsm8k 1)  advantage +0.53  stop  22 tokens`."""
    parts = [f"reward {sample.reward:.4g}"]
    if sample.components and list(sample.components.values()) != [sample.reward]:
        parts.append(
            "(" + ", ".join(f"{name} {part:.4g}" for name, part in sample.components.items()) + ")"
        )
    if sample.turn_rewards:
        parts.append(
            "per turn " + " ".join("-" if r is None else f"{r:.4g}" for r in sample.turn_rewards)
        )
    parts += [f"{name} {number:.4g}" for name, number in sample.metrics.items()]
    shaped = sample.shaped_reward
    if shaped is not None and not are_equal((shaped, sample.reward)):
        parts.append(f"shaped {shaped:.4g}")
    if sample.advantage is not None:
        parts.append(f"advantage {sample.advantage:+.3f}")
    parts += [f"finish {sample.finish_reason}", f"{sample.response_tokens} sampled tokens"]
    return "  ".join(parts)


def _text(text: str, style: str = "") -> Text:
    return Text(visible(text), style=style)


def _parts(sample: Sample) -> Iterator[RenderableType]:
    yield Rule(_text(sample.name, "bold"), align="left", style="dim")
    colour = "green" if sample.reward > 0 else "red"
    yield _text(facts(sample), colour)
    for message in sample.messages:
        role = str(message["role"])
        yield _text(role, ROLE_STYLES.get(role, "bold"))
        body = [str(message.get("content") or "").rstrip("\n"), *tool_calls_text(message)]
        yield Padding(_text("\n".join(filter(None, body))), (0, 0, 0, 2))
    if sample.reference:
        yield Text("reference", style="bold yellow")
        yield Padding(_text(sample.reference), (0, 0, 0, 2))
    yield Text("")
