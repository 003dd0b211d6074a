"""What `tests.shipped_rows` keeps is what a run would read."""

from pkgutil import resolve_name
from typing import Any

import pytest

from r3.data import Columns, load_prompts, read_rows
from tests import shipped_rows
from tests.errors import Patch
from tests.tiny import FEW_ROWS

GRADED = Columns(prompt="question", answer="answer", graded_by=("gsm8k",))
OPTIONS: dict[str, Any] = {"max_prompt_tokens": 512}


@pytest.fixture
def restored(monkeypatch: Patch) -> None:
    for name in shipped_rows.READERS:
        monkeypatch.setattr(f"{name}.read_rows", read_rows)
    tokenised = "r3.data.prompts._prompts"
    monkeypatch.setattr(tokenised, resolve_name(tokenised))


@pytest.mark.usefixtures("restored")
def test_kept_rows_are_those_a_run_reads(tokenizer: Any, monkeypatch: Patch) -> None:
    """And other columns, tools or template variables get rows of their own."""
    others = [
        {"columns": GRADED},
        {"columns": Columns(prompt="question", answer="answer", compared=None)},
        {"columns": Columns(prompt="question", answer="answer", system_prompt="Be brief.")},
        {"columns": GRADED, "tools": ({"type": "function", "function": {"name": "f"}},)},
    ]
    read = [load_prompts(FEW_ROWS, tokenizer, **each, **OPTIONS) for each in others]
    monkeypatch.setattr(shipped_rows, "_SOURCES", (FEW_ROWS,))
    shipped_rows.keep()
    kept = [load_prompts(FEW_ROWS, tokenizer, **each, **OPTIONS) for each in others]
    assert kept == read
    texts = [tokenizer.decode(each.prompts[0].tokens_T) for each in kept]
    assert texts[0] == texts[1] and len(set(texts)) == 3, "no two of the others are one another's"
    again = load_prompts(FEW_ROWS, tokenizer, columns=GRADED, **OPTIONS)
    assert again.prompts[0] is kept[0].prompts[0], "it is kept"
    assert again.prompts[0] is not kept[2].prompts[0]
