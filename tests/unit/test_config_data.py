"""What the checks of a config say about data sets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from r3 import checks
from r3.data.sources import Columns, read_rows
from tests.settings import changed, found

pytestmark = pytest.mark.unit


GOOD = '{"question": "1+1?", "answer": "#### 2"}'


@pytest.mark.parametrize(
    ("line", "where", "rule"),
    [
        ('{"question": "1+1?", "answer"', ":2'", "is not JSON"),
        ('["1+1?", "2"]', ":2'", "is a list, not an object"),
        ('{"answer": "#### 2"}', ":2:question'", "is missing; the row has answer"),
        ('{"question": "1+1?"}', ":2:answer'", "is missing"),
        ('{"question": 3, "answer": "#### 2"}', ":2:question'", "is a int, neither"),
        ('{"question": "  ", "answer": "#### 2"}', ":2:question'", "is empty"),
        ('{"question": "1+1?", "answer": null}', ":2:answer'", "is null"),
        ('{"question": [], "answer": "#### 2"}', ":2:question'", "is an empty list"),
        (
            '{"question": [{"role": "user"}], "answer": "#### 2"}',
            ":2:question'",
            "message 0 has no 'content'",
        ),
        ('{"question": "1+1?", "answer": "two"}', ":2:answer'", "has no '####'"),
        ('{"question": "\udcff", "answer": "#### 2"}', ":2'", "is not UTF-8 at byte 14"),
    ],
)
def test_a_bad_row_is_named_by_file_line_and_field(
    tmp_path: Path, line: str, where: str, rule: str
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "\n".join([GOOD, line, *[GOOD] * 20]), encoding="utf-8", errors="surrogateescape"
    )
    (message,) = found({"data.path": str(path)}).values()
    assert f"{path}{where}" in message and rule in message and ". Fix: " in message


def test_of_many_bad_rows_five_are_shown_and_all_counted(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join([GOOD, *["oops"] * 12, *[GOOD] * 20]))
    problems = checks.problems(changed({"data.path": str(path)}), 2)
    assert [problem.value for problem in problems] == [
        *(f"{path}:{line}" for line in range(2, 7)),
        str(path),
    ]
    assert problems[-1].rule == "7 more faults, 12 in all"


def test_a_fault_of_every_row_is_one_problem(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    row = '{"problem": "1+1?", "solution": "$\\\\frac{4}{2}$"}'
    path.write_text("\n".join([row] * 20))
    problems = checks.problems(changed({"data.path": str(path)}), 2)
    assert [(problem.value, problem.rule) for problem in problems] == [
        (f"{path}:{name}", "is missing; the row has problem, solution; so it is in all 20 rows")
        for name in ("question", "answer")
    ]
    path.write_text("\n".join([row] * 19 + ["oops"]))
    assert len(checks.problems(changed({"data.path": str(path)}), 2)) == 6


def test_rows_may_be_chats_and_blank_lines_still_count(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    chat = {"ask": [{"role": "user", "content": "1+1?"}], "gold": "2", "source": "x"}
    path.write_bytes(b"\xef\xbb\xbf" + f"{json.dumps(chat)}\n\n{json.dumps(chat)}\n".encode())
    rows, bad = read_rows(str(path), Columns(prompt="ask", answer="gold"))
    assert not bad
    assert [(row.number, row.answers, row.columns["source"]) for row in rows] == [
        (1, ("2",), "x"),
        (3, ("2",), "x"),
    ]


def test_answers_without_a_number_are_fine_for_other_rewards(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(['{"question": "say hi", "answer": "hi"}'] * 16))
    assert found({"data.path": str(path), "reward.function": "exact", "eval.path": ""}) == {}


def test_remote_sources_are_read_when_the_run_starts() -> None:
    assert found({"data.path": ["hub:owner/name", "gym:chain_sum"], "eval.path": ""}) == {}
    assert found({"data.path": "gym:chain_sum", "reward.function": "gym", "eval.path": ""}) == {}
