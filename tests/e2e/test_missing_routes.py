"""An engine that loses routes, in a run from its command line: counted with replay.on_missing=live,
and an error below replay.min_coverage.
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


def test_missing_routes_are_counted_by_cause(tmp_path: Path) -> None:
    driver, folder = tmp_path / "losing.py", tmp_path / "run"
    driver.write_text(DRIVER)
    flags = words("--train.steps 2 --eval.path '' --checkpoint.export false")
    flags += words("--replay.on_missing live --replay.min_coverage 0.9")
    given = ("--data.path", FEW_ROWS, "--log.dir", str(folder), *flags)
    # The proof of the sync generates too: four answers, before the step's.
    done = torchrun(2, str(driver), "tiny-smoke", *given)
    assert done.returncode != 0
    stopped = (
        r"RouteError on rank \d: only \d\.\d+% of the step's \d+ rows of routes were captured, "
        r"replay.min_coverage"
    )
    assert re.search(stopped, done.stdout), done.stdout[-4000:]
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
