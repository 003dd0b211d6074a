"""Rows of a data set, wherever they lie: read, checked, and every bad one named by source, row, field and rule.

    rows.jsonl                          one JSON object a line (any name that is none of the others)
    rows.parquet                        read by pyarrow
    FOLDER  FOLDER:SPLIT                what `datasets` saved with save_to_disk, or a folder of data files that it reads
    hub:OWNER/NAME[:CONFIG][:SPLIT]     a data set of the Hugging Face hub, downloaded on first use; SPLIT is train if absent
    gym:TASK[,size=N][,seed=N][,SETTING=VALUE]      made by reasoning-gym; 1000 rows of seed 0 if nothing else is said

Both `validate` and `data` read here, so a row is checked in one place. Imports nothing heavy until a source needs it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from r3.config import Config, EvalSet

_GYM_SIZE = 1000


ROW_VERIFIERS = ("gsm8k", "exact", "gym")  # of r3.rewards: those that a row may name as its own


@dataclass(frozen=True, kw_only=True)
class Columns:
    """What is read from a row, and where. A key with dots also reaches into nested objects.

    Attributes:
        prompt: column of the question or the chat so far.
        answer: column of the reference answer; "" = rows have none.
        tools: column of the tools' schemas; "" = rows have none.
        system_prompt: put before every chat that has no system message of its own.
        answer_holds: text that every answer must hold; the reward reads what follows it.
        verifiers: what a row's column `verifier` may name; () = rows need no such column.
    """

    prompt: str = "question"
    answer: str = "answer"
    tools: str = ""
    system_prompt: str = ""
    answer_holds: str = ""
    verifiers: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row without fault. `number` counts from 1: lines of a JSONL file, blank ones included, or rows of anything else.

    `columns` is what else the row has.
    """

    source: str
    number: int
    messages: tuple[Mapping[str, Any], ...]
    answer: str
    tools: tuple[Mapping[str, Any], ...]
    columns: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class RowProblem:
    """One thing that is wrong with a data set: where (line 0: the whole source), which rule, how to mend it."""

    file: str
    line: int
    field: str
    rule: str
    fix: str

    @property
    def where(self) -> str:
        """`rows.jsonl:7:answer`, or as much of it as there is."""
        place = f"{self.file}:{self.line}" if self.line else self.file
        return place if self.field in ("file", "row") else f"{place}:{self.field}"

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        return f"{place}: {self.field}: {self.rule}. Fix: {self.fix}"


class SourceError(ValueError):
    """A source that cannot be read at all."""

    def __init__(self, rule: str, fix: str) -> None:
        self.rule, self.fix = rule, fix
        super().__init__(f"{rule}. Fix: {fix}")


def columns_of(config: Config, each: EvalSet | None = None) -> Columns:
    """What a run reads from the rows of training, or of a held-out set."""
    data, env, functions = config.data, config.env, config.reward.function
    if each is not None:
        env, functions = each.environment(env), (each.function,) if each.function else functions
    # Other environments may reward every conversation themselves.
    scores = "env" in functions or (env.name != "guess_number" and not env.path)
    return Columns(
        prompt=data.prompt_key,
        answer=data.answer_key,
        tools=data.tools_key,
        system_prompt=data.system_prompt,
        answer_holds="####" if scores and "gsm8k" in functions else "",
        verifiers=ROW_VERIFIERS if scores and "row" in functions else (),
    )


def is_folder(source: str) -> bool:
    """Whether a source is FOLDER or FOLDER:SPLIT of a folder that exists."""
    return _folder_and_split(source)[0] is not None


def is_near(source: str) -> bool:
    """Whether reading a source means no more than opening a file: neither download nor generation nor conversion."""
    if source.startswith(("hub:", "gym:")):
        return False
    folder, _ = _folder_and_split(source)
    return folder is None or _is_saved(folder)


def read_rows(source: str, columns: Columns) -> tuple[list[Row], list[RowProblem]]:
    """Every good row of a source, and everything that is wrong with the others (or with the source as a whole)."""
    rows: list[Row] = []
    problems: list[RowProblem] = []
    if source.startswith("gym:"):  # its rows have names of their own
        columns = Columns(system_prompt=columns.system_prompt, answer_holds=columns.answer_holds)
    try:
        for number, content in _open(source):
            found = _check(source, number, content, columns)
            if isinstance(found, Row):
                rows.append(found)
            else:
                problems += found
    except SourceError as error:
        problems.append(
            RowProblem(file=source, line=0, field="file", rule=error.rule, fix=error.fix)
        )
    return rows, problems


