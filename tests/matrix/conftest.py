"""Keeps what every cell gave, for the table of docs/models.md."""

from __future__ import annotations

import json
import os

import pytest

from tests.matrix.results import RESULTS, results

_found: dict[str, dict[str, str]] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Also called for what other processes ran."""
    for key, value in report.user_properties if report.when == "call" else ():
        if key == "cell":
            name, cell, outcome = value
            _found.setdefault(name, {})[cell] = outcome if report.passed else "failed"


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write results where `make test-matrix` asks for it; cells that were not run stay."""
    if not os.environ.get("R3_MATRIX") or hasattr(session.config, "workerinput") or not _found:
        return
    kept = results()
    for name, cells in _found.items():
        kept[name] = dict(sorted((kept.get(name, {}) | cells).items()))
    rows = ",\n".join(f" {json.dumps(name)}: {json.dumps(kept[name])}" for name in sorted(kept))
    RESULTS.write_text(f"{{\n{rows}\n}}\n")
