"""Make faults in real runs and write docs/faults.md.

    python -m tests.faults                        every row of the table, then the page
    python -m tests.faults --rows bit hang        some rows, replaced in the page
    python -m tests.faults --soak 30 --seed 1     runs with one random fault each
    python -m tests.faults --kills 40 --seed 1    runs of several kinds, killed at random moments

Each start takes about half a minute on two idle cores. `--minutes` bounds the whole call: what does
not fit is not run, and the page says so.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from tests.faults.attempts import Unexpected, finish
from tests.faults.kills import kills
from tests.faults.soak import soak
from tests.faults.table import TABLE, Fault, Outcome, Place, Skip
from tests.world import ROOT

_PAGE = ROOT / "docs" / "faults.md"
_SOAK = "## Random faults"


def main(argv: Sequence[str]) -> int:
    """Run what the command line asks for; returns the exit code."""
    names = [fault.name for fault in TABLE]
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--rows", nargs="+", choices=names, default=names, metavar="ROW")
    parser.add_argument("--list", action="store_true", help="print the rows, run nothing")
    parser.add_argument("--soak", type=int, default=0, metavar="N")
    parser.add_argument("--kills", type=int, default=0, metavar="N")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--first", type=int, default=1, help="number of the first run of --soak and --kills"
    )
    parser.add_argument("--minutes", type=float, default=120.0)
    given = parser.parse_args(argv)
    if given.list:
        print("\n".join(f"{fault.name:18} {fault.what}" for fault in TABLE))
        return 0
    for number in (signal.SIGINT, signal.SIGHUP):
        # In the background and under nohup they are ignored, and runs would inherit that. A handler
        # is not inherited.
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    until = time.monotonic() + 60 * given.minutes
    root = Path(tempfile.mkdtemp(prefix="r3-faults-"))
    how = {"first": given.first, "until": until}
    try:
        if given.kills:
            kills(given.kills, given.seed, root, **how, say=lambda line: print(line, flush=True))
            code = 0
        elif given.soak:
            code = _soak(given.soak, given.seed, root, **how)
        else:
            chosen = [fault for fault in TABLE if fault.name in given.rows]
            code = _table(chosen, root, until)
    except Unexpected as error:
        print(error, file=sys.stderr)
        code = 1
    if code:
        print(f"what the runs left: {root}", file=sys.stderr)
    else:
        shutil.rmtree(root)
    return code


def _soak(count: int, seed: int, root: Path, *, first: int, until: float) -> int:
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        print(line, flush=True)

    soak(count, seed, root, first=first, until=until, say=say)
    lines = [f"`python -m tests.faults --soak {count} --seed {seed}` {_when()}:"]
    wrapped = [textwrap.fill(line, 100, subsequent_indent="  ") for line in said]
    _write_section("\n".join([*lines, "", "```text", *wrapped, "```"]))
    return 0


def _table(faults: Sequence[Fault], root: Path, until: float) -> int:
    straight = root / "straight"
    finish(straight)
    rows: dict[str, str] = {}
    failed = 0
    for fault in faults:
        began = time.monotonic()
        place = Place(root / fault.name / "run", straight)
        place.folder.parent.mkdir()
        try:
            if began > until:
                raise Skip("the time was over")
            outcome = fault.make(place)
        except Skip as reason:
            print(f"{fault.name}: not run: {reason}", flush=True)
            continue  # the row keeps what it had
        except Unexpected as error:
            failed += 1
            print(error, file=sys.stderr)
            continue
        rows[fault.what] = _row(fault, outcome)
        print(f"{fault.name} ({time.monotonic() - began:.0f} s): {outcome}", flush=True)
    _write_table(rows)
    return 1 if failed else 0


def _row(fault: Fault, outcome: Outcome) -> str:
    seen = " ".join(outcome.seen.split()).replace("|", "\\|")
    return f"| {fault.what} | {seen} | {outcome.lost} | {outcome.goes_on} |"


_INTRODUCTION = """# Fault tests

You want to know what a fault costs before it happens. Each row was made in a real run of
`tiny-smoke` on two CPU ranks, with a checkpoint after each step. **(=)**: the weights and metrics
of the finished run, times aside, equal those of an undisturbed run on one machine.
[Checkpoints and resume](checkpoints-and-resume.md) explains the settings. To make the faults again
(`--list` names the rows, `--rows` makes some):

```bash
.venv/bin/python -m tests.faults
```

"""


def _write_table(rows: Mapping[str, str]) -> None:
    """Put new rows into the page; those that were not run keep what they had."""
    old = _PAGE.read_text(encoding="utf-8") if _PAGE.exists() else ""
    _, found, rest = old.partition(_SOAK)
    lines = [rows.get(fault.what) or _line_of(fault, old) for fault in TABLE]
    head = ["| fault | what the user sees | lost | how it goes on |", "|---|---|---|---|"]
    table = "\n".join([*head, *lines])
    names = ", ".join(fault.name for fault in TABLE if fault.what in rows)
    last = f"Last run {_when()}: {names}. Other rows are of earlier runs and commits."
    if len(rows) == len(TABLE):
        last = f"Last run {_when()}: all rows."
    text = f"{_INTRODUCTION}{textwrap.fill(last, 100)}\n\n{table}\n"
    _PAGE.write_text(f"{text}\n{found}{rest}" if found else text, encoding="utf-8")


def _line_of(fault: Fault, page: str) -> str:
    begins = f"| {fault.what} |"
    kept = next((line for line in page.splitlines() if line.startswith(begins)), "")
    return kept or _row(fault, Outcome("not run", "", ""))


def _write_section(text: str) -> None:
    old = _PAGE.read_text(encoding="utf-8") if _PAGE.exists() else _INTRODUCTION
    before = old.partition(_SOAK)[0].rstrip()
    about = (
        "Each run gets one fault of a random kind at a random time, and is started again until it "
        "is\nfinished. Its weights must equal those of an undisturbed run bit for bit, and its "
        "rows must be\nequal, times and memory aside."
    )
    _PAGE.write_text(f"{before}\n\n{_SOAK}\n\n{about}\n\n{text}\n", encoding="utf-8")


def _when() -> str:
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    machine = f"{os.cpu_count()} cores, Python {platform.python_version()}"
    return f"on {date} at commit {commit.strip()} ({machine})"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
