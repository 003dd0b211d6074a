"""Prompts: rows, filtered and tokenised once, in an order that depends only on seed and step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from r3 import extras
from r3.config import Config
from r3.data.rendering import EndlessTemplate, TemplateFault
from r3.data.rows import Columns, Row, RowProblem
from r3.data.sources import ReadsRows, read_rows
from r3.data.template import Renderer
from r3.errors import ConfigError
from r3.types import Prompt

_BATCH = 64  # rows that the tokenizer gets at once


class DataError(ConfigError):
    """All problems of a data set."""

    subject, shown = "data", 10


@dataclass(frozen=True)
class Dataset:
    """Prompts in the order of the sources.

    Attributes:
        prompts: those of all sources.
        dropped_too_long: rows dropped because of `max_prompt_tokens`.
        dropped_duplicates: rows dropped as duplicates.
        duplicates: ids of prompts that repeat an earlier one, which was kept, with its id.
        read: number of prompts per source, by its label.
        weights: share of each source in what is drawn; none: all prompts are one pool.
    """

    prompts: tuple[Prompt, ...]
    dropped_too_long: int = 0
    dropped_duplicates: int = 0
    duplicates: tuple[tuple[str, str], ...] = ()
    weights: tuple[float, ...] = ()
    read: tuple[tuple[str, int], ...] = ()

    def __len__(self) -> int:
        return len(self.prompts)


def load_prompts(
    sources: str | Path | Sequence[str],
    tokenizer: Any,
    *,
    columns: Columns,
    max_prompt_tokens: int,
    on_too_long: Literal["error", "drop"] = "error",
    drop_duplicates: bool = False,
    weights: Sequence[float] = (),
    own: Mapping[str, tuple[Columns, Sequence[Mapping[str, Any]]]] = MappingProxyType({}),
    tools: Sequence[Mapping[str, Any]] = (),
    template_kwargs: Mapping[str, Any] = MappingProxyType({}),
    allow_control_tokens: bool = False,
    read: ReadsRows | None = None,
) -> Dataset:
    """Read, check and tokenise all rows.

    With `columns.supervised` the tokens are those of the whole conversation, up to the end of its
    last assistant message, and `Prompt.spans` has the assistant messages. Columns other than
    question and answer become `Prompt.metadata`. A duplicate has the tokens, the answer and the
    `columns.compared` of an earlier row.

    Args:
        sources: one or several, as in `r3.data.sources`.
        columns: what is read from a row.
        max_prompt_tokens: maximum tokens per prompt or supervised conversation, chat template
            included.
        on_too_long: what to do with a longer prompt.
        weights: share of each source in what is drawn. Empty: all prompts are one pool.
        tools: tool schemas that the chat template shows for rows without tools of their own.
        own: by the label of a source, its columns and tools in place of these.
        template_kwargs: further variables of the chat template.
        allow_control_tokens: whether control tokens in rows are meant as such.
        read: reads rows; None: anew.

    Raises:
        DataError: rows cannot be used; names all of them.
    """
    sources = [str(sources)] if isinstance(sources, str | Path) else list(sources)
    renderer = Renderer(tokenizer, template_kwargs, control_tokens=allow_control_tokens)
    finder = extras.span_finder(renderer, sources[0]) if columns.supervised else None
    prompts: list[Prompt] = []
    problems: list[RowProblem] = []
    sizes: list[int] = []
    seen: dict[tuple[Any, ...], str] = {}
    repeated: list[tuple[str, str]] = []
    all_long = 0
    for source, label in zip(sources, source_labels(sources), strict=True):
        columns, tools = own.get(label, (columns, tools))
        rows, of_rows = (read or read_rows)(source, columns)
        bad = list(of_rows)
        good: list[Prompt] = []
        long: list[tuple[int, Row]] = []
        twice = 0
        rendered = _prompts(rows, label, renderer, columns, tools, finder)
        for row, prompt in zip(rows, rendered, strict=True):
            if isinstance(prompt, RowProblem):
                bad.append(prompt)
                continue
            if (tokens := len(prompt.tokens_T)) > max_prompt_tokens:
                long.append((tokens, row))
                continue
            first = seen.setdefault(_compared(prompt, columns), prompt.id)
            if first != prompt.id:
                twice += 1
                repeated.append((prompt.id, first))
                if drop_duplicates:
                    continue
            good.append(prompt)
        if long and on_too_long == "error":
            bad.append(_too_long(source, long, len(rows), max_prompt_tokens, columns))
        if not good and not bad:
            rule = "has no rows"
            if rows:
                counts = f"{len(long)} exceed {max_prompt_tokens} tokens, {twice} are duplicates"
                rule = f"no row of {len(rows)} remains: {counts}"
            bad.append(RowProblem(source, 0, "file", rule, "give a source with usable rows"))
        prompts += good
        problems += bad
        sizes.append(len(good))
        all_long += len(long)
    if problems:
        raise DataError(problems)
    return Dataset(
        prompts=tuple(prompts),
        dropped_too_long=all_long,
        dropped_duplicates=len(repeated) if drop_duplicates else 0,
        duplicates=() if drop_duplicates else tuple(repeated),
        weights=tuple(weights),
        read=tuple(zip(source_labels(sources), sizes, strict=True)),
    )


def _too_long(
    source: str, long: Sequence[tuple[int, Row]], rows: int, limit: int, columns: Columns
) -> RowProblem:
    """All rows of a source that are too long, as one problem."""
    tokens, row = max(long, key=lambda entry: entry[0])
    rule = (
        f"{len(long)} of {rows} row{'s' * (rows > 1)} {'are' if len(long) > 1 else 'is'} longer "
        f"than {limit} tokens with the chat template; the longest has {tokens} "
        f"({row.file}:{row.line})"
    )
    fix = "--data.on_too_long drop, or shorten them"
    if columns.section == "eval":  # no question is left out without a word
        fix = "shorten them, lower --eval.max_tokens, or leave the rows out yourself"
    elif not columns.supervised:
        fix += ", or give them more room (data.max_prompt_tokens, or shorter responses)"
    return RowProblem(source, 0, columns.prompt, rule, fix)


def _compared(prompt: Prompt, columns: Columns) -> tuple[Any, ...]:
    """What duplicates have in common."""
    names = prompt.metadata if columns.compared is None else columns.compared
    read = {name: prompt.metadata[name] for name in sorted(names) if name in prompt.metadata}
    return prompt.tokens_T, prompt.accepted, repr(read)


def prompts_from(dataset: Dataset, *, seed: int, start: int, count: int) -> list[Prompt]:
    """Return the prompts at places start to start + count - 1: a function of its arguments alone.

    Every epoch is a permutation seeded by (seed, epoch), and places go through the epochs, one
    after the other: nothing repeats inside an epoch, and a step may begin in one epoch and end in
    the next. With weights every source has its own epochs, and a place takes the next prompt of the
    source whose turn it is.

    Raises:
        ValueError: the data set is empty.
    """
    if not len(dataset):
        raise ValueError("the data set has no prompt")
    if not dataset.weights:
        return draw(dataset.prompts, [seed], start, start + count)
    sizes = [size for _, size in dataset.read]
    ends = np.cumsum(sizes)
    taken = [turns(dataset.weights, start + i) for i in range(count + 1)]
    drawn = [
        draw(dataset.prompts[end - size : end], [seed, index], taken[0][index], taken[-1][index])
        for index, (size, end) in enumerate(zip(sizes, ends, strict=True))
    ]
    order = [
        next(i for i in range(len(ends)) if after[i] > before[i])
        for before, after in pairwise(taken)
    ]
    streams = [iter(prompts) for prompts in drawn]
    return [next(streams[index]) for index in order]


def run_prompts(dataset: Dataset, config: Config, start: int, count: int) -> list[Prompt]:
    """Return the prompts, or rows to learn, at places of a run's order; see `prompts_from`."""
    return prompts_from(dataset, seed=config.train.seed, start=start, count=count)


