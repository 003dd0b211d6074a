"""Write a page about one or several runs that works without a network.

    python -m r3.report RUN_DIR [RUN_DIR ...] -o report.html
    python -m r3.report runs/replay runs/live -o report.html --steps 1 10 20

Charts are drawn by Plotly (the extra `report`), which the page contains. Exit code 2: a folder is
not that of a run, Plotly is not installed, or the page cannot be written.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from r3.errors import Fault
from r3.run.folder import write_text
from r3.runtime.terminal import own_streams, say
from r3.tools.report.page import Limits, page_data, render


def plotly_source() -> str:
    """Plotly's script; raises Fault when the package is not installed."""
    try:
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError:
        raise Fault(
            "plotly is not installed, and the charts need it. Install it with: pip install plotly"
        ) from None
    return str(get_plotlyjs())


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    usual = Limits()
    parser = argparse.ArgumentParser(
        prog="r3.report", description=(__doc__ or "").partition("\n")[0], allow_abbrev=False
    )
    parser.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN_DIR", help="folder of a run")
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("report.html"), help="the page to write"
    )
    parser.add_argument(
        "--steps",
        type=int,
        nargs="+",
        default=[],
        help=f"steps whose dumps the page holds (default: {usual.dumps}, evenly spaced)",
    )
    parser.add_argument("--samples", type=int, default=usual.samples, help="most samples per dump")
    parser.add_argument(
        "--tokens", type=int, default=usual.tokens, help="most tokens per dump that can be coloured"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Write the page, or print in one line what is missing."""
    args = parse(argv)
    limits = Limits(steps=tuple(args.steps), samples=args.samples, tokens=args.tokens)
    try:
        page = render(page_data(args.run_dirs, limits), plotly_source())
        write_text(args.output, page)
    except (Fault, OSError) as error:
        say(f"r3.report: {error}", error=True)
        raise SystemExit(2) from None
    size = args.output.stat().st_size / 2**20
    say(f"{args.output}: {len(args.run_dirs)} run(s), {size:.1f} MiB")


if __name__ == "__main__":
    own_streams()
    main()
