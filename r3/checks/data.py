"""Rows of the training data and of the held-out sets.

Sources that must be downloaded or generated are read when the run starts.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

from r3.checks.findings import Findings
from r3.config import Config, EvalSet
from r3.data.rows import Columns, Row, RowProblem, columns_of
from r3.data.sources import FILES, ReadsRows, is_near, read_rows

_SHOWN_ROWS = 5  # of a data file with bad rows; the others are counted


def check_data(
    config: Config, found: Findings, sets: Sequence[EvalSet], read: ReadsRows = read_rows
) -> tuple[list[Row], list[Row]]:
    """Check all rows that can be read at once, by `read`.

    Returns:
        Rows of training and rows of the held-out sets.
    """
    data, columns = config.data, columns_of(config)
    training = () if config.eval.only else data.path
    if not data.path and not config.eval.only:
        found.add("data.path", "is empty", FILES, value="")
    if data.weights and len(data.weights) != len(data.path):
        rule = f"has {len(data.weights)} values for the {len(data.path)} paths of data.path"
        fix = "give one per path, or none: rows of all paths then form one pool"
        found.add("data.weights", rule, fix)
    train = [
        row
        for path in dict.fromkeys(training)
        for row in _check_rows(path, columns, found, "data.path", read)
    ]
    # Sets may differ in sampling alone: a path is read once for each way of scoring it.
    held_out = dict.fromkeys((each.path, columns_of(config, each)) for each in sets)
    if not sets:  # their lists do not fit together; problems of the files are reported all the same
        held_out = dict.fromkeys((path, columns) for path in config.eval.path)
    heldout = [
        row for path, how in held_out for row in _check_rows(path, how, found, "eval.path", read)
    ]
    if (
        training
        and found.sound("data.path", "rollout.prompts_per_step")
        and all(map(is_near, training))
        and len(train) < config.rollout.prompts_per_step
    ):
        rule = (
            f"has {len(train)} rows, and a step takes {config.rollout.prompts_per_step} different "
            "prompts"
        )
        found.add("data.path", rule, "give more rows, or lower rollout.prompts_per_step")
    _check_gym(config, found, training, sets)
    return train, heldout


def _check_gym(
    config: Config, found: Findings, training: Sequence[str], sets: Sequence[EvalSet]
) -> None:
    """The reward gym scores tasks of reasoning-gym and nothing else."""
    functions = config.reward.function
    scored = [("reward.function", functions, training)]
    scored += [
        ("eval.function", (each.function,) if each.function else functions, (each.path,))
        for each in sets
    ]
    for name, used, paths in scored:
        others = [path for path in paths if not path.startswith("gym:")]
        if "gym" in used and others:
            rule = f"gym scores only tasks of reasoning-gym, and {others[0]} is none"
            fix = "use another function, or paths such as gym:chain_sum"
            found.add(name, rule, fix, value="gym")


def _check_rows(
    path: str, columns: Columns, found: Findings, name: str, read: ReadsRows
) -> list[Row]:
    if not is_near(path):
        return []
    rows, bad = read(path, columns)
    common = _faults_of_every_row(bad) if not rows else []
    for problem, count in common:
        # One wrong setting, such as the name of a column, not thousands of wrong rows.
        found.add(
            name,
            f"{problem.rule}; so it is in all {count} rows",
            problem.fix,
            value=f"{path}:{problem.field}",
        )
        bad = [each for each in bad if (each.field, each.rule) != (problem.field, problem.rule)]
    for problem in bad[:_SHOWN_ROWS]:
        found.add(name, problem.rule, problem.fix, value=problem.where)
    if len(bad) > _SHOWN_ROWS:
        rest = f"{len(bad) - _SHOWN_ROWS} more faults, {len(bad)} in all"
        found.add(name, rest, "correct these rows as well", value=path)
    if not rows and not bad and not common:
        fix = "give a file with rows; for eval.path, '' disables evaluation"
        found.add(name, "has no rows", fix, value=path)
    return rows


def _faults_of_every_row(bad: Sequence[RowProblem]) -> list[tuple[RowProblem, int]]:
    """Faults that all of several rows have, with the number of rows; `bad` is of rows that fail."""
    lines = len({problem.line for problem in bad})
    counts = Counter((problem.field, problem.rule) for problem in bad)
    first = {(problem.field, problem.rule): problem for problem in reversed(bad)}
    return [(first[fault], lines) for fault, count in counts.items() if count == lines > 1]


def overlap(train: list[Row], heldout: list[Row]) -> list[str]:
    """A warning if held-out questions are trained on."""
    row_of = {json.dumps(row.messages, default=str): row for row in train}
    shared = [
        (row, row_of[text])
        for row in heldout
        if (text := json.dumps(row.messages, default=str)) in row_of
    ]
    if not shared:
        return []
    here, there = shared[0]
    count = f"{len(shared)} of {len(heldout)} questions of eval.path are trained on as well"
    same = f"{here.file}:{here.line} is {there.file}:{there.line}"
    return [f"{count}, so the evaluation is too optimistic: {same}"]
