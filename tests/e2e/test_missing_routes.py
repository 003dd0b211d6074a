"""An engine that loses routes, in a run from its command line: refused by default; counted with
replay.on_missing=live, and an error below replay.min_coverage.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.runs import rows_of, torchrun, words
from tests.tiny import FEW_ROWS

pytestmark = pytest.mark.e2e

# In the first step every engine returns nothing for its tenth answer, and two rows too few for its
# twentieth; in the second, which begins before its seventieth, nothing for almost all.
DRIVER = """
import train
from r3.engine import sampler
check, calls = sampler.check_routes, 0

def losing(routes, **facts):
    global calls
    calls += 1
    return check({10: None, 20: routes[:-2]}.get(calls, routes if calls < 70 else None), **facts)

sampler.check_routes = losing
train.main()
"""


def losing(folder: Path, flags: str = "") -> str:
    """What a run says that loses routes and fails."""
    driver = folder.with_name("losing.py")
    driver.write_text(DRIVER)
    all_flags = words(f"--train.steps 2 --eval.path '' --checkpoint.export false {flags}")
    given = ("--data.path", FEW_ROWS, "--log.dir", str(folder), *all_flags)
    # The proof of the sync generates too: four answers, before the step's.
    done = torchrun(2, str(driver), "tiny-smoke", *given)
    assert done.returncode != 0
    return done.stdout


def test_run_stops_at_the_first_missing_route(tmp_path: Path) -> None:
    refused = (
        r"RouteError on rank \d: rollout word_problems_train.jsonl\[:512\]:\d+/\d of step 0: "
        r"the engine returned no routes for positions 0\.\.\d+ in all 4 MoE layers"
    )
    said = losing(tmp_path / "run")
    assert re.search(refused, said), said[-4000:]
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_missing_routes_are_counted_by_cause(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    said = losing(folder, "--replay.on_missing live --replay.min_coverage 0.9")
    stopped = (
        r"RouteError on rank \d: only \d\.\d+% of the step's \d+ rows of routes were captured, "
        r"replay.min_coverage"
    )
    assert re.search(stopped, said), said[-4000:]
    # The first step passed, and its row says what it lost; the second has none.
    (row,) = rows_of(folder)
    missing = row["routing/rows_missing_rollout"]
    # Two whole rollouts on each of two engines: prompts alone have more than ten tokens.
    assert missing > 4 * 10
    assert row["routing/rows_missing"] == 0
    assert row["routing/rows_captured"] == row["routing/rows_expected"] - missing
    assert (
        0.9
        < row["routing/coverage"]
        == row["routing/rows_captured"] / row["routing/rows_expected"]
        < 1
    )
    # What the routers counted; the run itself has compared the two ends, and went on.
    assert row["routing/rows_replayed"] == row["routing/rows_captured"]
    assert row["routing/rows_live"] == row["routing/rows_last_token"] + missing == 128 + missing
    assert row["mismatch/abs_max"] <= 1e-4  # float32: the router chooses live what the engine chose
