"""Sources of rows: files, folders, packages that make them; what is read from a row."""

import bz2
import csv
import gzip
import io
import json
import lzma
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from r3 import extras
from r3.cli.parse import parse
from r3.config import Config, DataConfig, EvalConfig, RewardConfig
from r3.data import Columns, DataError, columns_of, load_prompts, read_rows
from r3.rollout import read_task
from r3.tools import files_of
from tests.errors import Patch
from tests.rows import OPTIONS, parquet, write
from tests.settings import found
from tests.tables import table

ASKED = "Tom has {} books. How many?"
ROWS: list[dict[str, Any]] = [
    {"question": ASKED.format(i), "answer": f"#### {i}", "level": i} for i in range(3)
]
BAD: dict[str, Any] = {"question": " ", "answer": "#### 2", "level": 2}


def jsonl(folder: Path, rows: list[dict[str, Any]]) -> str:
    return str(write(folder, *map(json.dumps, rows)))


def dataset(rows: list[dict[str, Any]]) -> Any:
    import datasets
    import pyarrow

    # A fingerprint of our own: datasets 5 cannot compute one on Python 3.11.7.
    return datasets.Dataset(pyarrow.Table.from_pylist(rows), fingerprint="rows")


def saved(folder: Path, rows: list[dict[str, Any]]) -> str:
    dataset(rows).save_to_disk(folder / "saved")
    return str(folder / "saved")


def saved_splits(folder: Path, rows: list[dict[str, Any]]) -> str:
    import datasets

    both = datasets.DatasetDict({"test": dataset(rows[:1]), "train": dataset(rows)})
    both.save_to_disk(folder / "splits")
    return f"{folder / 'splits'}:train"


def data_files(folder: Path, rows: list[dict[str, Any]]) -> str:
    (folder / "files").mkdir()
    parquet(folder / "files", rows)
    return str(folder / "files")


SOURCES = [jsonl, parquet, saved, saved_splits, data_files]


