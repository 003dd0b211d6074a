"""Rows become prompts or are named; the order of prompts is a pure function of (seed, step)."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from r3 import assets
from r3.config import Config, RewardConfig
from r3.data.prompts import DataError, Dataset, load_prompts, prompts_of_step, turns
from r3.data.sources import Columns, columns_of, is_near, read_rows
from r3.types import Prompt

pytestmark = pytest.mark.unit

OPTIONS: dict[str, Any] = {"columns": Columns(), "max_prompt_tokens": 100, "on_too_long": "error"}
BRIEF: dict[str, Any] = {"columns": Columns(system_prompt="Be brief.")}
GOOD = '{"question": "Tom has 3 books. How many?", "answer": "#### 3"}'


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(assets.TINY_MOE)


def write(folder: Path, *lines: str | bytes) -> Path:
    path = folder / "rows.jsonl"
    path.write_bytes(
        b"\n".join(line.encode() if isinstance(line, str) else line for line in lines) + b"\n"
    )
    return path


def test_the_shipped_questions_load(tokenizer: Any) -> None:
    dataset = load_prompts(assets.WORD_PROBLEMS_EVAL, tokenizer, **OPTIONS)
    lines = assets.WORD_PROBLEMS_EVAL.read_text().splitlines()
    assert len(dataset) == len(lines)
    assert dataset.dropped_too_long == 0
    row, prompt = json.loads(lines[1]), dataset.prompts[1]
    assert prompt.id == "word_problems_eval.jsonl:2"
    assert prompt.answer == row["answer"]
    assert prompt.messages == ({"role": "user", "content": row["question"]},)
    text = f"<|im_start|>user\n{row['question']}<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(prompt.tokens_T) == text
    assert all(type(token) is int for token in prompt.tokens_T)


def test_what_a_row_may_be(tokenizer: Any, tmp_path: Path) -> None:
    chat = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    rows = [GOOD, "", json.dumps({"question": chat, "answer": "", "level": 3}), "  "]
    dataset = load_prompts(
        write(tmp_path, b"\xef\xbb\xbf" + rows[0].encode(), *rows[1:]), tokenizer, **OPTIONS
    )
    assert [prompt.id for prompt in dataset.prompts] == [
        "rows.jsonl:1",
        "rows.jsonl:3",
    ]  # blank lines count
    assert dataset.prompts[1].messages == tuple(chat)
    assert dataset.prompts[1].metadata == {"level": 3}


def test_system_prompt_comes_first(tokenizer: Any, tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    (prompt,) = load_prompts(path, tokenizer, **OPTIONS | BRIEF).prompts
    assert prompt.messages[0] == {"role": "system", "content": "Be brief."}
    assert tokenizer.decode(prompt.tokens_T).startswith("<|im_start|>system\nBe brief.<|im_end|>\n")


@pytest.mark.parametrize(
    ("line", "field", "rule"),
    [
        ('{"question": "a", "answer": ', "row", "not JSON at column 29"),
        (b'{"question": "\xff", "answer": "b"}', "row", "not UTF-8 at byte 14"),
        ("[1, 2]", "row", "is a list, not an object"),
        ('{"answer": "b"}', "question", "is missing; the row has answer"),
        (
            '{"question": "a", "solution": "b"}',
            "answer",
            "is missing; the row has question, solution",
        ),
        ('{"answer": "b", "a.b": 1}', "question", "is missing; the row has answer, a.b"),
        ('{"question": "a", "answer": 3}', "answer", "is a int, not a string"),
        ('{"question": 3, "answer": "b"}', "question", "is a int, neither a string nor a list"),
        ('{"question": " ", "answer": "b"}', "question", "is empty"),
        ('{"question": [], "answer": "b"}', "question", "is an empty list"),
        ('{"question": ["a"], "answer": "b"}', "question", "message 0 is a str"),
        (
            '{"question": [{"role": "user"}], "answer": "b"}',
            "question",
            "message 0 has no 'content'",
        ),
        (
            '{"question": [{"role": 1, "content": ""}], "answer": "b"}',
            "question",
            "message 0 has no 'role'",
        ),
        (
            json.dumps({"question": "book " * 200, "answer": "b"}),
            "question",
            "tokens with its chat template; at most",
        ),
    ],
)
def test_a_bad_row_is_named(
    line: str | bytes, field: str, rule: str, tokenizer: Any, tmp_path: Path
) -> None:
    with pytest.raises(DataError) as caught:
        load_prompts(write(tmp_path, GOOD, line, GOOD), tokenizer, **OPTIONS)
    (problem,) = caught.value.problems
    assert (Path(problem.file).name, problem.line, problem.field) == ("rows.jsonl", 2, field)
    assert rule in problem.rule
    assert f"rows.jsonl:2: {field}: " in str(caught.value)
    assert problem.fix


def test_all_bad_rows_are_counted_and_ten_named(tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        load_prompts(write(tmp_path, GOOD, *["nonsense"] * 13), tokenizer, **OPTIONS)
    lines = str(caught.value).splitlines()
    assert lines[0] == "data: 13 problems"
    assert len(lines) == 1 + 10 + 1
    assert "rows.jsonl:11:" in lines[10]
    assert lines[11].endswith("and 3 more")


def test_too_long_rows_can_be_dropped_and_counted(tokenizer: Any, tmp_path: Path) -> None:
    path = write(tmp_path, GOOD, json.dumps({"question": "book " * 200, "answer": "b"}), GOOD)
    dataset = load_prompts(path, tokenizer, **OPTIONS | {"on_too_long": "drop"})
    assert (len(dataset), dataset.dropped_too_long) == (2, 1)
    tokens = len(dataset.prompts[0].tokens_T)
    assert (
        len(
            load_prompts(
                write(tmp_path, GOOD), tokenizer, **OPTIONS | {"max_prompt_tokens": tokens}
            )
        )
        == 1
    )
    with pytest.raises(DataError, match=f"no row of 1 remains: 1 exceed {tokens - 1} tokens"):
        options = OPTIONS | {"max_prompt_tokens": tokens - 1, "on_too_long": "drop"}
        load_prompts(write(tmp_path, GOOD), tokenizer, **options)


def test_two_system_messages_are_refused(tokenizer: Any, tmp_path: Path) -> None:
    row = {
        "question": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}],
        "answer": "",
    }
    path = write(tmp_path, json.dumps(row))
    with pytest.raises(DataError, match=r"system message while data\.system_prompt is set"):
        load_prompts(path, tokenizer, **OPTIONS | BRIEF)


def test_whole_files_are_refused(tokenizer: Any, tmp_path: Path) -> None:
    for path, rule in (
        (tmp_path / "absent.jsonl", "No such file"),
        (tmp_path, "contain any data files"),
    ):
        with pytest.raises(DataError, match=rule) as caught:
            load_prompts(path, tokenizer, **OPTIONS)
        assert str(path) in str(caught.value)
    with pytest.raises(DataError, match="has no rows"):
        load_prompts(write(tmp_path, "", ""), tokenizer, **OPTIONS)


def test_a_tokenizer_without_chat_template_is_refused(tmp_path: Path) -> None:
    bare = AutoTokenizer.from_pretrained(assets.TINY_MOE)
    bare.chat_template = None
    with pytest.raises(DataError, match="tokenizer: has no chat template"):
        load_prompts(write(tmp_path, GOOD), bare, **OPTIONS)


def test_template_kwargs_reach_the_chat_template(tmp_path: Path) -> None:
    polite: Any = AutoTokenizer.from_pretrained(assets.TINY_MOE)
    polite.chat_template = "{{- 'Tom' if polite is defined }}" + polite.chat_template
    path = write(tmp_path, GOOD)
    plain, changed = (
        load_prompts(path, polite, **OPTIONS, template_kwargs=variables).prompts[0].tokens_T
        for variables in ({}, {"polite": True})
    )
    added = len(changed) - len(plain)
    assert added > 0 and changed[added:] == plain


def test_a_conversation_the_template_refuses_is_named(tmp_path: Path) -> None:
    strict = AutoTokenizer.from_pretrained(assets.TINY_MOE)
    strict.chat_template = (
        "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}hello"
    )
    row = {"question": [{"role": "assistant", "content": "b"}], "answer": ""}
    with pytest.raises(DataError, match=r"rows\.jsonl:1: question: is refused .* \(user first\)"):
        load_prompts(write(tmp_path, json.dumps(row)), strict, **OPTIONS)


# --- sources ----------------------------------------------------------------------------------

ROWS: list[dict[str, Any]] = [
    {"question": f"Tom has {i} books. How many?", "answer": f"#### {i}", "level": i}
    for i in range(3)
]
BAD: dict[str, Any] = {"question": " ", "answer": "#### 2", "level": 2}


def jsonl(folder: Path, rows: list[dict[str, Any]]) -> str:
    return str(write(folder, *map(json.dumps, rows)))


def parquet(folder: Path, rows: list[dict[str, Any]]) -> str:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "rows.parquet")
    return str(folder / "rows.parquet")


def table(rows: list[dict[str, Any]]) -> Any:
    import datasets
    import pyarrow

    # A fingerprint of our own: datasets 5 cannot compute one on Python 3.11.7.
    return datasets.Dataset(pyarrow.Table.from_pylist(rows), fingerprint="rows")


def saved(folder: Path, rows: list[dict[str, Any]]) -> str:
    table(rows).save_to_disk(folder / "saved")
    return str(folder / "saved")


def saved_splits(folder: Path, rows: list[dict[str, Any]]) -> str:
    import datasets

    datasets.DatasetDict({"test": table(rows[:1]), "train": table(rows)}).save_to_disk(
        folder / "splits"
    )
    return f"{folder / 'splits'}:train"


def data_files(folder: Path, rows: list[dict[str, Any]]) -> str:
    (folder / "files").mkdir()
    parquet(folder / "files", rows)
    return str(folder / "files")


SOURCES = [jsonl, parquet, saved, saved_splits, data_files]


@pytest.fixture
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert (problem.file, problem.line, problem.field) == (source, 2, "question")
    assert problem.rule == "is empty" and problem.fix


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        ("absent.parquet", "cannot be read"),
        ("text.parquet", "is not a parquet file"),
        ("splits", "has the splits test, train. Fix: name one: splits:test"),
        ("splits:dev", "has no split 'dev'. Fix: one of test, train"),
        ("saved:train", "has no splits, and 'train' was given"),
        ("damaged", "cannot be loaded by datasets"),
        ("hub:a/b/c", "is not a name on the hub. Fix: write hub:OWNER/NAME"),
        ("hub:owner/name:", "is not a name on the hub"),
        ("hub:owner/name", "cannot be loaded by datasets"),
    ],
)
def test_a_source_that_cannot_be_read_is_named(
    source: str, rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)  # asks nobody, fails at once
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    Path("text.parquet").write_text("no parquet")
    Path("damaged").mkdir()
    Path("damaged/rows.jsonl").write_text('{"question": ')
    saved(Path(), ROWS)
    saved_splits(Path(), ROWS)
    rows, (problem,) = read_rows(source, Columns())
    assert not rows and (problem.file, problem.line, problem.field) == (source, 0, "file")
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
    package: str, make: Any, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make(tmp_path, ROWS)
    monkeypatch.setitem(sys.modules, package, None)  # importing it fails
    _, (problem,) = read_rows(source, Columns())
    assert problem.fix == command


def test_only_what_lies_here_is_near(tmp_path: Path) -> None:
    near = ["rows.jsonl", saved(tmp_path, ROWS), saved_splits(tmp_path, ROWS)]
    far = ["hub:owner/name", "gym:chain_sum", data_files(tmp_path, ROWS)]
    assert all(map(is_near, near)) and not any(map(is_near, far))


def test_keys_reach_into_nested_objects(tokenizer: Any, tmp_path: Path) -> None:
    row = {"extra": {"question": "1+1?"}, "reward.truth": "2", "reward": {"truth": "3"}}
    columns = Columns(prompt="extra.question", answer="reward.truth")
    (prompt,) = load_prompts(
        jsonl(tmp_path, [row]), tokenizer, columns=columns, max_prompt_tokens=99
    ).prompts
    assert prompt.messages[0]["content"] == "1+1?"
    assert prompt.answer == "2"  # the column with that very name comes first
    for key in ("extra.answer", "extra.question.text", "other.question"):
        _, (problem,) = read_rows(jsonl(tmp_path, [row]), Columns(prompt=key, answer=""))
        assert (
            problem.field == key
            and "is missing; the row has extra, reward.truth, reward" in problem.rule
        )


def test_rows_may_have_no_answers(tokenizer: Any, tmp_path: Path) -> None:
    path = jsonl(tmp_path, [{"question": "Say hi."}])
    (prompt,) = load_prompts(
        path, tokenizer, columns=Columns(answer=""), max_prompt_tokens=99
    ).prompts
    assert prompt.answer == ""


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
        assert problem.field == field and rule in problem.rule
    assert columns_of(Config()).verifiers == ()


TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {}},
    },
}


@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL])], ids=["list", "text"])
def test_tools_of_a_row_are_shown_by_the_chat_template(
    tools: Any, tokenizer: Any, tmp_path: Path
) -> None:
    path = jsonl(tmp_path, [{**ROWS[0], "tools": tools}, ROWS[1]])
    columns = Columns(tools="tools", system_prompt="Be brief.")
    with_tools, without = load_prompts(
        path, tokenizer, columns=columns, max_prompt_tokens=999
    ).prompts
    expected = tokenizer.apply_chat_template(
        list(with_tools.messages), tools=[TOOL], add_generation_prompt=True, tokenize=False
    )
    assert tokenizer.decode(with_tools.tokens_T) == expected and "<tools>add</tools>" in expected
    assert "<tools>add</tools>" not in tokenizer.decode(without.tokens_T)
    # Those of the environment are shown where a row has none.
    options: dict[str, Any] = {"columns": columns, "max_prompt_tokens": 999, "tools": [TOOL]}
    assert "<tools>add</tools>" in tokenizer.decode(
        load_prompts(path, tokenizer, **options).prompts[1].tokens_T
    )


@pytest.mark.parametrize("tools", ["{", "3", [1]])
def test_bad_tools_are_named(tools: Any, tmp_path: Path) -> None:
    _, (problem,) = read_rows(
        jsonl(tmp_path, [{**ROWS[0], "tools": tools}]), Columns(tools="tools")
    )
    assert problem.field == "tools" and problem.line == 1


def test_duplicates_can_be_dropped_and_counted(tokenizer: Any, tmp_path: Path) -> None:
    other = {**ROWS[0], "answer": "#### 9"}  # the same question with another answer is no duplicate
    path = jsonl(tmp_path, [*ROWS, {**ROWS[0], "level": 7}, other])
    assert len(load_prompts(path, tokenizer, **OPTIONS)) == 5
    dataset = load_prompts([path, path], tokenizer, **OPTIONS | {"drop_duplicates": False})
    assert len({prompt.id for prompt in dataset.prompts}) == 5 and len(dataset) == 10
    dataset = load_prompts(path, tokenizer, **OPTIONS, drop_duplicates=True)
    assert (len(dataset), dataset.dropped_duplicates) == (4, 1)
    assert [prompt.id for prompt in dataset.prompts] == [
        f"rows.jsonl:{line}" for line in (1, 2, 3, 5)
    ]
    with pytest.raises(
        DataError, match="no row of 5 remains: 0 exceed 100 tokens, 5 are duplicates"
    ):
        load_prompts([path, path], tokenizer, **OPTIONS, drop_duplicates=True)


def test_two_files_of_one_name_have_prompts_of_different_names(
    tokenizer: Any, tmp_path: Path
) -> None:
    sources = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        sources.append(jsonl(tmp_path / name, ROWS))
    dataset = load_prompts(sources, tokenizer, **OPTIONS)
    assert len({prompt.id for prompt in dataset.prompts}) == 6


def test_a_procedural_task_is_made_and_scored(tokenizer: Any) -> None:
    pytest.importorskip("reasoning_gym", reason="the extra gym is not installed")
    from r3.rewards import gym

    source = "gym:chain_sum,size=20,seed=3,min_terms=2,max_terms=3"
    dataset = load_prompts(source, tokenizer, columns=Columns(prompt="ask"), max_prompt_tokens=400)
    again = load_prompts(source, tokenizer, columns=Columns(), max_prompt_tokens=400)
    assert len(dataset) == 20 and dataset == again
    for prompt in dataset.prompts:
        assert gym(prompt.answer, prompt) == 1.0
        assert gym(f"It is so.\n#### {prompt.answer}", prompt) == 1.0
        assert gym(f"<answer>0</answer> no, <answer>{prompt.answer}</answer>", prompt) == 1.0
        assert gym(f"so \\boxed{{{prompt.answer}}}.", prompt) == 1.0
        assert gym("#### nothing", prompt) < 1.0
    for bad in (
        "gym:no_such_task",
        "gym:chain_sum,size",
        "gym:chain_sum,colour=1",
        "gym:chain_sum,min_terms=0",
    ):
        assert read_rows(bad, Columns())[1], bad


# --- order ------------------------------------------------------------------------------------


def numbered(count: int) -> Dataset:
    return Dataset(
        prompts=tuple(
            Prompt(id=str(i), messages=(), tokens_T=(i,), answer="") for i in range(count)
        ),
    )


def walk(dataset: Dataset, *, seed: int, steps: int, count: int) -> list[str]:
    return [
        p.id
        for step in range(steps)
        for p in prompts_of_step(dataset, seed=seed, step=step, count=count)
    ]


@pytest.mark.parametrize(
    "count", [1, 3, 7, 10, 23]
)  # divides, does not divide, equals and exceeds the 10 rows
def test_each_epoch_is_a_permutation(count: int) -> None:
    dataset = numbered(10)
    order = walk(dataset, seed=1, steps=30, count=count)
    assert len(order) == 30 * count
    epochs = [order[i : i + 10] for i in range(0, len(order) - 9, 10)]
    assert all(sorted(epoch, key=int) == [str(i) for i in range(10)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == len(
        epochs
    )  # 10! orders: epochs are shuffled anew


def test_the_order_depends_on_seed_and_step_alone() -> None:
    dataset = numbered(50)
    order = walk(dataset, seed=1, steps=20, count=8)
    assert [p.id for p in prompts_of_step(dataset, seed=1, step=13, count=8)] == order[
        13 * 8 : 14 * 8
    ]
    assert walk(dataset, seed=2, steps=20, count=8) != order


@pytest.mark.parametrize("weights", [(1.0, 1.0), (0.7, 0.3), (3.0, 1.0, 1e-3), (5.0,), (0.1,) * 7])
def test_turns_keep_to_the_shares_at_every_place(weights: tuple[float, ...]) -> None:
    counts = [turns(weights, places) for places in range(400)]
    for places, (now, after) in enumerate(pairwise(counts)):
        assert sum(now) == places
        assert sorted(b - a for a, b in zip(now, after, strict=True)) == [0] * (
            len(weights) - 1
        ) + [1]
        exact = [places * weight / sum(weights) for weight in weights]
        assert all(abs(a - b) < len(weights) for a, b in zip(now, exact, strict=True))


def test_turns_by_hand() -> None:
    assert [turns((1, 1), places) for places in range(5)] == [
        [0, 0],
        [0, 1],
        [1, 1],
        [1, 2],
        [2, 2],
    ]
    assert turns((3, 1), 100) == [75, 25]


def test_weighted_sources_have_epochs_of_their_own_and_resume_exactly() -> None:
    pool = numbered(14)
    dataset = Dataset(prompts=pool.prompts, sizes=(10, 4), weights=(0.25, 0.75))
    assert len(dataset) == 14
    order = walk(
        dataset, seed=1, steps=20, count=7
    )  # 140 places: 35 of the first ten, 105 of the last four
    first, second = [i for i in order if int(i) < 10], [i for i in order if int(i) >= 10]
    assert (len(first), len(second)) == (35, 105)
    for stream, size in ((first, 10), (second, 4)):
        epochs = [stream[i : i + size] for i in range(0, len(stream) - size + 1, size)]
        assert all(len(set(epoch)) == size for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) > 1
    for step in (0, 3, 19):
        drawn = [p.id for p in prompts_of_step(dataset, seed=1, step=step, count=7)]
        assert drawn == order[step * 7 : step * 7 + 7]
    assert walk(dataset, seed=2, steps=20, count=7) != order


def test_no_prompts_is_an_error() -> None:
    with pytest.raises(ValueError, match="no prompt"):
        prompts_of_step(numbered(0), seed=0, step=0, count=1)
