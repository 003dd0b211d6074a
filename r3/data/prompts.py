"""Rows -> `Prompt`, filtered and tokenised once; the order of prompts as a pure function of (seed, step)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from jinja2 import TemplateError

from r3.data.sources import Columns, Row, RowProblem, read_rows
from r3.types import Prompt

_MAX_NAMED = 10


class Tokenizer(Protocol):
    """What is needed of a Hugging Face tokenizer."""

    chat_template: Any

    def apply_chat_template(self, conversation: Any, /, **options: Any) -> Any:
        """Render and tokenise a conversation."""


class DataError(ValueError):
    """Everything that is wrong with a data set; the message names the first ten problems and counts them all."""

    def __init__(self, problems: Sequence[RowProblem]) -> None:
        self.problems = tuple(problems)
        lines = [f"data: {len(problems)} problem{'s' if len(problems) != 1 else ''}"]
        lines += [f"  - {problem}" for problem in problems[:_MAX_NAMED]]
        if len(problems) > _MAX_NAMED:
            lines.append(f"  ... and {len(problems) - _MAX_NAMED} more")
        super().__init__("\n".join(lines))


@dataclass(frozen=True)
class Dataset:
    """Prompts in the order of the sources, and how many were left out.

    With `weights`, one a source, `sizes` says how many of the prompts belong to each; without, all prompts are one pool.
    """

    prompts: tuple[Prompt, ...]
    dropped_too_long: int = 0
    dropped_duplicates: int = 0
    sizes: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()

    def __len__(self) -> int:
        return len(self.prompts)


def load_prompts(
    sources: str | Path | Sequence[str],
    tokenizer: Tokenizer,
    *,
    columns: Columns,
    max_prompt_tokens: int,
    on_too_long: Literal["error", "drop"] = "error",
    drop_duplicates: bool = False,
    weights: Sequence[float] = (),
    tools: Sequence[Mapping[str, Any]] = (),
) -> Dataset:
    """Read, check and tokenise every row; all bad rows are reported at once, as one `DataError`.

    Columns other than question and answer travel in `Prompt.metadata`. A duplicate is a conversation that tokenises like an
    earlier one and has the same answer.

    Args:
        sources: what `r3.data.sources` reads, one or several.
        weights: share of each source in what is drawn; empty = in proportion to their sizes.
        tools: schemas of tools that the chat template shows where a row brings none of its own.
    """
    sources = [str(sources)] if isinstance(sources, str | Path) else list(sources)
    if not tokenizer.chat_template:
        fix = "use a model folder with chat_template.jinja"
        raise DataError([_whole(sources[0], "has no chat template", fix, field="tokenizer")])
    prompts: list[Prompt] = []
    problems: list[RowProblem] = []
    sizes: list[int] = []
    seen: set[tuple[Any, ...]] = set()
    all_long = all_twice = 0
    for source, label in zip(sources, _labels(sources), strict=True):
        rows, bad = read_rows(source, columns)
        good: list[Prompt] = []
        long = twice = 0
        for row in rows:
            found = _prompt(row, label, tokenizer, columns, tools)
            if isinstance(found, RowProblem):
                bad.append(found)
            elif (tokens := len(found.tokens_T)) > max_prompt_tokens:
                long += 1
                if on_too_long == "error":
                    rule = f"has {tokens} tokens with its chat template, at most {max_prompt_tokens} fit"
                    bad.append(
                        _bad(row, columns.prompt, rule, "shorten it, or --data.on_too_long drop")
                    )
            elif drop_duplicates and (found.tokens_T, found.answer) in seen:
                twice += 1
            else:
                seen.add((found.tokens_T, found.answer))
                good.append(found)
        if not good and not bad:
            why = f"none of {len(rows)} rows is left: {long} exceed {max_prompt_tokens} tokens, {twice} came before"
            bad.append(
                _whole(
                    source, why if rows else "holds no row", "give one with rows that can be used"
                )
            )
        prompts += good
        problems += bad
        sizes.append(len(good))
        all_long, all_twice = all_long + long, all_twice + twice
    if problems:
        raise DataError(problems)
    return Dataset(
        prompts=tuple(prompts),
        dropped_too_long=all_long,
        dropped_duplicates=all_twice,
        sizes=tuple(sizes) if weights else (),
        weights=tuple(weights),
    )


def prompts_of_step(dataset: Dataset, *, seed: int, step: int, count: int) -> list[Prompt]:
    """The prompts of a step: a pure function, so that resuming needs nothing but the step's number.

    Every epoch is a permutation seeded by (seed, epoch); step s takes places s * count .. (s + 1) * count - 1 of the
    epochs laid end to end, so nothing repeats inside an epoch, and a step may begin in one epoch and end in the next.
    With weights every source has epochs of its own, and a place takes the next prompt of the source whose turn it is.
    """
    return prompts_from(dataset, seed=seed, start=step * count, count=count)


def prompts_from(dataset: Dataset, *, seed: int, start: int, count: int) -> list[Prompt]:
    """The prompts at places start .. start + count - 1 of that order."""
    if not len(dataset):
        raise ValueError("the data set holds no prompt")
    if not dataset.weights:
        return _draw(dataset.prompts, [seed], start, start + count)
    ends = np.cumsum(dataset.sizes)
    taken = [turns(dataset.weights, start + i) for i in range(count + 1)]
    drawn = [
        _draw(dataset.prompts[end - size : end], [seed, index], taken[0][index], taken[-1][index])
        for index, (size, end) in enumerate(zip(dataset.sizes, ends, strict=True))
    ]
    order = [
        next(i for i in range(len(ends)) if after[i] > before[i])
        for before, after in pairwise(taken)
    ]
    each = [iter(prompts) for prompts in drawn]
    return [next(each[index]) for index in order]


def turns(weights: Sequence[float], places: int) -> list[int]:
    """How many of the first `places` places belong to each source, exactly and without remembering anything.

    The first source takes floor(places * share); what it leaves is shared by the others in the same way. Each count grows
    by 0 or 1 from place to place, one of them by 1, and stays within the number of sources of places * share.
    """
    exact = [Fraction(weight) for weight in weights]
    counts = []
    for index, weight in enumerate(exact):
        counts.append(
            int(places * weight / sum(exact[index:])) if index < len(exact) - 1 else places
        )
        places -= counts[-1]
    return counts


def _draw(prompts: Sequence[Prompt], seed: list[int], start: int, stop: int) -> list[Prompt]:
    """Places start .. stop - 1 of this pool's epochs laid end to end."""
    drawn: list[Prompt] = []
    while start + len(drawn) < stop:
        epoch, place = divmod(start + len(drawn), len(prompts))
        order = np.random.default_rng([seed[0], epoch, *seed[1:]]).permutation(len(prompts))
        drawn += [prompts[index] for index in order[place : place + stop - start - len(drawn)]]
    return drawn