def _open(source: str) -> Iterator[tuple[int, Any]]:
    """Numbered contents: objects, or the bytes of a line of JSON."""
    if source.startswith("gym:"):
        return _gym(source)
    if source.startswith("hub:"):
        return _hub(source)
    folder, split = _folder_and_split(source)
    if folder is not None:
        return _saved(folder, split) if _is_saved(folder) else _data_files(folder, split)
    if source.endswith(".parquet"):
        return _parquet(Path(source))
    return _jsonl(Path(source))


def _jsonl(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise SourceError(_unreadable(path, error), "give the path of a JSONL file") from error
    for number, line in enumerate(content.split(b"\n"), 1):
        if line.strip():
            yield number, line


def _parquet(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise SourceError("parquet files need pyarrow", "pip install pyarrow") from None
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=4096):
                for row in batch.to_pylist():
                    yield (number := number + 1), row
    except OSError as error:
        raise SourceError(_unreadable(path, error), "give the path of a parquet file") from error
    except ValueError as error:  # pyarrow's own errors are
        raise SourceError(
            f"is no parquet file ({error})", "write it again, or name it .jsonl"
        ) from error


def _folder_and_split(source: str) -> tuple[Path | None, str]:
    if Path(source).is_dir():
        return Path(source), ""
    folder, colon, split = source.rpartition(":")
    return (Path(folder), split) if colon and Path(folder).is_dir() else (None, "")


def _is_saved(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("state.json", "dataset_dict.json"))


def _saved(folder: Path, split: str) -> Iterator[tuple[int, Any]]:
    datasets = _datasets()
    try:
        found = datasets.load_from_disk(str(folder))
    except (OSError, ValueError, KeyError) as error:
        raise SourceError(f"cannot be read by datasets ({error})", "save it again") from error
    if isinstance(found, datasets.DatasetDict):
        names = ", ".join(found)
        if not split and len(found) > 1:
            raise SourceError(f"has the splits {names}", f"name one: {folder}:{next(iter(found))}")
        if split and split not in found:
            raise SourceError(f"has no split {split!r}", f"one of {names}")
        found = found[split or next(iter(found))]
    elif split:
        raise SourceError(f"has no splits, so none is called {split!r}", f"give {folder}")
    return enumerate(found, 1)


def _data_files(folder: Path, split: str) -> Iterator[tuple[int, Any]]:
    return _load_dataset(
        str(folder), None, split or "train", "give a file, or a folder that datasets can load"
    )


def _hub(source: str) -> Iterator[tuple[int, Any]]:
    name, *more = source.removeprefix("hub:").split(":")
    if name.count("/") > 1 or not name or len(more) > 2 or not all(more):
        raise SourceError("is no name on the hub", "write hub:OWNER/NAME[:CONFIG][:SPLIT]")
    config = more[0] if len(more) == 2 else None
    fix = "look the name up, and whether the hub is within reach (HF_ENDPOINT, HF_HUB_OFFLINE)"
    return _load_dataset(name, config, more[-1] if more else "train", fix)


def _load_dataset(name: str, config: str | None, split: str, fix: str) -> Iterator[tuple[int, Any]]:
    datasets = _datasets()
    try:
        found = datasets.load_dataset(name, config, split=split)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise SourceError(f"cannot be loaded by datasets ({error})", fix) from error
    return enumerate(found, 1)


def _datasets() -> Any:
    try:
        import datasets
    except ImportError:
        raise SourceError(
            "Hugging Face data sets need the package datasets", "pip install datasets"
        ) from None
    return datasets


def gym_settings(source: str) -> tuple[str, dict[str, Any]]:
    """The task and the settings of `gym:TASK,size=N,...`. Values are numbers, true or false, or else text.

    Raises:
        SourceError: a setting without a value.
    """
    task, *settings = source.removeprefix("gym:").split(",")
    values: dict[str, Any] = {"size": _GYM_SIZE, "seed": 0}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not (equals and name and text):
            raise SourceError(f"{setting!r} is no setting", "write gym:TASK,size=1000,seed=0")
        try:
            values[name] = json.loads(text)
        except ValueError:
            values[name] = text
    return task, values


def _gym(source: str) -> Iterator[tuple[int, Any]]:
    try:
        import reasoning_gym
    except ImportError:
        raise SourceError(
            "procedural tasks need reasoning-gym", "pip install reasoning-gym"
        ) from None
    task, settings = gym_settings(source)
    try:
        entries = reasoning_gym.create_dataset(task, **settings)
    except (
        ValueError,
        TypeError,
        AssertionError,
    ) as error:  # an unknown task, an unknown setting, a bad value
        rule = f"is refused by reasoning-gym ({error})"
        raise SourceError(
            rule, "see the names in reasoning_gym.factory.DATASETS, and the task's config"
        ) from error
    # Some tasks have no single answer; their scorer reads the whole entry.
    for index in range(len(entries)):
        entry = entries[index]
        row = {"question": entry["question"], "answer": str(entry["answer"] or "")}
        yield index + 1, {**row, "gym": task, "entry": dict(entry)}


def _check(source: str, number: int, content: Any, columns: Columns) -> Row | list[RowProblem]:
    """The row, or everything that is wrong with it."""
    faults: list[RowProblem] = []

    def fault(field: str, rule: str, fix: str) -> None:
        faults.append(RowProblem(file=source, line=number, field=field, rule=rule, fix=fix))

    if isinstance(content, bytes):
        try:
            content = json.loads(content)
        except UnicodeDecodeError as error:
            fault("row", f"is not UTF-8 at byte {error.start}", "save the file as UTF-8")
            return faults
        except json.JSONDecodeError as error:
            fault(
                "row",
                f"is not JSON at column {error.colno} ({error.msg})",
                "write one JSON object a line",
            )
            return faults
    if not isinstance(content, Mapping):
        fault(
            "row", f"is a {type(content).__name__}, not an object", "write one JSON object a line"
        )
        return faults

    def missing() -> str:
        return f"is missing; the row has {', '.join(content) or 'no column'}"

    prompt: Any = _look_up(content, columns.prompt)
    messages: tuple[Mapping[str, Any], ...] = ()
    if prompt is _ABSENT:
        fault(columns.prompt, missing(), "add the column, or name another with --data.prompt_key")
    elif isinstance(rule := _messages(prompt), str):
        fault(columns.prompt, rule, 'write a string, or a list of {"role": ..., "content": ...}')
    else:
        messages = rule
        if columns.system_prompt and messages[0]["role"] == "system":
            rule = "begins with a system message while data.system_prompt is set"
            fault(columns.prompt, rule, "keep one of the two")
        elif columns.system_prompt:
            messages = ({"role": "system", "content": columns.system_prompt}, *messages)

    answer: Any = _look_up(content, columns.answer) if columns.answer else ""
    if answer is _ABSENT:
        fault(columns.answer, missing(), "add the column, or name another with --data.answer_key")
    elif not isinstance(answer, str):
        fault(
            columns.answer,
            f"is a {type(answer).__name__}, not a string",
            "put the answer in quotes",
        )
    elif columns.answer_holds not in answer:
        rule = f"has no {columns.answer_holds!r}, behind which the reward gsm8k reads the number"
        fault(columns.answer, rule, "mend the row, or give another --reward.function")

    if columns.verifiers:
        verifier = verifier_of(content)
        if verifier not in columns.verifiers:
            rule = f"is {verifier!r}, and the reward row knows {', '.join(columns.verifiers)}"
            fault(
                "verifier", rule, "name one of them in each row, or give another --reward.function"
            )
        elif verifier == "gym" and "gym" not in content:
            fault(
                "verifier", "is gym, and the row is none of reasoning-gym's", "name gsm8k or exact"
            )
        elif verifier == "gsm8k" and isinstance(answer, str) and "####" not in answer:
            fault(
                columns.answer, "has no '####', behind which gsm8k reads the number", "mend the row"
            )

    tools = _tools(_look_up(content, columns.tools)) if columns.tools else ()
    if isinstance(tools, str):
        fault(columns.tools, tools, "write a list of JSON schemas, or leave the column out")
    if faults:
        return faults
    assert not isinstance(tools, str)
    named = (columns.prompt, columns.answer)
    return Row(
        source=source,
        number=number,
        messages=messages,
        answer=answer,
        tools=tools,
        columns={key: value for key, value in content.items() if key not in named},
    )


def verifier_of(columns: Mapping[str, Any]) -> object:
    """The verifier that a row names; those that reasoning-gym made need not."""
    return columns.get("verifier", "gym" if "gym" in columns else None)


_ABSENT = object()


def _look_up(row: Mapping[str, Any], key: str) -> Any:
    """`row[key]`, or for a key with dots what lies inside; a column whose own name has the dots comes first."""
    if key in row:
        return row[key]
    value: Any = row
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return _ABSENT
        value = value[part]
    return value


def _messages(value: Any) -> tuple[Mapping[str, Any], ...] | str:
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


def _tools(value: Any) -> tuple[Mapping[str, Any], ...] | str:
    """The schemas of a row's tools, or the rule that the value breaks. Tables without nesting hold them as JSON text."""
    if value is _ABSENT or value is None:
        return ()
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            return f"is not JSON ({error})"
    if not isinstance(value, Sequence) or not all(isinstance(tool, Mapping) for tool in value):
        return "is no list of tool schemas"
    return tuple(value)


def _unreadable(path: Path, error: OSError) -> str:
    return f"{path} cannot be read ({error.strerror or error})"
