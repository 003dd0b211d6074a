"""The checks of one row of a data set: prompt, answers, verifier and tools."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from r3.config import Config, EvalSet
from r3.config.arguments import kind_of
from r3.data.conversation import half_character, is_learned, read_messages, read_tools, sense_of
from r3.data.numbers import final_number
from r3.errors import Fault, Problem

if TYPE_CHECKING:  # it imports numpy
    from r3.types import Message

GRADERS = ("gsm8k", "exact", "math")  # compare a response with the reference answer
_READ = ("verifier", "gym", "entry")  # columns that built-in rewards read beside the answer


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The columns that are read from a row. A key with dots reaches into nested objects.

    Attributes:
        prompt: column of the question or the chat so far.
        answer: column of the reference answer; "" = rows have none.
        tools: column of the tools' schemas; "" = rows have none.
        system_prompt: put before every chat that has no system message of its own.
        graded_by: functions that compare with the answer, which must not be empty.
        compared: columns in which duplicates are equal too, because a reward reads them; None =
            all, because users' code may read any.
        verifiers: what a row's column `verifier` may name; () = rows need no such column.
        supervised: rows are learned: each needs an answer or an assistant message.
        continued: the policy continues an assistant message that ends a conversation.
        section: of the settings that name these columns, for messages.
        first: only this many rows of a source are read, from its beginning; 0 = all.
    """

    prompt: str = "question"
    answer: str = "answer"
    tools: str = ""
    system_prompt: str = ""
    graded_by: tuple[str, ...] = ()
    compared: tuple[str, ...] | None = ()
    verifiers: tuple[str, ...] = ()
    supervised: bool = False
    continued: bool = False
    section: str = "data"
    first: int = 0


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row that passed all checks.

    Attributes:
        file: the source, or the one of its files that has the row.
        line: of a JSONL or CSV file, else a count of rows. From 1.
        number: the line, or a count of the rows of several files: each is there once per source.
        answers: the accepted answers, at least one; "" if the row has none.
        columns: all other columns.
    """

    file: str
    line: int
    number: int
    messages: tuple[Message, ...]
    answers: tuple[str, ...]
    tools: tuple[Mapping[str, Any], ...]
    columns: Mapping[str, Any]


class RowProblem(Problem):
    """One problem of a data set.

    Attributes:
        file: the source, or one of its files.
        line: number of the row; 0 is the whole source.
        column: of the row; "row" is all of it, "file" the file.
    """

    def __init__(self, file: str, line: int, column: str, rule: str, fix: str) -> None:
        self.file, self.line, self.column = file, line, column
        self._where = f"{file}:{line}" if line else file
        super().__init__(place=f"{self._where}: {column}", rule=rule, fix=fix)

    @property
    def where(self) -> str:
        """`rows.jsonl:7:answer`, or the parts of it that exist."""
        return self._where if self.column in ("file", "row") else f"{self._where}:{self.column}"


def columns_of(config: Config, eval_set: EvalSet | None = None) -> Columns:
    """Return the columns that a run reads from training rows, or from those of a held-out set."""
    data, env, functions = config.data, config.env, config.reward.function
    if eval_set is not None:
        data, env = eval_set.data(data), eval_set.environment(env)
        functions = eval_set.functions(config.reward)
    supervised = eval_set is None and config.learns_rows
    # Other environments may reward every conversation themselves.
    scores = "env" in functions or not env.may_reward
    scores = scores and not supervised
    used = (*functions, *(config.reward.row_functions if "row" in functions else ()))
    users = not env.is_built_in or any(":" in function for function in used)
    return Columns(
        prompt=data.prompt_key,
        answer=data.answer_key,
        tools=data.tools_key,
        system_prompt=data.system_prompt,
        graded_by=tuple(name for name in GRADERS if scores and name in functions),
        compared=None if users and not supervised else _READ,
        verifiers=tuple(spec.rpartition(":")[2] for spec in config.reward.row_functions)
        if scores and "row" in functions
        else (),
        supervised=supervised,
        continued=data.continue_final_message,
        section="eval" if eval_set else "data",
        first=eval_set.max_prompts if eval_set else 0,
    )


_Faults = list[tuple[str, str, str]]  # column, rule and fix of what is wrong with one row


def check_row(
    file: str, line: int, number: int, content: Any, columns: Columns
) -> Row | list[RowProblem]:
    """Return the row, or all its problems.

    Args:
        file, line, number: of the row, see `Row`.
        content: the bytes of a line of JSON, or an object.
        columns: what is read from it.
    """
    faults: _Faults = []
    filled = not isinstance(content, bytes)  # tables have every key in every row
    try:
        row = _object(content)
    except Fault as error:
        return [RowProblem(file, line, "row", error.rule, error.fix)]
    column, rule = sense_of(row)
    if column:
        fix = "leave these rows out, or the column if the text is complete without it"
        faults.append((column, rule, fix))
    messages = _messages(row, columns, faults, filled=filled)
    answers = _accepted(row, columns, faults)
    if columns.supervised and not faults:
        _check_learned(messages, answers, columns, faults)
    if columns.verifiers:
        _check_verifier(row, answers, columns, faults)
    tools: tuple[Mapping[str, Any], ...] = ()
    if columns.tools and (declared := _look_up(row, columns.tools)) is not _ABSENT:
        try:
            tools = read_tools(declared, filled=filled)
        except Fault as error:
            faults.append((columns.tools, error.rule, error.fix))
    if faults:
        return [RowProblem(file, line, *fault) for fault in faults]
    named = (columns.prompt, columns.answer)
    return Row(
        file=file,
        line=line,
        number=number,
        messages=messages,
        answers=answers,
        tools=tools,
        columns={key: value for key, value in row.items() if key not in named},
    )


def _object(content: Any) -> Mapping[str, Any]:
    """Return a row as an object.

    Raises:
        Fault: it is none.
    """
    per_line = "write one JSON object per line"
    try:
        content = strict_json(content) if isinstance(content, bytes) else content
        half = half_character(json.dumps(content, ensure_ascii=False, default=str))
    except Fault:
        raise
    except UnicodeDecodeError as error:
        rule, fix = f"is not UTF-8 at byte {error.start}", "save the file as UTF-8"
    except json.JSONDecodeError as error:
        rule, fix = f"is not JSON at column {error.colno} ({error.msg})", per_line
    except RecursionError:
        rule, fix = "is nested too deeply", "flatten the object"
    except ValueError as error:  # Python reads integers of at most 4300 digits
        rule, fix = f"cannot be read ({error})", "write very long numbers as strings"
    else:
        if isinstance(content, Mapping) and not half:
            return content
        rule, fix = f"is {kind_of(content)}, not an object", per_line
        if half:
            rule = f"holds {half!r}, half of a character (a lone UTF-16 surrogate)"
            fix = "write the whole character, or leave it out"
    raise Fault(rule, fix)


def strict_json(content: bytes) -> Any:
    """Read JSON.

    Raises:
        Fault: an object has a key twice.
        ValueError, RecursionError: it is no JSON, or nested too deeply.
    """
    return json.loads(content, object_pairs_hook=_once)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        rule = f"has an object with two keys {twice!r}"
        raise Fault(rule, "remove one: one of the values would be lost")
    return mapping


def _missing(row: Mapping[str, Any], key: str) -> str:
    known = f"is missing; the row has {', '.join(row) or 'no column'}"
    outer = key.rpartition(".")[0]
    inside = _look_up(row, outer)
    if outer and isinstance(inside, Mapping):  # where the last part of the key was looked for
        known += f"; {outer} has {', '.join(map(str, inside)) or 'nothing'}"
    return known


def _messages(
    row: Mapping[str, Any], columns: Columns, faults: _Faults, *, filled: bool
) -> tuple[Message, ...]:
    """Return the prompt of a row, with the system prompt of the settings; () with a fault."""
    prompt = _look_up(row, columns.prompt)
    if prompt is _ABSENT:
        another = f"add the column, or name another with --{columns.section}.prompt_key"
        faults.append((columns.prompt, _missing(row, columns.prompt), another))
        return ()
    try:
        messages = read_messages(prompt, filled=filled)
    except Fault as error:
        faults.append((columns.prompt, error.rule, error.fix))
        return ()
    if columns.system_prompt and messages[0]["role"] == "system":
        rule = f"begins with a system message while {columns.section}.system_prompt is set"
        fix = "keep one of the two"
        if columns.section == "eval":
            rule = rule.replace("eval.", "eval.system_prompt or data.")
            fix += "; --eval.system_prompt none removes it for a set"
        faults.append((columns.prompt, rule, fix))
    elif columns.system_prompt:
        messages = ({"role": "system", "content": columns.system_prompt}, *messages)
    last = messages[-1]
    if last["role"] == "assistant" and not columns.supervised:
        if not columns.continued:
            rule = "ends with an assistant message, after which the policy would begin another"
            fix = "leave it out, or --data.continue_final_message true continues it"
            faults.append((columns.prompt, rule, fix))
        elif not last["content"] or last.keys() - {"role", "content"}:
            rule = "ends with an assistant message that is more than a text, or empty"
            fix = "only the content of a message can be continued"
            faults.append((columns.prompt, rule, fix))
    return messages


def _accepted(row: Mapping[str, Any], columns: Columns, faults: _Faults) -> tuple[str, ...]:
    """Return the accepted answers of a row, compared with what its reward reads."""
    answer = _look_up(row, columns.answer) if columns.answer else ""
    if answer is _ABSENT:
        another = f"add the column, or name another with --{columns.section}.answer_key"
        faults.append((columns.answer, _missing(row, columns.answer), another))
        return ()
    texts = _answers(answer)
    if isinstance(texts, str):
        faults.append((columns.answer, texts, _ANSWER_FIX))
        return ()
    if columns.supervised and len(texts) > 1:
        rule = f"is a list of {len(texts)} answers, and one is learned"
        faults.append((columns.answer, rule, "give one"))
        return ()
    if rule := _ungraded(texts, {reward: f"the reward {reward}" for reward in columns.graded_by}):
        fix = "correct the row"
        if not columns.answer:
            rule = f"has no answer: {columns.section}.answer_key {rule}"
            fix = f"name the column of answers with --{columns.section}.answer_key"
        faults.append((columns.answer or "row", rule, f"{fix}, or use another --reward.function"))
    return texts


def _ungraded(texts: Sequence[str], graders: Mapping[str, str]) -> str:
    """Why built-in functions cannot compare responses with the answers of a row; "" if they can.

    Args:
        graders: the functions, and what messages call them.
    """
    for text in texts:
        for name, called in graders.items():
            if not text.strip():
                return f"is empty, and {called} compares responses with it"
            if name == "gsm8k" and "####" not in text:
                return f"has no '####'; {called} reads the number after it"
            if name == "gsm8k" and final_number(text) is None:
                return f"has no plain number after '####', which {called} reads"
    return ""


def _check_learned(
    messages: Sequence[Message], answers: Sequence[str], columns: Columns, faults: _Faults
) -> None:
    """A supervised row has something to learn, and only once."""
    if columns.answer and not answers[0].strip():
        faults.append(
            (columns.answer, "is empty, so there is nothing to learn", "leave the row out")
        )
    elif columns.answer and messages[-1]["role"] == "assistant":
        rule = f"ends with an assistant message, and the column {columns.answer} is another one"
        faults.append((columns.prompt, rule, "--data.answer_key '' learns the messages alone"))
    elif not columns.answer and not any(map(is_learned, messages)):
        rule = "has no assistant message to learn"
        fix = "add one, or name the column of the answer with --data.answer_key"
        faults.append((columns.prompt, rule, fix))


def _check_verifier(
    row: Mapping[str, Any], answers: Sequence[str], columns: Columns, faults: _Faults
) -> None:
    """The verifier that a row names exists, and can read its answers."""
    verifier = verifier_of(row)
    if verifier not in columns.verifiers:
        rule = f"is {verifier!r}; the reward row accepts {', '.join(columns.verifiers)}"
        fix = "name one of them in each row, or add it to --reward.row_functions"
        faults.append(("verifier", rule, fix))
    elif verifier == "gym" and "gym" not in row:
        rule = "is gym, but the row is not from reasoning-gym"
        faults.append(("verifier", rule, "name gsm8k or exact"))
    elif verifier in GRADERS and (
        rule := _ungraded(answers, {str(verifier): f"the verifier {verifier}"})
    ):
        faults.append((columns.answer, rule, "correct the row"))


_LAST_WHOLE = 2**53  # beyond it, not every whole number is a float
_ANSWER_FIX = (
    "write a text, a number, true or false, or a list of accepted answers, or leave the row out"
)


def _answers(value: Any) -> tuple[str, ...] | str:
    """Return the accepted answers of a row as texts, or the rule that the value breaks."""
    if isinstance(value, list | tuple):
        if not value:
            return "is an empty list"
        answers = [_answers(entry) for entry in value]
        texts = [entry[0] for entry in answers if not isinstance(entry, str) and len(entry) == 1]
        nested = any(isinstance(entry, list | tuple) for entry in value)
        if nested or len(texts) < len(value):
            return "is a list with entries that are no texts or numbers"
        return tuple(dict.fromkeys(texts))
    if isinstance(value, str):
        return (value,)
    if isinstance(value, float) and not math.isfinite(value):
        return f"is {value}, which is no number"
    if isinstance(value, float) and value.is_integer():  # 20.0 in tables with gaps
        if abs(value) > _LAST_WHOLE:
            return f"is {value}, a floating-point number that may have lost its last digits"
        return (str(int(value)),)
    if isinstance(value, float):
        return (_shortest(value),)
    if isinstance(value, bool | int | Decimal):
        return (str(value),)
    if value is None:
        return "is null: the row has no reference answer"
    return f"is {kind_of(value)}, not a text"


def _shortest(value: float) -> str:
    """The shortest text of a number, also of one that a table had in single precision: 0.1."""
    for digits in range(1, 10):  # nine are enough for every number of single precision
        text = str(float(f"{value:.{digits}g}"))
        if struct.unpack("f", struct.pack("f", float(text)))[0] == value:
            return text
    return str(value)


def verifier_of(columns: Mapping[str, Any]) -> object:
    """Return the verifier that a row names; "gym" for rows of reasoning-gym."""
    return columns.get("verifier", "gym" if "gym" in columns else None)


_ABSENT = object()


def _look_up(row: Mapping[str, Any], key: str) -> Any:
    """Return `row[key]`; a key with dots that is not a column reaches into nested objects."""
    if key in row:
        return row[key]
    value: Any = row
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return _ABSENT
        value = value[part]
    return value
