"""Write the tables of gpu.md and draw gpu.png from results/gpu.jsonl.

.venv/bin/python -m benchmarks.gpu_tables [RESULTS]      another file's tables are printed only
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS, PAGE, PICTURE = HERE / "results/gpu.jsonl", HERE / "gpu.md", HERE / "results/gpu.png"
MARKS = ("<!-- results: made by gpu_tables.py -->\n", "<!-- results: end -->\n")
# Shown in tables of their own, or said in the heading.
_ELSEWHERE = ("experiment", "by_step", "trace", "planned_gib", "reward", "grad_norm", "versions")
_ELSEWHERE += ("gpus", "name", "source", "last", "families")
Row = Mapping[str, Any]


def sections(rows: Sequence[Row]) -> Iterator[str]:
    """The tables of each machine: the newest result of every step."""
    newest = {(row["machine"], row["step"]): row for row in sorted(rows, key=_when)}
    by_machine = sorted(newest.values(), key=lambda row: row["machine"])
    for machine, group in groupby(by_machine, lambda row: row["machine"]):
        ordered = sorted(group, key=lambda row: row["step"])
        versions = max(ordered, key=_when)["versions"]
        yield f"### {machine}\n\n{', '.join(f'{name} {one}' for name, one in versions.items())}.\n"
        yield table(["step", "day, commit", "result", "seconds", "figures"], map(summary, ordered))
        yield from details(ordered)


def _when(row: Row) -> str:
    return str(row["when"])


def summary(row: Row) -> list[str]:
    """A step's row."""
    figures = row["figures"] or {}
    failed = row.get("exit") or figures.get("passed") is False
    return [
        f"`{row['step']}`",
        f"{row['when'][:10]} {row.get('commit', '')}",
        "failed" if failed else "passed",
        f"{row['seconds']:.0f}" if "seconds" in row else "",
        "; ".join(texts_of(figures)),
    ]


def texts_of(figures: Row, prefix: str = "") -> Iterator[str]:
    """Short texts of numbers, of the largest of several, and of texts."""
    for name, value in figures.items():
        label = f"{prefix}{name}".replace("_", " ")
        if name in _ELSEWHERE or (name == "passed" and isinstance(value, bool)) or value == []:
            continue
        if isinstance(value, Mapping):
            yield from texts_of(value, f"{prefix}{name} ")
        elif isinstance(value, list) and all(isinstance(entry, float) for entry in value):
            yield f"{label} at most {max(value):.3g}"
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield f"{label} {value:.4g}"
        else:
            yield f"{label} {', '.join(value) if isinstance(value, list) else value}"


def details(ordered: Sequence[Row]) -> Iterator[str]:
    """Tables by step of the run, and of traces."""
    for row in ordered:
        figures = row["figures"] or {}
        if by_step := figures.get("by_step"):
            steps = len(next(iter(by_step.values())))
            shown = range(min(steps, 5))
            yield f"`{row['step']}`, first steps:\n"
            lines = [
                [name, *(f"{values[i]:.4g}" for i in shown)] for name, values in by_step.items()
            ]
            planned = figures.get("planned_gib", {})
            lines += [[f"planned {name}", f"{gib:.4g}"] for name, gib in planned.items()]
            width = len(shown) + 1
            lines = [line + [""] * (width - len(line)) for line in lines]
            yield table(["figure", *(f"{step + 1}" for step in shown)], lines)
        if trace := figures.get("trace"):
            said = "; ".join(
                texts_of({k: v for k, v in trace.items() if k not in ("largest", "milliseconds")})
            )
            yield f"`{row['step']}`, one step traced: {trace['milliseconds']:.0f} ms.\n\n{said}.\n"
            largest = [
                [f"`{name[:60]}`", f"{ms:g}", str(n)] for name, ms, n in trace["largest"][:12]
            ]
            yield table(["kernel", "ms", "launches"], largest)


def table(head: Sequence[str], lines: Any) -> str:
    """A Markdown table."""
    texts = [
        f"| {' | '.join(cell.replace('|', '/') for cell in row)} |\n" for row in (head, *lines)
    ]
    return "".join([texts[0], "|---" * len(head) + "|\n", *texts[1:]])


def draw(rows: Sequence[Row], path: Path) -> None:
    """Reward and gradient norm of the newest runs with and without replay."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from benchmarks.learning_curve import BLUE, RED

    newest = max((row for row in rows if row["step"] == "curves"), key=lambda row: row["when"])
    figure, axes = plt.subplots(1, 2, figsize=(9.6, 3.4), layout="constrained")
    for ax, name in zip(axes, ("reward", "grad_norm"), strict=True):
        for run, values in newest["figures"][name].items():
            with_replay = "-r3-" in run
            steps = range(1, len(values) + 1)
            label = "with replay" if with_replay else "live routing"
            ax.plot(steps, values, color=BLUE if with_replay else RED, label=label, lw=1.2)
        ax.set(xlabel="step", title=name.replace("_", " "))
    axes[1].set_yscale("log")
    handles, labels = axes[0].get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))  # not once per seed
    axes[0].legend(once.values(), once.keys())
    figure.savefig(path, dpi=100)


def with_tables(page: str, rows: Sequence[Row]) -> str:
    """The page with the tables of these rows between the marks."""
    before, _, rest = page.partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    return f"{before}{MARKS[0]}\n" + "\n".join(sections(rows)) + f"\n{MARKS[1]}{after}"


def main() -> None:
    """Renew the page, or print the tables of another file."""
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    if file != RESULTS:
        print("\n".join(sections(rows)))
        return
    PAGE.write_text(with_tables(PAGE.read_text(), rows))
    draw(rows, PICTURE)


if __name__ == "__main__":
    main()
