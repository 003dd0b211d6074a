"""What the checks of a config say about data sets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from r3.data.rows import Columns
from r3.data.sources import read_rows
from tests.settings import found

pytestmark = pytest.mark.unit


GOOD = '{"question": "1+1?", "answer": "#### 2"}'


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
