"""Watch the mismatch of a run: a jump over its own level, and growth with the conversation."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median

from r3.metrics.reduce import DEPTHS

_LEVEL, _FEWEST = 25, 5
"""Rows that the level is a median of, at most and at least."""
_JUMP, _OVER_LARGEST = 10.0, 3.0
"""Ratios to the level, and to its largest row: noisy routers reached 54 times and 2.5 times."""
_JUMP_OF_MEAN = 1.5
"""One token far off multiplies k3, a mean of exp(D), and hardly moves the mean of |D|."""
_SMALLEST_K3 = 1e-6
"""Two float32 stacks are below it; what is there is rounding."""
_GROWTH, _SMALLEST_MEAN, _ROWS = 3.0, 1e-3, 3
"""Ratio to the first range, mean |D| worth a warning, and rows that must agree."""


def growth(by_depth: Mapping[str, float]) -> str:
    """Say whether the mismatch grows with the position in the conversation; empty if it does not.

    A report elsewhere had 0.02 below 8k tokens and 0.16 above 64k; sound models stay level.

    Args:
        by_depth: mean |D| per range of positions, first range first, those without tokens left out.
    """
    if len(by_depth) < 2:
        return ""
    first, *others = by_depth
    last = max(others, key=lambda depth: by_depth[depth])
    shallow, deep = by_depth[first], by_depth[last]
    if deep < _SMALLEST_MEAN or deep < _GROWTH * shallow:
        return ""
    return (
        f"the mismatch grows with the conversation: mean |D| is {shallow:.1e} at positions "
        f"{first} and {deep:.1e} at {last}. Compare rope_parameters of config.json in engine and "
        "policy, then sliding windows and the type of the KV cache (engine.dtype)"
    )


class MismatchWatch:
    """Compares the rows of a run with each other. Each kind of message comes once."""

    def __init__(self) -> None:
        self._rows: deque[tuple[float, float]] = deque(maxlen=_LEVEL)
        self._grown = 0
        self._said: set[str] = set()

    def lines(self, row: Mapping[str, float], step: int) -> list[str]:
        """Return what a person should know of a row of metrics after the rows before it."""
        texts = {"jump": self._jump(row), "growth": self._growth(row)}
        new = {kind: text for kind, text in texts.items() if text and kind not in self._said}
        self._said |= new.keys()
        return [f"warning: step {step}: {text}" for text in new.values()]

    def _jump(self, row: Mapping[str, float]) -> str:
        if not {"mismatch/k3", "mismatch/abs_mean"} <= row.keys():
            return ""
        k3, mean = row["mismatch/k3"], row["mismatch/abs_mean"]
        level = [median(column) for column in zip(*self._rows, strict=True)]
        largest = max((before for before, _ in self._rows), default=0.0)
        is_known = len(self._rows) >= _FEWEST
        self._rows.append((k3, mean))
        if not is_known or k3 < _SMALLEST_K3:
            return ""
        if k3 < max(_JUMP * level[0], _OVER_LARGEST * largest) or mean < _JUMP_OF_MEAN * level[1]:
            return ""
        routes = "".join(
            f", {key} {row[key]:.3f}"
            for key in ("routing/coverage", "routing/agreement")
            if key in row
        )
        return (
            f"mismatch/k3 is {k3:.1e}, and was {level[0]:.1e}. Likely causes, in this order: the "
            "weight sync (--debug.prove_sync_every 1; python -m r3.doctor); the routes (python -m "
            f"r3.rescore{routes}); precision (model.dtype, engine.dtype, model.fp32_head)"
        )

    def _growth(self, row: Mapping[str, float]) -> str:
        prefix = "mismatch/abs_mean_depth/"
        text = growth({depth: row[prefix + depth] for depth in DEPTHS if prefix + depth in row})
        self._grown = self._grown + 1 if text else 0
        return text if self._grown >= _ROWS else ""
