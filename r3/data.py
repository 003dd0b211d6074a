"""JSONL rows -> `Prompt`, checked and tokenised once; the order of prompts as a pure function of (seed, step)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from jinja2 import TemplateError

from r3.types import Message, Prompt

_MAX_NAMED = 10


class Tokenizer(Protocol):
    """What is needed of a Hugging Face tokenizer."""

    chat_template: Any

    def apply_chat_template(self, conversation: Any, /, **options: Any) -> Any:
        """Render and tokenise a conversation."""


@dataclass(frozen=True, kw_only=True)
class RowProblem:
    """One thing that is wrong with a data set: where (line 0: the whole file), which rule, how to mend it."""

    file: str
    line: int
    field: str
    rule: str
    fix: str

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.line else self.file
        return f"{where}: {self.field}: {self.rule}. Fix: {self.fix}"


class DataError(ValueError):
    """Everything that is wrong with a data set; the message names the first ten problems and counts them all."""

    def __init__(self, problems: list[RowProblem]) -> None:
        self.problems = tuple(problems)
        lines = [f"data: {len(problems)} problem{'s' if len(problems) != 1 else ''}"]
        lines += [f"  - {problem}" for problem in problems[:_MAX_NAMED]]
        if len(problems) > _MAX_NAMED:
            lines.append(f"  ... and {len(problems) - _MAX_NAMED} more")
        super().__init__("\n".join(lines))


@dataclass(frozen=True)
class Dataset:
    """Prompts in the order of the file, and how many were left out as too long."""

    prompts: tuple[Prompt, ...]
    dropped_too_long: int

    def __len__(self) -> int:
        return len(self.prompts)


def load_prompts(
    path: str | Path,
    tokenizer: Tokenizer,
    *,
    prompt_key: str,
    answer_key: str,
    system_prompt: str,
    max_prompt_tokens: int,
    on_too_long: Literal["error", "drop"],
) -> Dataset:
    """Read, check and tokenise every row; all bad rows are reported at once, as one `DataError`.

    Columns other than the two named ones travel in `Prompt.metadata`. Blank lines are skipped; ids count them.
    """
    path = Path(path)
    reader = _Reader(path.name, tokenizer, prompt_key, answer_key, system_prompt)
    if not tokenizer.chat_template:
        fix = "use a model folder with chat_template.jinja"
        raise DataError([reader.problem(0, "tokenizer", "has no chat template", fix)])
    try:
        content = path.read_bytes()
    except OSError as error:
        rule = f"{path} cannot be read ({error.strerror})"
        raise DataError([reader.problem(0, "file", rule, "give the path of a JSONL file")]) from error

    prompts: list[Prompt] = []
    problems: list[RowProblem] = []
    dropped = 0
    for line, raw in enumerate(content.split(b"\n"), 1):
        if not raw.strip():
            continue
        found = reader.read(line, raw)
        if isinstance(found, RowProblem):
            problems.append(found)
        elif len(found.tokens_T) <= max_prompt_tokens:
            prompts.append(found)
        elif on_too_long == "drop":
            dropped += 1
        else:
            rule = f"has {len(found.tokens_T)} tokens with its chat template, at most {max_prompt_tokens} fit"
            problems.append(reader.problem(line, prompt_key, rule, "shorten it, or data.on_too_long = drop"))
    if not prompts and not problems:
        rule = f"all {dropped} rows are longer than {max_prompt_tokens} tokens" if dropped else "holds no row"
        problems.append(reader.problem(0, "file", rule, "give a file with rows that fit"))
    if problems:
        raise DataError(problems)
    return Dataset(prompts=tuple(prompts), dropped_too_long=dropped)


def prompts_of_step(dataset: Dataset, *, seed: int, step: int, count: int) -> list[Prompt]:
    """The prompts of a step: a pure function, so that resuming needs nothing but the step's number.

    Every epoch is a permutation seeded by (seed, epoch); step s takes places s * count .. (s + 1) * count - 1 of the
    epochs laid end to end, so nothing repeats inside an epoch, and a step may begin in one epoch and end in the next.
    """
    if not len(dataset):
        raise ValueError("the data set holds no prompt")
    prompts: list[Prompt] = []
    place = step * count
    while len(prompts) < count:
        epoch, start = divmod(place + len(prompts), len(dataset))
        order = np.random.default_rng([seed, epoch]).permutation(len(dataset))
        prompts += [dataset.prompts[index] for index in order[start : start + count - len(prompts)]]
    return prompts


@dataclass(frozen=True)
class _Reader:
    """Turns one line into a prompt, or says what is wrong with it."""

    file: str
    tokenizer: Tokenizer
    prompt_key: str
    answer_key: str
    system_prompt: str

    def problem(self, line: int, field: str, rule: str, fix: str) -> RowProblem:
        return RowProblem(file=self.file, line=line, field=field, rule=rule, fix=fix)

    def read(self, line: int, raw: bytes) -> Prompt | RowProblem:
        try:
            row = json.loads(raw)
        except UnicodeDecodeError as error:
            return self.problem(line, "row", f"is not UTF-8 at byte {error.start}", "save the file as UTF-8")
        except json.JSONDecodeError as error:
            rule = f"is not JSON at column {error.colno} ({error.msg})"
            return self.problem(line, "row", rule, "write one JSON object a line")
        if not isinstance(row, dict):
            rule = f"is a {type(row).__name__}, not an object"
            return self.problem(line, "row", rule, "write one JSON object a line")
        for key, setting in ((self.prompt_key, "data.prompt_key"), (self.answer_key, "data.answer_key")):
            if key not in row:
                rule = f"is missing; the row has {', '.join(row) or 'no column'}"
                return self.problem(line, key, rule, f"mend the row, or set {setting}")
        if not isinstance(row[self.answer_key], str):
            rule = f"is a {type(row[self.answer_key]).__name__}, not a string"
            return self.problem(line, self.answer_key, rule, "put the answer in quotes")
        messages = self._messages(row[self.prompt_key])
        if isinstance(messages, str):
            fix = 'write a string, or a list of {"role": ..., "content": ...}'
            return self.problem(line, self.prompt_key, messages, fix)
        if self.system_prompt:
            if messages[0]["role"] == "system":
                rule = "begins with a system message while data.system_prompt is set"
                return self.problem(line, self.prompt_key, rule, "keep one of the two")
            messages = ({"role": "system", "content": self.system_prompt}, *messages)
        try:
            tokens = self.tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=True, return_dict=True
            )["input_ids"]
        except TemplateError as error:
            rule = f"is refused by the model's chat template ({error})"
            return self.problem(line, self.prompt_key, rule, "use roles in the order the template takes")
        named = (self.prompt_key, self.answer_key)
        return Prompt(
            id=f"{self.file}:{line}",
            messages=messages,
            tokens_T=tuple(tokens),
            answer=row[self.answer_key],
            metadata={key: value for key, value in row.items() if key not in named},
        )

    def _messages(self, value: Any) -> tuple[Message, ...] | str:
        """The conversation so far, or the rule that the value breaks."""
        if isinstance(value, str):
            return ({"role": "user", "content": value},) if value.strip() else "is empty"
        if not isinstance(value, list):
            return f"is a {type(value).__name__}, neither a string nor a list of messages"
        if not value:
            return "is an empty list of messages"
        for index, message in enumerate(value):
            if not isinstance(message, Mapping):
                return f"message {index} is a {type(message).__name__}, not an object"
            for key in ("role", "content"):
                if not isinstance(message.get(key), str):
                    return f"message {index} has no {key!r} that is a string"
        return tuple(value)
