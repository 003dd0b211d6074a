"""Fixtures that several folders of tests use."""

import os
import pkgutil
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of these folders, so that `pytest -m unit` chooses them."""
    for item in items:
        if item.path.parent.name in ("unit", "repo"):
            item.add_marker("unit")


@pytest.fixture(scope="module", autouse=True)
def restored_environment() -> Iterator[None]:
    """What a file of tests leaves in the environment ends with it.

    A run sets WORLD_SIZE and more for torch and vLLM. A later test would pass them to its runs.
    """
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session", autouse=True)
def shipped_rows_are_read_once() -> Iterator[None]:
    """Every command line of a preset checks all of them, for a third of a second."""
    from r3 import assets

    place = "r3.data.sources.check_row"
    read = pkgutil.resolve_name(place)
    kept = cache(read)
    shipped = {str(assets.WORD_PROBLEMS_TRAIN), str(assets.WORD_PROBLEMS_EVAL)}

    def check_row(file: str, *row: Any) -> Any:
        return (kept if file in shipped else read)(file, *row)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(place, check_row)
        yield


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """The tokenizer of the embedded models."""
    from tests.tiny import tokenizer_with

    return tokenizer_with()


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative paths, runs/ among them, are the test's own; no torchrun around it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[1]))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the embedded model."""
    from r3 import assets

    return Path(shutil.copytree(assets.TINY_MOE, tmp_path / "model"))