@pytest.fixture
def _own_cache(tmp_path: Path, monkeypatch: Patch) -> None:
    """What datasets converts goes to the test's own folder."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.mark.usefixtures("_own_cache")
@pytest.mark.parametrize("make", SOURCES, ids=lambda make: make.__name__)
def test_every_source_gives_the_same_prompts(make: Any, tokenizer: Any, tmp_path: Path) -> None:
    dataset = load_prompts(make(tmp_path, ROWS), tokenizer, **OPTIONS)
    expected = load_prompts(write(tmp_path, *map(json.dumps, ROWS)), tokenizer, **OPTIONS)
    assert len(dataset) == 3
    for prompt, other in zip(dataset.prompts, expected.prompts, strict=True):
        assert (prompt.tokens_T, prompt.answer) == (other.tokens_T, other.answer)
        assert prompt.metadata == other.metadata
        assert prompt.id.rpartition(":")[2] == other.id.rpartition(":")[2]


@pytest.mark.usefixtures("_own_cache")
@pytest.mark.parametrize("make", SOURCES, ids=lambda make: make.__name__)
def test_every_source_names_a_bad_row(make: Any, tokenizer: Any, tmp_path: Path) -> None:
    source = make(tmp_path, [ROWS[0], BAD, ROWS[1]])
    with pytest.raises(DataError) as caught:
        load_prompts(source, tokenizer, **OPTIONS)
    (problem,) = caught.value.problems
    file = f"{source}/rows.parquet" if make is data_files else source
    assert (problem.file, problem.line, problem.column) == (file, 2, "question")
    assert problem.rule == "is empty" and problem.fix


@pytest.mark.parametrize(("source", "rule"), table("bad_sources"))
def test_a_source_that_cannot_be_read_is_named(
    source: str, rule: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)  # no request, fails at once
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    Path("text.parquet").write_text("no parquet")
    row = json.dumps(ROWS[0])
    files = {"clone/README.md": "---\nconfigs:\n- config_name: a\n---\n", "rows.xlsx": ""}
    files |= {"clone/rows.jsonl": "{", "cut.jsonl.gz": "no gzip", "cut.json": f"[{row},"}
    files |= {
        "short.csv": "question,answer\n1+1?,2\n1+2?\n",
        "twice.csv": "question,question\n1,2\n",
    }
    files |= {"two.json": '[{"question": "1?", "answer": "1", "answer": "2"}]'}
    files |= {f"mixed/{name}.jsonl": row for name in ("train", "algebra", "geometry")}
    files |= {f"both/data/{name}-00000-of-00001.jsonl": row for name in ("train", "test")}
    files |= {"foreign/rows.jsonl": row, "foreign/model.arrow": "", "no-data/README.md": ""}
    for name, content in files.items():
        Path(name).parent.mkdir(exist_ok=True, parents=True)
        Path(name).write_text(content)
    saved(Path(), ROWS)
    saved_splits(Path(), ROWS)
    rows, (problem,) = read_rows(source, Columns())
    assert not rows and (problem.file, problem.line, problem.column) == (source, 0, "file")
    assert rule in str(problem)


@pytest.mark.parametrize(
    ("package", "make", "command"),
    [
        ("pyarrow.parquet", parquet, "pip install pyarrow"),
        ("datasets", saved, "pip install datasets"),
        ("datasets", lambda folder, rows: "hub:owner/name", "pip install datasets"),
        ("reasoning_gym", lambda folder, rows: "gym:chain_sum", "pip install reasoning-gym"),
    ],
)
def test_a_package_that_is_not_there_is_named_with_the_command(
    package: str, make: Any, command: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    source = make(tmp_path, ROWS)
    monkeypatch.setitem(sys.modules, package, None)  # importing it fails
    _, (problem,) = read_rows(source, Columns())
    assert problem.fix == command


def test_remote_sources_are_read_when_the_run_starts() -> None:
    assert found({"data.path": ["hub:owner/name", "gym:chain_sum"], "eval.path": ""}) == {}
    assert found({"data.path": "gym:chain_sum", "reward.function": "gym", "eval.path": ""}) == {}


# --- files ------------------------------------------------------------------------------------


def as_csv(rows: list[dict[str, Any]], delimiter: str = ",") -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text, delimiter=delimiter).writerows([rows[0], *(row.values() for row in rows)])
    return text.getvalue().encode()


def as_lines(rows: list[dict[str, Any]]) -> bytes:
    return "\n".join(map(json.dumps, rows)).encode()


def zstd(content: bytes) -> bytes:
    import pyarrow

    return bytes(pyarrow.Codec("zstd").compress(content, asbytes=True))


TEXTS: list[dict[str, Any]] = [
    {"question": "When?\nSay it.", "answer": "2024-01-31", "code": "007"},
    {"question": 'Say "1,5".', "answer": "1,5", "code": "True"},
]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.jsonl", as_lines(TEXTS)),
        ("rows.JSONL.gz", gzip.compress(as_lines(TEXTS))),
        ("rows.jsonl.bz2", bz2.compress(as_lines(TEXTS))),
        ("rows.jsonl.xz", lzma.compress(as_lines(TEXTS))),
        ("rows.jsonl.zst", zstd(as_lines(TEXTS))),
        ("rows.json", json.dumps(TEXTS, indent=2).encode()),
        ("rows.csv", as_csv(TEXTS)),
        ("rows.csv.gz", gzip.compress(b"\xef\xbb\xbf" + as_csv(TEXTS))),
        ("rows.tsv", as_csv(TEXTS, "\t")),
        ("rows.PARQUET", None),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("inside", ["file", "folder", "glob"])
def test_texts_of_a_file_are_the_same_in_every_format(
    name: str, content: bytes | None, inside: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    if content is None:
        path = Path(parquet(tmp_path, TEXTS)).rename(path)
    else:
        path.write_bytes(content)
    (tmp_path / "README.md").write_text("no data")
    sources = {"file": path, "folder": tmp_path, "glob": tmp_path / "rows.*"}
    rows, problems = read_rows(str(sources[inside]), Columns())
    assert not problems
    found = [(row.messages[0]["content"], row.answers[0], row.columns["code"]) for row in rows]
    assert found == [(*row.values(),) for row in TEXTS]
    assert {row.file for row in rows} == {str(path)}


def test_every_file_of_a_folder_is_read_and_bad_rows_name_theirs(tmp_path: Path) -> None:
    for index, name in enumerate(("algebra", "geometry", "sub/numbers")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        rows = [ROWS[index], BAD] if index == 1 else [ROWS[index], ROWS[index]]
        (tmp_path / f"{name}.jsonl").write_bytes(b"\n" + as_lines(rows))
    rows, (problem,) = read_rows(str(tmp_path), Columns())
    assert problem.where == f"{tmp_path}/geometry.jsonl:3:question"
    assert [row.columns["level"] for row in rows] == [0, 0, 1, 2, 2]
    assert [row.number for row in rows] == [1, 2, 3, 5, 6]  # each once, for the ids of prompts
    assert [row.line for row in rows] == [2, 3, 2, 2, 3]
    assert len(files_of(str(tmp_path))) == 3 and len(files_of(f"{tmp_path}/*.jsonl")) == 2


def test_nulls_and_types_of_other_rows_change_no_value(tmp_path: Path) -> None:
    """Neither of rows before, nor of other files: no column has one type for all rows."""
    hints = [None, "x", 1.0, 2**60 + 1, [None, 1], {"a": 1}, {"b": None}]
    for index, hint in enumerate(hints):
        row = {"question": "?", "answer": "7", "hint": hint}
        (tmp_path / f"{index}.jsonl").write_bytes(as_lines([row, row | {"hint": None}]))
    rows, problems = read_rows(str(tmp_path), Columns())
    assert not problems
    found = [row.columns["hint"] for row in rows]
    assert found == [each for hint in hints for each in (hint, None)]
    assert [type(each) for each in found[::2]] == [type(hint) for hint in hints]


def test_a_split_of_a_folder_is_told_by_names(tmp_path: Path) -> None:
    files = ("data/train-00000-of-00002", "data/train-00001-of-00002", "data/test-00000-of-00001")
    for index, name in enumerate((*files, "validation/a", "validation/b")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.jsonl").write_bytes(as_lines([{**ROWS[0], "level": index}]))

    def levels(source: str) -> list[Any]:
        return [row.columns["level"] for row in read_rows(f"{tmp_path}{source}", Columns())[0]]

    assert (levels(":train"), levels(":test"), levels(":dev")) == ([0, 1], [2], [3, 4])
    assert levels(":train[1:]") == [1] and levels("/**/*.jsonl") == [2, 0, 1, 3, 4]
    assert levels("/data") == []  # two splits: refused


def test_the_processes_of_a_start_take_what_one_has_read(
    tokenizer: Any, tmp_path: Path, monkeypatch: Patch
) -> None:
    """Rows with other columns are others, as are those of the next start."""
    (folder := tmp_path / "read").mkdir()
    path = jsonl(tmp_path, ROWS)
    monkeypatch.setenv("R3_READ", str(folder))
    before = read_rows(path, Columns())
    jsonl(tmp_path, ROWS[:1])
    program = f"from r3.data.sources import *; print(len(read_rows({path!r}, Columns())[0]))"
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "3\n"
    assert read_rows(path, Columns()) == before and len(read_rows(path, Columns(answer=""))[0]) == 1
    shutil.rmtree(folder)  # as cleaners of old files do
    assert len(read_rows(path, Columns())[0]) == 1
    monkeypatch.delenv("R3_READ")
    assert len(read_rows(path, Columns())[0]) == 1


def test_a_run_takes_the_rows_that_its_command_line_has_checked(tmp_path: Path) -> None:
    path = jsonl(tmp_path, [{**ROWS[0], "question": f"{i}?"} for i in range(20)])
    words = ["tiny-smoke", "--data.path", path, "--eval.path", "", "--log.dir", str(tmp_path)]
    invocation = parse([*words, "--parallel.ep", "1"])
    jsonl(tmp_path, ROWS)
    assert len(read_task(invocation.config, 1, invocation.read).prompts) == 20
    assert len(read_task(invocation.config, 1).prompts) == 3


CARD = "---\nconfigs:\n- config_name: default\n  data_files: rows.jsonl\n---\n"


@pytest.mark.usefixtures("_own_cache")
@pytest.mark.parametrize("card", ["", CARD], ids=["folder", "clone"])
def test_what_changed_is_read_again_with_equal_size_and_time(card: str, tmp_path: Path) -> None:
    """A card with `configs` is for `datasets`, which keeps what it has read."""
    (folder := tmp_path / "rows").mkdir()
    (folder / "README.md").write_text(card)
    for answer in ("#### 1", "#### 2"):
        (folder / "rows.jsonl").write_bytes(as_lines([{**ROWS[0], "answer": answer}]))
        os.utime(folder / "rows.jsonl", (1, 1))
        rows, problems = read_rows(str(folder), Columns())
        assert not problems and rows[0].answers == (answer,)


@pytest.mark.parametrize(
    ("part", "levels"),
    [
        *(("[:2]", [0, 1]), ("[8:]", [8, 9]), ("[-1:]", [9]), ("[2:4]", [2, 3])),
        *(("[50%:]", [5, 6, 7, 8, 9]), ("[:10%]", [0]), ("[:]", list(range(10)))),
    ],
)
def test_a_slice_keeps_lines_and_order(part: str, levels: list[int], tmp_path: Path) -> None:
    path = jsonl(tmp_path, [{**ROWS[0], "level": level} for level in range(10)])
    rows, problems = read_rows(f"{path}{part}", Columns())
    assert not problems and [row.columns["level"] for row in rows] == levels
    assert [row.number for row in rows] == [level + 1 for level in levels]


@pytest.mark.parametrize("part", ["[-:5]", "[:-%]", "[%:]", "[1-:]"])
def test_what_is_no_slice_is_a_name(part: str, tmp_path: Path) -> None:
    path = jsonl(tmp_path, ROWS)
    rows, (problem,) = read_rows(f"{path}{part}", Columns())
    assert not rows and "no file" in problem.rule
    Path(f"{path}{part}").write_bytes(as_lines(ROWS))
    assert len(read_rows(f"{path}{part}", Columns())[0]) == len(ROWS)


def test_rows_behind_the_first_ones_are_not_looked_at(tmp_path: Path) -> None:
    """`eval.max_prompts`: a bad row there stops nothing; among the first ones it does."""
    path = jsonl(tmp_path, [*ROWS[:2], {**ROWS[0], "question": ""}])
    for source in (str(path), f"{path}[:]", str(tmp_path / "*.jsonl")):
        rows, problems = read_rows(source, Columns(first=2))
        assert len(rows) == 2 and not problems
        rows, problems = read_rows(source, Columns(first=3))
        assert len(rows) == 2 and len(problems) == 1
    values = {"eval.path": str(path), "eval.max_prompts": 2}
    assert found(values) == {}
    assert "eval.path" in found(values | {"eval.max_prompts": 3})


def test_a_revision_reaches_the_library(tmp_path: Path, monkeypatch: Patch) -> None:
    import datasets

    asked: list[Any] = []

    def load(*args: Any, **options: Any) -> Any:
        asked.append((*args, options["split"], options["revision"]))
        return dataset(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load)
    rows, problems = read_rows("hub:owner/name@1.0.0:main:test[:2]", Columns())
    assert len(rows) == 2 and not problems
    read_rows("hub:owner/name", Columns())
    assert asked == [("owner/name", "main", "test", "1.0.0"), ("owner/name", None, "train", None)]


def test_keys_reach_into_nested_objects(tokenizer: Any, tmp_path: Path) -> None:
    row = {"extra": {"question": "1+1?"}, "reward.truth": "2", "reward": {"truth": "3"}}
    columns = Columns(prompt="extra.question", answer="reward.truth")
    options = OPTIONS | {"columns": columns}
    (prompt,) = load_prompts(jsonl(tmp_path, [row]), tokenizer, **options).prompts
    assert prompt.messages[0]["content"] == "1+1?"
    assert prompt.answer == "2"  # the column with that very name comes first
    for key in ("extra.answer", "extra.question.text", "other.question"):
        _, (problem,) = read_rows(jsonl(tmp_path, [row]), Columns(prompt=key, answer=""))
        assert problem.column == key and "the row has extra, reward.truth, reward" in problem.rule


def test_messages_about_a_held_out_set_name_its_settings(tmp_path: Path) -> None:
    system = {"role": "system", "content": "Think."}
    path = tmp_path / "own.jsonl"
    path.write_text(json.dumps({"question": [system, {"role": "user", "content": "3+4?"}]}))
    training = Config(data=DataConfig(system_prompt="Think."))
    (own,) = EvalConfig(path=("own.jsonl",), prompt_key=("problem",)).sets
    _, found = read_rows(str(path), columns_of(training, own))
    fixes = [problem.fix.partition("another with ")[2] for problem in found]
    assert fixes == ["--eval.prompt_key", "--eval.answer_key"]
    (own,) = EvalConfig(path=("own.jsonl",), answer_key=("none",)).sets
    _, (problem, *_) = read_rows(str(path), columns_of(training, own))
    assert "eval.system_prompt or data.system_prompt is set" in problem.rule
    assert problem.fix == "keep one of the two; --eval.system_prompt none removes it for a set"


def test_verifier_that_a_row_names_is_checked_when_it_is_read(tmp_path: Path) -> None:
    columns = columns_of(Config(reward=RewardConfig(function=("row",))))
    rows = [{**ROWS[0], "verifier": "gsm8k"}, {**ROWS[1], "verifier": "exact"}]
    found, none = read_rows(jsonl(tmp_path, rows), columns)
    assert [row.columns["verifier"] for row in found] == ["gsm8k", "exact"] and none == []
    bad = [
        (ROWS[0], "verifier", "is None; the reward row accepts gsm8k, exact, gym"),
        ({**ROWS[0], "verifier": "math"}, "verifier", "is 'math'"),
        ({**ROWS[0], "verifier": "gym"}, "verifier", "is not from reasoning-gym"),
        ({**ROWS[0], "verifier": "gsm8k", "answer": "7"}, "answer", "has no '####'"),
    ]
    for row, field, rule in bad:
        _, (problem,) = read_rows(jsonl(tmp_path, [row]), columns)
        assert problem.column == field and rule in problem.rule
    assert columns_of(Config()).verifiers == ()
    own = RewardConfig(function=("row",), row_functions=("math", "http", "mine.py:brief"))
    columns = columns_of(Config(reward=own))
    rows = [{**ROWS[0], "verifier": name} for name in ("math", "http", "brief")]
    assert len(read_rows(jsonl(tmp_path, rows), columns)[0]) == 3
    _, (problem,) = read_rows(jsonl(tmp_path, [{**ROWS[0], "verifier": "gsm8k"}]), columns)
    assert "accepts math, http, brief" in problem.rule and "--reward.row_functions" in problem.fix


NO_ARGUMENTS = {"type": "object", "properties": {}}
ADD = {"name": "add", "description": "Adds.", "parameters": NO_ARGUMENTS}
TOOL = {"type": "function", "function": ADD}


@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL])], ids=["list", "text"])
def test_tools_of_a_row_are_shown_by_templates(tools: Any, tokenizer: Any, tmp_path: Path) -> None:
    path = jsonl(tmp_path, [{**ROWS[0], "tools": tools}, ROWS[1]])
    columns = Columns(tools="tools", system_prompt="Be brief.")
    options: dict[str, Any] = {"columns": columns, "max_prompt_tokens": 999}
    with_tools, without = load_prompts(path, tokenizer, **options).prompts
    shown = {"tools": [TOOL], "add_generation_prompt": True, "tokenize": False}
    expected = tokenizer.apply_chat_template(list(with_tools.messages), **shown)
    assert tokenizer.decode(with_tools.tokens_T) == expected and "<tools>add</tools>" in expected
    assert "<tools>add</tools>" not in tokenizer.decode(without.tokens_T)
    # Those of the environment are shown where a row has none.
    row = load_prompts(path, tokenizer, **options, tools=[TOOL]).prompts[1]
    text = tokenizer.decode(row.tokens_T)
    assert "<tools>add</tools>" in text


def test_duplicates_can_be_dropped_and_counted(tokenizer: Any, tmp_path: Path) -> None:
    other = {**ROWS[0], "answer": "#### 9"}  # the same question with another answer is no duplicate
    path = jsonl(tmp_path, [*ROWS, {**ROWS[0], "level": 7}, other])
    assert len(load_prompts(path, tokenizer, **OPTIONS)) == 5
    dataset = load_prompts([path, path], tokenizer, **OPTIONS | {"drop_duplicates": False})
    assert len({prompt.id for prompt in dataset.prompts}) == len(dataset) == 10
    assert [prompt.id for prompt in dataset.prompts[4:6]] == ["rows.jsonl:5", "rows.jsonl#2:1"]
    dataset = load_prompts(path, tokenizer, **OPTIONS, drop_duplicates=True)
    assert (len(dataset), dataset.dropped_duplicates) == (4, 1)
    assert [prompt.id.rpartition(":")[2] for prompt in dataset.prompts] == ["1", "2", "3", "5"]
    with pytest.raises(DataError, match="no row of 5 remains: 0 exceed 100 tokens, 5 are dup"):
        load_prompts([path, path], tokenizer, **OPTIONS, drop_duplicates=True)


def test_rows_that_differ_for_a_reward_are_no_duplicates(tokenizer: Any, tmp_path: Path) -> None:
    path = jsonl(tmp_path, [{**ROWS[0], "tests": "f(1) == 2"}, {**ROWS[0], "tests": "f(2) == 3"}])
    for function, left in (("gsm8k", 1), ("mine.py:passes", 2)):
        columns = columns_of(Config(reward=RewardConfig(function=(function,))))
        options = OPTIONS | {"columns": columns, "drop_duplicates": True}
        assert len(load_prompts(path, tokenizer, **options)) == left, function


def test_a_procedural_task_is_made_and_scored(tokenizer: Any) -> None:
    pytest.importorskip("reasoning_gym", reason="the extra gym is not installed")
    settings: dict[str, Any] = {"model": None, "renderer": None}
    gym = extras.judge("gym", "gym", RewardConfig(), **settings).function
    source = "gym:chain_sum,size=20,seed=3,min_terms=2,max_terms=3"
    dataset = load_prompts(source, tokenizer, columns=Columns(prompt="ask"), max_prompt_tokens=400)
    again = load_prompts(source, tokenizer, columns=Columns(), max_prompt_tokens=400)
    assert len(dataset) == 20 and dataset == again
    for prompt in dataset.prompts:
        assert gym(prompt.answer, prompt).value == 1.0
        assert gym(f"It is so.\n#### {prompt.answer}", prompt).value == 1.0
        assert gym(f"<answer>0</answer> no, <answer>{prompt.answer}</answer>", prompt).value == 1.0
        assert gym(f"so \\boxed{{{prompt.answer}}}.", prompt).value == 1.0
        assert gym("#### nothing", prompt).value < 1.0
    for bad in ("size", "size=2,size=3", "size=NaN", "colour=1", "min_terms=0"):
        assert read_rows(f"gym:chain_sum,{bad}", Columns())[1], bad
    assert read_rows("gym:no_such_task", Columns())[1]


def test_a_procedural_task_has_the_levels_of_its_curriculum() -> None:
    pytest.importorskip("reasoning_gym", reason="the extra gym is not installed")

    def terms(settings: str) -> set[int]:
        rows, problems = read_rows(f"gym:chain_sum,size=50,{settings}", Columns())
        assert not problems, problems
        return {len(re.findall(r"\d+", row.messages[0]["content"])) for row in rows}

    # As reasoning-gym has it, a level contains the ones below it: here sums of 2 terms and more.
    assert terms("level=0") == {2} and terms("level=3") == {2, 3, 4, 5}
    assert terms("level=3,max_terms=4") == {2, 3, 4}  # a setting is stronger than the level
    for bad in ("level=-1", "level=99", "level=1.5", "level=hard"):
        (problem,) = read_rows(f"gym:chain_sum,{bad}", Columns())[1]
        assert "has levels 0 to" in problem.rule, problem
    (problem,) = read_rows("gym:gsm_symbolic,level=1", Columns())[1]
    assert "No curriculum" in problem.rule
    (problem,) = read_rows("gym:composite", Columns())[1]
    assert "data.weights" in problem.fix