def _prompt(
    row: Row, label: str, tokenizer: Tokenizer, columns: Columns, tools: Sequence[Mapping[str, Any]]
) -> Prompt | RowProblem:
    offered = list(row.tools or tools)
    try:
        tokens = tokenizer.apply_chat_template(
            list(row.messages),
            tools=offered or None,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
        )["input_ids"]
    except TemplateError as error:
        rule = f"is refused by the model's chat template ({error})"
        return _bad(row, columns.prompt, rule, "use roles in the order the template takes")
    return Prompt(
        id=f"{label}:{row.number}",
        messages=row.messages,
        tokens_T=tuple(tokens),
        answer=row.answer,
        metadata=row.columns,
    )


def _labels(sources: Sequence[str]) -> list[str]:
    """How prompts' ids name the sources: by file name, so that data may move; by all of it where names meet."""
    names = [
        source if source.startswith(("hub:", "gym:")) else Path(source).name for source in sources
    ]
    return [
        source if names.count(name) > 1 else name
        for source, name in zip(sources, names, strict=True)
    ]


def _bad(row: Row, field: str, rule: str, fix: str) -> RowProblem:
    return RowProblem(file=row.source, line=row.number, field=field, rule=rule, fix=fix)


def _whole(source: str, rule: str, fix: str, field: str = "file") -> RowProblem:
    return RowProblem(file=source, line=0, field=field, rule=rule, fix=fix)
