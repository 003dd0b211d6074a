"""`python -m r3.report`: the page, clicked through in a real browser without a network."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser import Browser, chromium, why_absent
from tests.run_folder import GROUPS, SAMPLES, save_scores, write_run
from tests.runs import program

pytestmark = [pytest.mark.e2e, pytest.mark.large]
needs_browser = pytest.mark.skipif(bool(why_absent()), reason=why_absent())


def report(*words: object) -> subprocess.CompletedProcess[str]:
    return program(sys.executable, "-m", "r3.report", *words)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of a run with replay and of one without."""
    folder = tmp_path_factory.mktemp("report")
    runs = [write_run(folder / "with_replay"), write_run(folder / "live", replay="off", steps=2)]
    save_scores(runs[0], 5)  # this row of the first rollout predicted its token 6
    changes = {  # two epochs, which replay each row twice, and counts of a large run
        "config.yaml": (("epochs_per_step: 1", "epochs_per_step: 2"),),
        "metrics.jsonl": (
            ('"routing/rows_replayed": 150', '"routing/rows_replayed": 300'),
            ('"routing/rows_last_token": 12', '"routing/rows_last_token": 1234567'),
            ('"eval/heldout/accuracy"', '"eval/heldout/reward": 0.437, "eval/heldout/accuracy"'),
            ('"reward/mean"', '"loss/nll": 1.5, "reward/mean"'),
            ('"routing/rows_live": 12', '"routing/rows_live": 2469134'),
        ),
    }
    for name, pairs in changes.items():
        for before, after in pairs:
            text = (runs[0] / name).read_text()
            assert before in text
            (runs[0] / name).write_text(text.replace(before, after))
    done = report(*runs, "-o", folder / "report.html")
    assert done.returncode == 0, done.stderr
    assert "2 run(s)" in done.stdout
    return folder / "report.html"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory, page: Path) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("profile") / "chromium") as opened:
        opened.open(page)
        yield opened


def test_mistakes_are_one_line_and_exit_code_2(tmp_path: Path) -> None:
    done = report(tmp_path / "absent", "-o", tmp_path / "page.html")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "no config.yaml in this folder" in done.stderr
    assert not (tmp_path / "page.html").exists()