def step_prompts(dataset: Dataset, config: Config, step: int) -> list[Prompt]:
    """Return those of a step of a run; its first step is 1."""
    count = config.rollout.prompts_per_step
    return run_prompts(dataset, config, (step - 1) * count, count)


def turns(weights: Sequence[float], places: int) -> list[int]:
    """Return how many of the first `places` places belong to each source, exactly.

    The first source takes floor(places * share); the others share the rest in the same way. From
    place to place one count grows by 1. Each count differs from places * share by less than the
    number of sources.
    """
    exact = [Fraction(weight) for weight in weights]
    counts = []
    for index, weight in enumerate(exact):
        counts.append(
            int(places * weight / sum(exact[index:])) if index < len(exact) - 1 else places
        )
        places -= counts[-1]
    return counts


def draw(prompts: Sequence[Prompt], seed: list[int], start: int, stop: int) -> list[Prompt]:
    """Return places start to stop - 1 of the epochs of a pool.

    Args:
        seed: of the run, and the number of the source if sources have weights.
    """
    drawn: list[Prompt] = []
    while start + len(drawn) < stop:
        epoch, place = divmod(start + len(drawn), len(prompts))
        order = np.random.default_rng([seed[0], epoch, *seed[1:]]).permutation(len(prompts))
        drawn += [prompts[index] for index in order[place : place + stop - start - len(drawn)]]
    return drawn


