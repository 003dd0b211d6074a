"""Every command block marked runnable in the README and in docs/ works when it is pasted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pages import ROOT, blocks, checkout, pages, pages_with_blocks, run

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.large]


@pytest.mark.parametrize("page", list(pages_with_blocks(pages())))
def test_blocks_of_a_page_run(page: str, tmp_path: Path) -> None:
    folder = checkout(tmp_path / "r3", is_warm=True)
    for block in blocks(page, (ROOT / page).read_text(encoding="utf-8")):
        run(block, folder)