def test_a_page_that_cannot_be_written_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    done = report(write_run(tmp_path / "run"), "-o", tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "Is a directory" in done.stderr


@needs_browser
def test_every_part_is_drawn_without_errors(browser: Browser) -> None:
    assert browser.errors() == []
    assert browser.text("h1") == "with_replay and live"
    assert browser.text("#overview table").count("\n") >= 2
    assert "replay.mode" in browser.text("#settings")
    assert "balanced" in browser.text("#ledger") and "not balanced" not in browser.text("#ledger")
    assert "Without captured routes: live." in browser.text("#ledger")
    assert browser.count(".plot:not(:has(svg.main-svg))") == 0, "plots without a drawing"
    boxes = {"#agreement": 1, "#load-strip": 1, "#load": 2, "#time": 2, "#memory": 2}
    for box, expected in boxes.items():
        assert (
            browser.count(f"{box} .heatmaplayer, {box} .barlayer, {box} .scatterlayer") >= expected
        ), box
    titles = browser.values(".chart h4", "e.textContent")
    assert {"Reward", "Held-out accuracy", "Entropy", "k3 with and without replay"} <= set(titles)
    assert "heldout reward" in browser.text("#overview table")
    constant = browser.text("#learning")  # figures of graded rewards, and of supervised runs
    assert "Held-out reward: 0.437" in constant and "Supervised loss, teacher KL: 1.5" in constant
    assert "env/tool_calls" in titles, "what the user's environment reports"
    assert "The same in every step" in browser.text("#routing"), (
        "coverage or agreement does not change here"
    )


@needs_browser
def test_a_run_can_be_hidden(browser: Browser) -> None:
    lines = "#learning-charts .scatterlayer .trace"
    both = browser.count(lines)
    browser.click("#chips .chip:nth-child(2)")
    assert browser.count(lines) == both / 2
    browser.click("#chips .chip:nth-child(2)")
    assert browser.count(lines) == both


@needs_browser
def test_list_is_filtered_sorted_and_searched(browser: Browser) -> None:
    rewards = (".row .reward", "Number(e.textContent)")
    assert len(browser.values(*rewards)) == GROUPS * SAMPLES
    browser.choose("#order", "reward, highest first")
    assert browser.values(*rewards) == [1] * GROUPS + [0] * (GROUPS * (SAMPLES - 1))
    browser.choose("#reward", "mean or less")
    assert set(browser.values(*rewards)) == {0}
    browser.choose("#finish", "length")
    assert len(browser.values(*rewards)) == GROUPS, "one sample of each group was cut"
    browser.choose("#reward", "any")
    browser.choose("#finish", "any")
    browser.type("#search", "1+2=3")
    assert len(browser.values(*rewards)) == GROUPS, "the third sample of each group"
    browser.run(
        "const s = document.getElementById('search');"
        "s.value = ''; s.dispatchEvent(new Event('input'))"
    )
    browser.click("#only-prompt")
    assert len(browser.values(*rewards)) == SAMPLES
    browser.click("#all-prompts")
    assert len(browser.values(*rewards)) == GROUPS * SAMPLES


@needs_browser
def test_samples_of_a_group_are_compared_word_by_word(browser: Browser) -> None:
    browser.choose("#order", "dump order")
    browser.click(".row:nth-child(1)")
    browser.click("#view-compare")
    # "1+0=1 #### 1" against "1+3=4 #### 4", the sample whose reward is farthest away.
    assert browser.values(".pair del", "e.textContent") == ["0", "1", "1"]
    assert browser.values(".pair ins", "e.textContent") == ["3", "4", "4"]
    browser.choose("#other", "sample 1, reward 0")
    assert browser.count(".pair ins") == 3


COLOURS = (".tokens span.s", "e.style.backgroundColor")
DISABLED = ("#colour option:disabled", "e.value")


@needs_browser
def test_a_conversation_has_roles_tool_calls_and_rewards_per_turn(browser: Browser) -> None:
    browser.click(f".row:nth-child({SAMPLES + 2})")  # the second sample of group 1
    browser.click("#view-conversation")
    roles = browser.values(".message", "e.classList[1]")
    assert roles == ["user", "assistant", "tool", "assistant", "reference"]
    assert browser.text(".message.user pre") == "Question 1?"
    assert browser.text(".message pre.call") == 'calc({"expression": "1+1"})'
    assert browser.text(".message.reference pre") == "#### 1"
    assert "reward per turn\n\u2013, 1" in browser.text(".facts")
    assert "1+1=2" in browser.text("#detail")


@needs_browser
def test_tokens_are_coloured_and_what_is_not_in_the_dump_is_said(browser: Browser) -> None:
    browser.click(".row:nth-child(2)")
    browser.click("#view-tokens")
    assert browser.count(".tokens span") == 11 and browser.count(".tokens span.s") == 5
    browser.choose("#colour", "advantage")
    (advantage,) = set(browser.values(*COLOURS))
    browser.choose("#colour", "log-probability when sampled")
    assert len(set(browser.values(*COLOURS))) > 1 and advantage not in browser.values(*COLOURS)
    assert browser.values(*DISABLED) == ["difference", "disagreement"]
    assert "are not in this dump" in browser.text("#detail")
    browser.choose("#dump", "step 3, heldout (evaluation)")
    assert "Evaluation dumps hold text, not tokens" in browser.text("#detail")
    assert browser.errors() == []


@needs_browser
def test_saved_scores_give_two_more_colourings(browser: Browser) -> None:
    browser.choose("#dump", "step 1, training")
    browser.click(".row:nth-child(1)")
    browser.click("#view-tokens")
    assert browser.values(*DISABLED) == []
    browser.choose("#colour", "log-probability: policy \u2212 engine")
    assert len(set(browser.values(*COLOURS))) == 1, "every difference is 0.5"
    browser.choose("#colour", "routing disagreement")
    first, *others = browser.values(*COLOURS)
    assert others == ["rgb(255, 255, 255)"] * 3 and first not in others
    assert browser.errors() == []


@needs_browser
def test_any_metric_can_be_drawn_with_its_formula(browser: Browser) -> None:
    browser.choose("#metric", "mismatch/k3_live")
    assert "k3" in browser.text("#metric-formula")
    browser.click("#metric-log")
    assert browser.count("#metric-plot .scatterlayer .trace") == 1, (
        "the other run has no such metric"
    )
    assert browser.errors() == []
