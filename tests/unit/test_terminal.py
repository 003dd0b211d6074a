"""A model's text cannot command the terminal: control characters are shown, at every door."""

import io
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from r3 import check_loss, report, show, watch
from r3.metrics.console import console_of
from r3.rewards.scorer import RewardError
from r3.run import RunDir, failure_text, write_json, write_text
from r3.runtime import say, visible
from tests.errors import Capsys, Patch, Terminal
from tests.run_folder import write_run

# What rich takes for markup, a title, a screen that is cleared, C1's introducer, a line that is
# overwritten, reversed text.
HOSTILE = "a[/INST]\x1b]0;title\x07\x1b[2J\x9b31m\rb\x08\x7f\u202ereversed\u2066\u200f\u2028"
SHOWN = r"a[/INST]\x1b]0;title\x07\x1b[2J\x9b31m\rb\x08\x7f\u202ereversed\u2066\u200f\u2028"
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_COLOUR = re.compile(r"\x1b\[[\d;]*m|\x1b\]8;[^\x1b]*\x1b\\")  # rich's own, on a terminal


ROW = {"reward/mean": 1.0, f"eval/{HOSTILE}/accuracy": 1.0, f"eval/{HOSTILE}/b": 1.0}


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()])
def test_the_console_shows_control_characters(stream: io.StringIO) -> None:
    console = console_of(is_leader=True, progress=False, stream=stream)
    for write in (
        lambda: console.header([HOSTILE]),
        lambda: console.line(HOSTILE),
        lambda: console.row(ROW, 1, 2),
    ):
        write()
        written = _COLOUR.sub("", stream.getvalue())
        assert not _OBEYED.search(written) and r"INST]\x1b]0;title" in written
        stream.truncate(stream.seek(0))


def _show(folder: Path) -> None:
    run = write_run(folder, text=HOSTILE, steps=1)
    call = {"role": HOSTILE, "tool_calls": [{"function": {"name": HOSTILE, "arguments": HOSTILE}}]}
    hostile = {"prompt_id": HOSTILE, "reference": HOSTILE, "metrics": {HOSTILE: 1.0}}
    dump = RunDir(run).rollouts(1)
    rows = [json.loads(line) for line in dump.open(encoding="utf-8")]
    rows = [row | hostile | {"messages": [*row["messages"], call]} for row in rows]
    dump.write_text("\n".join(json.dumps(row | {"rewards": {HOSTILE: 0.5}}) for row in rows))
    show.main([str(run), "--width", "200"])


def _watch_failed(folder: Path) -> None:
    run = RunDir(write_run(folder, steps=1))
    run.first_failure.parent.mkdir()
    write_text(run.first_failure, f"RewardError: {HOSTILE.partition(chr(0x2028))[0]}")
    watch.main([str(folder), "--once"])


def _watch_phase(folder: Path) -> None:
    run = RunDir(write_run(folder, steps=1))
    beat = {"rank": 0, "phase": HOSTILE, "silent_s": 0.0, "written_at": 1e12}
    write_json(run.heartbeat(0), beat)
    watch.main([str(folder), "--once"])


def _error(folder: Path) -> None:
    error = RewardError(f"reward math failed on a response that begins with {HOSTILE}")
    say(failure_text(error, rank=0, path=folder / "errors" / "rank_00000.txt"), error=True)


DOORS: dict[str, Callable[[Path], None]] = {
    "show": _show,
    "no such prompt": lambda folder: show.main([str(write_run(folder)), "--group", HOSTILE]),
    "watch, failed": _watch_failed,
    "watch, a phase": _watch_phase,
    "report": lambda _: report.main([HOSTILE]),
    "check_loss": lambda _: check_loss.main([f"{HOSTILE}.py:f"]),
    "error": _error,
}


@pytest.mark.parametrize("name", DOORS)
def test_commands_and_errors_show_control_characters(
    name: str, tmp_path: Path, monkeypatch: Patch, capsys: Capsys
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    try:
        DOORS[name](tmp_path / "run")
    except SystemExit as end:
        assert end.code in (1, 2)
    captured = capsys.readouterr()
    written = captured.out + captured.err
    assert not _OBEYED.search(written), ascii(written)
    assert r"[/INST]\x1b]0;title" in written


def test_ordinary_text_is_left_as_it_is() -> None:
    assert visible(HOSTILE) == SHOWN
    for text in ("a\tb\nc", "é ≤ 日本 😀", "می‌خواهم", "👩‍💻", "שלום"):  # joiners belong to words
        assert visible(text) == text
    assert visible("half \ud800") == r"half \ud800"


DONE = "done       in 9 s: 3 steps, heldout accuracy 0.230 -> 0.262; runs/a/hf, a/metrics.jsonl"
PATH = "/a" * 50
FLAGS = "--parallel.tp 2 --model.recompute selective --train.optimizer streamed --parallel.ep 2"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("short", ["short"]),
        (DONE, [DONE.rpartition(" ")[0], f"{'':11}a/metrics.jsonl"]),
        (f"  - {'word ' * 20}end", [f"  - {'word ' * 15}".rstrip(), f"    {'word ' * 5}end"]),
        (f"warning: {PATH} is no file", ["warning:", f"  {PATH}", "  is no file"]),
        (f"1. {FLAGS}", [f"1. {FLAGS[:-16]} \\", "    --parallel.ep 2"]),
        (
            f"  continue with: NPROC=2 launch/local.sh {FLAGS}",
            [f"  continue with: NPROC=2 launch/local.sh {FLAGS[:15]} \\", f"      {FLAGS[16:]}"],
        ),
        (f"launch/local.sh {FLAGS} --a 'b c'", [f"launch/local.sh {FLAGS} --a 'b c'"]),
    ],
)
def test_long_lines_are_broken_between_words_on_a_terminal_only(
    line: str, expected: list[str], monkeypatch: Patch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for stream, lines in ((io.StringIO(), [line]), (Terminal(), expected)):
        monkeypatch.setattr("sys.stdout", stream)
        say(line)
        assert stream.getvalue().splitlines() == lines
