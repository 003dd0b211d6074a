"""Follow a run from another shell: progress, main metrics, what each rank does.

    python -m r3.watch RUN_DIR             until the run ends, or Ctrl-C
    python -m r3.watch RUN_DIR --once      print the present state and end

Reads metrics.jsonl and heartbeats and changes nothing.
Exit code 2: the folder is not that of a run.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console, RenderableType
from rich.live import Live

from r3.errors import Fault
from r3.runtime.terminal import own_streams, say
from r3.tools.view.live import read_heartbeats, screen
from r3.tools.view.runs import RunFacts, read_run


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="r3.watch", description=(__doc__ or "").partition("\n")[0], allow_abbrev=False
    )
    parser.add_argument("run_dir", type=Path, help="folder of the run")
    parser.add_argument(
        "--every", type=float, default=2.0, help="seconds between looks (default 2)"
    )
    parser.add_argument("--once", action="store_true", help="print the present state and end")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Show the run until its end, or print in one line what is wrong."""
    args = parse(argv)
    try:
        if not args.every > 0:
            raise Fault(f"--every {args.every:g}: must be > 0. Give the seconds between two looks")
        facts = read_run(args.run_dir)
    except Fault as error:
        say(f"r3.watch: {error}", error=True)
        raise SystemExit(2) from None
    console = Console(highlight=False)
    if args.once:
        console.print(_look(facts))
        return
    try:
        with Live(console=console, refresh_per_second=4, screen=False) as live:
            while True:
                facts = read_run(args.run_dir)
                live.update(_look(facts))
                if facts.end or facts.is_finished:
                    return
                time.sleep(args.every)
    except KeyboardInterrupt:
        return


def _look(facts: RunFacts) -> RenderableType:
    notes = list(facts.notes)
    beats = read_heartbeats(facts.path, time.time(), notes)
    return screen(replace(facts, notes=tuple(notes)), beats)


if __name__ == "__main__":
    own_streams()
    main()
