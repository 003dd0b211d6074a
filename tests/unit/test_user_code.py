"""Users' files: every run of a process gets them as they are."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from r3.config import AlgoConfig
from r3.user_code.algorithm import advantage_of
from r3.user_code.loading import forget_files, load

pytestmark = pytest.mark.unit


def test_a_run_gets_a_file_and_what_it_imports_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "of_my_reward.py").write_text("SCALE = 1\n")
    source = "from of_my_reward import SCALE\nfrom r3.types import Prompt\nREWARD = 2 * SCALE\n"
    (tmp_path / "mine.py").write_text(source)
    assert load(f"{tmp_path}/mine.py:REWARD") == 2

    # The second file keeps its size: an edit of the same second, which a cache would not see.
    (tmp_path / "of_my_reward.py").write_text("SCALE = 10\n")  # another size: Python caches it
    (tmp_path / "mine.py").write_text(source.replace("2 *", "3 *"))
    assert load(f"{tmp_path}/mine.py:REWARD") == 2  # within a run a file runs once
    prompt = sys.modules["r3.types"]
    forget_files()
    assert load(f"{tmp_path}/mine.py:REWARD") == 30
    assert sys.modules["r3.types"] is prompt  # what is not the user's stays


def test_functions_of_the_algorithm_are_loaded_again_too(tmp_path: Path) -> None:
    source = "def flat(rewards_R, groups_R):\n    return rewards_R * 0 + 1\n"
    file = tmp_path / "advantage.py"
    file.write_text(source)
    algo = AlgoConfig(advantage=f"{file}:flat")
    first = advantage_of(algo)
    assert advantage_of(algo) is first
    forget_files()
    assert advantage_of(algo) is not first
