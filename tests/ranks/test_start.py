"""Ranks that did not read the same files do not begin a run together."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from r3 import extras
from r3.config import ConfigError, with_values
from r3.rollout import read_task
from r3.run import Opened, RankError, require_one_start
from r3.runtime.device import Device
from r3.runtime.mesh import Axis
from r3.tools import findings, measure
from tests.errors import NOTHING, message_of
from tests.tiny import tiny_config
from tests.world import run_world

pytestmark = pytest.mark.ranks


def begin(device: Device) -> dict[str, str]:
    """What every rank says when nothing differs, and when something does on the second rank."""
    config, world = tiny_config(), Axis.of("world", dist.group.WORLD)
    task, start, second = read_task(config), Opened(), device.rank == 1
    # The same name on both ranks, with another content on the second one.
    os.chdir(tempfile.mkdtemp())
    Path("mine.py").write_text(f"def f(inputs, bounds): return {device.rank}")
    of_rank = with_values(config, {"algo.loss": "mine.py:f"})
    some = replace(task, prompts=replace(task.prompts, prompts=task.prompts.prompts[:-1]))
    cases: dict[str, tuple[Any, Any, Any]] = {
        "same": (with_values(config, {"log.dir": f"of rank {device.rank}"}), task, start),
        "step": (
            config,
            task,
            replace(start, step=7) if second else start,
        ),
        "data": (config, some if second else task, start),
        "files": (of_rank, task, start),
        "settings": (with_values(config, {"train.lr": 0.5}) if second else config, task, start),
    }
    return {
        name: message_of(partial(require_one_start, *arguments, world), RankError)
        for name, arguments in cases.items()
    }


def test_ranks_that_read_other_files_all_say_so() -> None:
    one, two = run_world(begin, 2)
    assert one == two
    assert one["same"] == NOTHING
    assert "ranks 0 and 1 differ in step to begin after: 0 and 7" in one["step"]
    assert "differ in prompts" in one["data"]
    assert "differ in your Python files" in one["files"]
    assert "differ in settings" in one["settings"]


def healthy(device: Device, *, folder: str) -> list[dict[str, str]]:
    """Problems of two ranks of this machine by check: with a folder, and with one nobody writes."""
    world = Axis.of("world", dist.group.WORLD)
    both = [measure(device, world, Path(each)) for each in (folder, "/proc/self/run")]
    return [{each.name: "; ".join(each.problems) for each in findings(facts)} for facts in both]


def test_ranks_of_one_machine_are_healthy(tmp_path: Path) -> None:
    (well, unwritable), other = run_world(healthy, 2, folder=str(tmp_path / "runs" / "new"))
    assert other == [well, unwritable]
    assert set(well) == {"devices", "ring", "disk", "clocks", "versions"}
    assert not any(well.values())
    assert "rank 0 on " in unwritable["disk"] and " cannot be written: " in unwritable["disk"]
    assert not list(tmp_path.iterdir()), "nothing is left behind"


@pytest.mark.parametrize(("local", "size", "refused"), [(1, 2, True), (6, 4, True), (8, 4, False)])
def test_engine_on_two_machines_is_refused(
    monkeypatch: pytest.MonkeyPatch, local: int, size: int, refused: bool
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local))
    config = with_values(tiny_config(), {"parallel.engine_tp": size})
    said = message_of(lambda: extras.machine().require_engines_within_machines(config), ConfigError)
    assert (said != NOTHING) == refused
    if refused:
        assert f"parallel.engine_tp = {size}: must divide the {local} rank(s)" in said, said
