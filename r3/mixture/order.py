"""The order of rows with a curriculum: rows that are too easy or too hard are passed over. Pure.

Rows come in the order of a run without curriculum (`r3.data.prompts`), and every source keeps its
share of the places. A row that was judged easy or hard is passed over for some epochs of its pool,
and the next row of the same pool takes its place. Then it is sampled and judged again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from r3.data.prompts import Dataset, draw, turns
from r3.types import Prompt

Verdict = Literal["easy", "hard", ""]


def verdict(right: int, count: int, low: float, high: float) -> Verdict:
    """Judge a row by its responses of one step; "" if it stays."""
    if not count or low < right / count < high:
        return ""
    return "easy" if right / count >= high else "hard"


@dataclass
class Taken:
    """What a step takes.

    Attributes:
        passed_over: rows that it passed over.
        taken_back: rows of these that it took after all: their pool has no other row left.
    """

    prompts: list[Prompt] = field(default_factory=list)
    passed_over: int = 0
    taken_back: int = 0


class Order:
    """The place in the data, and which rows are passed over; equal on all ranks.

    Attributes:
        held: by the id of a row, for how many more epochs it is passed over, and its verdict.
    """

    def __init__(self, dataset: Dataset, seed: int) -> None:
        self.held: dict[str, tuple[int, Verdict]] = {}
        self._weights: Sequence[float] = dataset.weights or (1.0,)
        self._pools, self._seeds = [dataset.prompts], [[seed]]
        if dataset.weights:
            ends = [
                sum(size for _, size in dataset.read[: i + 1]) for i in range(len(dataset.read))
            ]
            starts = [0, *ends[:-1]]
            self._pools = [dataset.prompts[a:b] for a, b in zip(starts, ends, strict=True)]
            self._seeds = [[seed, index] for index in range(len(ends))]
        self._places, self._cursors = 0, [0] * len(self._pools)
        self._epochs: dict[int, tuple[int, list[Prompt]]] = {}  # by pool: its present epoch

    def take(self, count: int) -> Taken:
        """Return the next prompts.

        A step that has seen every row of a pool takes rows that it passed over before it takes a
        row twice, so a step always gets its prompts.
        """
        taken = Taken()
        seen: set[str] = set()
        passed: list[dict[str, Prompt]] = [{} for _ in self._pools]
        before = turns(self._weights, self._places)
        for _ in range(count):
            self._places += 1
            after = turns(self._weights, self._places)
            pool = next(i for i in range(len(after)) if after[i] > before[i])
            before = after
            taken.prompts.append(self._next(pool, seen, passed[pool], taken))
        return taken

    def judge(self, verdicts: dict[str, Verdict], rest: int) -> None:
        """Pass rows over for `rest` epochs that were judged easy or hard."""
        self.held |= {row: (rest, verdict) for row, verdict in verdicts.items() if verdict}

    def count(self, verdict: Verdict) -> int:
        """Rows that are passed over now with this verdict."""
        return sum(other == verdict for _, other in self.held.values())

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, as JSON has it."""
        return {"places": self._places, "cursors": self._cursors, "held": self.held}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        self._places, self._cursors = state["places"], list(state["cursors"])
        self.held = {row: (epochs, verdict) for row, (epochs, verdict) in state["held"].items()}

    def _next(self, pool: int, seen: set[str], passed: dict[str, Prompt], taken: Taken) -> Prompt:
        while True:
            prompt = self._draw(pool)
            if prompt.id in seen and passed:
                first = next(iter(passed))
                self.held.pop(first, None)
                taken.taken_back += 1
                return passed.pop(first)
            if prompt.id in seen or prompt.id not in self.held:
                seen.add(prompt.id)
                return prompt
            seen.add(prompt.id)
            passed[prompt.id] = prompt
            taken.passed_over += 1
            epochs, verdict = self.held.pop(prompt.id)
            if epochs > 1:
                self.held[prompt.id] = (epochs - 1, verdict)

    def _draw(self, pool: int) -> Prompt:
        """Return the row at the cursor of a pool."""
        prompts = self._pools[pool]
        epoch, place = divmod(self._cursors[pool], len(prompts))
        self._cursors[pool] += 1
        if self._epochs.get(pool, (-1, []))[0] != epoch:
            first = epoch * len(prompts)
            rows = draw(prompts, self._seeds[pool], first, first + len(prompts))
            self._epochs[pool] = (epoch, rows)
        return self._epochs[pool][1][place]
