"""Machine code of loops: kept in a private folder, compiled by one process, the same from disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from r3.kernels import cache, compiled
from tests.processor import needs_tiles
from tests.world import ROOT

pytestmark = pytest.mark.unit


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder of the user, and an empty temporary folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    (tmp_path / "aside").mkdir()
    monkeypatch.setattr(cache.tempfile, "tempdir", str(tmp_path / "aside"))
    return tmp_path / "home"


def test_the_folder_is_the_users_own(home: Path) -> None:
    place = cache.folder.__wrapped__()
    assert place is not None and place.parent == home / "r3" / "kernels"
    for each in (place, place.parent, home / "r3"):
        assert each.stat().st_mode & 0o777 == 0o700
    assert cache.folder.__wrapped__() == place


@pytest.mark.parametrize("mode", [0o750, 0o702, 0o777])
def test_a_folder_that_others_can_enter_is_not_used(
    home: Path, mode: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its files are code."""
    (home / "r3").mkdir(parents=True)
    (home / "r3").chmod(mode)
    assert cache.folder.__wrapped__() is None
    assert "not a folder of yours alone" in capfd.readouterr().out


def test_a_link_to_another_folder_is_not_used(home: Path, tmp_path: Path) -> None:
    home.mkdir()
    (tmp_path / "theirs").mkdir(mode=0o700)
    (home / "r3").symlink_to(tmp_path / "theirs")
    assert cache.folder.__wrapped__() is None


def test_a_home_that_cannot_be_written_leaves_the_temporary_folder(
    home: Path, tmp_path: Path
) -> None:
    home.write_text("a file")
    place = cache.folder.__wrapped__()
    assert place is not None and tmp_path / "aside" in place.parents


def test_a_clone_finds_the_same_folder_and_other_sources_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = cache._digest()
    for path in Path(cache.__file__).parent.glob("*.py"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(cache, "__file__", str(tmp_path / "cache.py"))
    assert cache._digest() == ours
    (tmp_path / "tiles.py").write_text("# changed")
    assert cache._digest() != ours
    (tmp_path / "tiles.py").write_bytes((ROOT / "r3/kernels/tiles.py").read_bytes())
    assert cache._digest() == ours
    monkeypatch.setattr(cache, "get_host_cpu_name", lambda: "another")
    assert cache._digest() != ours


def _double() -> Callable[..., Any]:
    def double(values: Any) -> None:
        for i in range(len(values)):
            values[i] *= 2

    return compiled.compiled(double)


def test_a_loop_is_loaded_from_the_folder_and_compiled_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def uses_of_disk(place: Path | None) -> int:
        monkeypatch.setattr(compiled, "folder", lambda: place)
        loop: Any = _double()
        values = np.ones(3)
        loop(values)
        assert values.tolist() == [2, 2, 2]
        return sum(loop.stats.cache_hits.values())

    assert [uses_of_disk(place) for place in (tmp_path, tmp_path, None)] == [0, 1, 0]


def test_one_compiles_and_the_others_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cache, "folder", lambda: tmp_path)
    inside, events = threading.Event(), []

    def first() -> None:
        with cache.compiling("all"):
            inside.set()
            second.join(0.5)  # it waits for this block
            events.append("compiled")

    def other() -> None:
        inside.wait(10)
        with cache.compiling("all"):
            events.append("loaded")

    second = threading.Thread(target=other)
    second.start()
    first()
    second.join(10)
    with cache.compiling("all"):
        events.append("later")
    assert events == ["compiled", "loaded", "later"]
    assert capfd.readouterr().out.count("compiling CPU kernels, once") == 1


def test_who_fails_to_compile_leaves_it_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "folder", lambda: tmp_path)
    with pytest.raises(KeyboardInterrupt), cache.compiling("all"):
        raise KeyboardInterrupt
    assert not (tmp_path / "all.done").exists()
    with cache.compiling("all"):
        pass
    assert (tmp_path / "all.done").exists()


PROGRAM = """
import hashlib, json, os, torch
torch.set_num_threads(1)
from r3.kernels import sampled_attention, sampled_experts, tiles
from r3.kernels.prepare import prepare
prepare(torch.float32)
torch.manual_seed(0)
D, F, N = 64, 32, 9
layer = torch.randn(4, 2 * F, D), torch.randn(4, D, F)
chosen = torch.stack([torch.randperm(4)[:2] for _ in range(N)]).int()
outs = [sampled_experts.experts(torch.randn(N, D), *layer, torch.rand(N, 2), chosen)]
cache = torch.randn(40, 2, 32, 64)
table = torch.arange(36, dtype=torch.int32).view(N, 4)
lengths = torch.arange(100, 100 + N, dtype=torch.int32)
rows = torch.randn(N, 4, 32), torch.randn(N, 2, 32), torch.randn(N, 2, 32)
slots = torch.full((N,), -1)
outs.append(sampled_attention.attend(*rows, cache, slots, table, lengths, 0.2))
loops = sampled_experts._experts, sampled_attention._attend
hits = sum(sum(loop.stats.cache_hits.values()) for loop in loops)
digest = hashlib.sha256(b"".join(out.numpy().tobytes() for out in outs)).hexdigest()
print(json.dumps([hits, digest]))
"""


@pytest.mark.large  # compiles for ten seconds
@needs_tiles
def test_loops_from_disk_have_the_bits_of_loops_just_compiled(tmp_path: Path) -> None:
    found = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            cwd=ROOT,
            env=os.environ | {"XDG_CACHE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=500,
        )
        assert done.returncode == 0, done.stderr
        found.append((done.stdout.count("compiling"), *json.loads(done.stdout.splitlines()[-1])))
    (said, hits, cold), (said_again, hits_again, warm) = found
    assert (said, hits, said_again, hits_again) == (1, 0, 0, 2)
    assert cold == warm
