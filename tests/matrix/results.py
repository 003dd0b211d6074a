"""The table of docs/models.md: what each published layout did, as the tests wrote it down."""

from __future__ import annotations

import json
from pathlib import Path

from tests.published import LAYOUTS, Limit

RESULTS = Path(__file__).with_name("results.json")
CELLS = (
    *("check", "rl", "resume", "export", "sft", "lora", "int8", "kl", "streamed", "recompute"),
    *("tp2", "pp2", "ep2", "cp2", "tools", "doctor", "rescore"),
)
WHOLE = ("rl", "resume", "export", "sft")
"""Columns of which `make test-matrix` runs all rows."""


def results() -> dict[str, dict[str, str]]:
    """Layout -> cell -> passed, refused or failed; absent cells were not run."""
    found: dict[str, dict[str, str]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return found


def table_of_results() -> tuple[tuple[str, ...], list[tuple[str, ...]], list[Limit]]:
    """Header and rows of the table, and the limits that its numbers name."""
    found = results()
    limits = list(dict.fromkeys(each for one in LAYOUTS.values() for each in one.limits.values()))

    def entry(name: str, cell: str) -> str:
        outcome = found.get(name, {}).get(cell, "-")
        if outcome == "refused":
            return str(limits.index(LAYOUTS[name].limits[cell]) + 1)
        return {"passed": "yes", "failed": "**no**"}.get(outcome, outcome)

    rows = [(f"`{name}`", *(entry(name, cell) for cell in CELLS)) for name in LAYOUTS]
    return ("published as", *CELLS), rows, limits