def _prompts(
    rows: Sequence[Row],
    label: str,
    renderer: Renderer,
    columns: Columns,
    tools: Sequence[Mapping[str, Any]],
    finder: Any,
) -> Iterator[Prompt | RowProblem]:
    """Render and tokenise rows."""
    ids: dict[int, int] = {}  # one object per id: a list of the tokenizer has one per token

    def text_of(row: Row) -> str:
        continued = row.messages[-1]["role"] == "assistant"
        rendered = renderer.rendered(row.messages, row.tools or tools, opening=not continued)
        # What the template closes a message with that the policy continues is left out.
        return rendered.text[: rendered.end_of(len(row.messages) - 1) if continued else None]

    for start in range(0, len(rows), _BATCH):
        batch = rows[start : start + _BATCH]
        contents: list[Any] = []  # a text, tokens and their spans, or a problem
        for row in batch:
            try:
                if finder is None:
                    contents.append(text_of(row))
                else:
                    contents.append(finder.find(row.messages, row.answers[0], row.tools or tools))
            except TemplateFault as error:
                rule = f"is refused by the model's chat template ({error})"
                fix = "use roles in the order the template takes, or correct the template"
                if error.fix:
                    rule, fix = f"does not reach the model as it is: {error}", error.fix
                contents.append(RowProblem(row.file, row.line, columns.prompt, rule, fix))
                if isinstance(error, EndlessTemplate):  # all other rows would take as long
                    raise DataError([contents[-1]]) from None
        tokenised = iter(renderer.batch([entry for entry in contents if isinstance(entry, str)]))
        for row, entry in zip(batch, contents, strict=True):
            if isinstance(entry, RowProblem):
                yield entry
                continue
            tokens, spans = (next(tokenised), ()) if isinstance(entry, str) else entry
            yield Prompt(
                id=f"{label}:{row.number}",
                messages=row.messages,
                tokens_T=tuple(map(ids.setdefault, tokens, tokens)),
                answer=row.answers[0],
                answers=row.answers,
                metadata=row.columns,
                spans=tuple(spans),
                tools=tuple(row.tools or tools),
            )


def source_labels(sources: Sequence[str]) -> list[str]:
    """Name the sources in prompt ids: by file name, or by full path where file names are equal.

    A source that is named twice is counted: rows.jsonl, rows.jsonl#2.
    """
    names = [
        source if source.startswith(("hub:", "gym:")) else Path(source).name for source in sources
    ]
    labels = [
        source if names.count(name) > sources.count(source) else name
        for source, name in zip(sources, names, strict=True)
    ]
    return [
        f"{label}#{count}" if (count := labels[: place + 1].count(label)) > 1 else label
        for place, label in enumerate(labels)
    ]
