"""Show conversations of a dumped step in the terminal.

    python -m r3.show RUN_DIR                      the newest dump: three best, three worst samples
    python -m r3.show RUN_DIR --step 10 --best 1 --worst 5
    python -m r3.show RUN_DIR --step 10 --group 3  all samples of a prompt (group number or id)
    python -m r3.show RUN_DIR --eval --step 10     held-out questions; --set NAME chooses a set

Exit code 2: the run, the step or the prompt does not exist; one line says what does.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from r3.errors import Fault
from r3.runtime.terminal import own_streams, say, visible
from r3.tools.view.panels import conversation
from r3.tools.view.runs import Kind, dumped_steps, read_samples
from r3.tools.view.samples import Sample, counted

DEFAULT_COUNT = 3


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="r3.show", description=(__doc__ or "").partition("\n")[0], allow_abbrev=False
    )
    parser.add_argument("run_dir", type=Path, help="folder of the run")
    parser.add_argument(
        "--step", type=int, help="step whose samples to show; the newest dump if not given"
    )
    parser.add_argument(
        "--eval", action="store_true", help="evaluation samples instead of training's"
    )
    parser.add_argument(
        "--set", default="", help="name of the evaluation set, where there are several"
    )
    parser.add_argument("--best", type=int, help="number of samples with the highest rewards")
    parser.add_argument("--worst", type=int, help="number of samples with the lowest rewards")
    parser.add_argument(
        "--group", help="all samples of one prompt: its group number or its prompt id"
    )
    parser.add_argument("--width", type=int, help="columns; the terminal's width if not given")
    return parser.parse_args(argv)


def chosen(
    args: argparse.Namespace, notes: list[str]
) -> tuple[str, list[tuple[str, list[Sample]]]]:
    """A heading, and lists of samples under their titles; `notes` gets what cannot be read.

    Raises:
        Fault: a step, a set or a prompt is not there.
    """
    for name in ("best", "worst"):
        if (count := getattr(args, name)) is not None and count < 0:
            raise Fault(f"--{name} {count}: must be >= 0. Give the number of samples to show")
    kind: Kind = "eval" if args.eval else "train"
    steps = dumped_steps(args.run_dir, kind)
    step = args.step if args.step is not None else (steps[-1] if steps else 0)
    sets = read_samples(args.run_dir, kind, step, notes)
    if args.set and args.set not in sets:
        raise Fault(
            f"--set {args.set}: no such set at step {step}; it has {', '.join(sets)}. Choose one"
        )
    samples = (
        sets[args.set] if args.set else [sample for of_set in sets.values() for sample in of_set]
    )
    rewards = [sample.reward for sample in counted(samples)]
    mean = sum(rewards) / len(rewards)
    name = args.set or ", ".join(sets)
    heading = f"{args.run_dir}  step {step}  {name}: {len(rewards)} samples, mean reward {mean:.3f}"
    if args.group is not None:
        return heading, [(f"prompt {args.group}", _group(samples, args.group))]
    counts = [args.best, args.worst]
    if counts == [None, None]:
        counts = [DEFAULT_COUNT, DEFAULT_COUNT]
    most, least = (count or 0 for count in counts)
    if len({sample.reward for sample in samples}) == 1:
        return heading, [("all rewards are equal", samples[: most + least])]
    # Equal rewards keep the order of the dump.
    highest = sorted(samples, key=lambda sample: -sample.reward)[:most]
    others = [sample for sample in samples if sample not in highest]
    lowest = sorted(others, key=lambda sample: sample.reward)[:least]
    parts = [("highest rewards", highest), ("lowest rewards", lowest)]
    return heading, [(title, listed) for title, listed in parts if listed]


def _group(samples: Sequence[Sample], group: str) -> list[Sample]:
    own = [sample for sample in samples if group in (str(sample.group), sample.prompt_id)]
    if not own:
        groups = sorted({sample.group for sample in samples})
        example = samples[0].prompt_id
        raise Fault(
            f"--group {group}: no such prompt in this dump. Give a group number from {groups[0]} "
            f"to {groups[-1]} or a prompt id such as {example}"
        )
    return own


def main(argv: Sequence[str] | None = None) -> None:
    """Print the conversations, or in one line what is missing."""
    args = parse(argv)
    try:
        notes: list[str] = []
        heading, parts = chosen(args, notes)
    except Fault as error:
        say(f"r3.show: {error}", error=True)
        raise SystemExit(2) from None
    console = Console(width=args.width, highlight=False)
    console.print(Text(visible(heading), style="bold"))
    for note in notes:
        console.print(Text(visible(note), style="yellow"))
    for title, samples in parts:
        console.print(Text(visible(f"\n{title}"), style="bold underline"))
        for sample in samples:
            console.print(conversation(sample))


if __name__ == "__main__":
    own_streams()
    main()
