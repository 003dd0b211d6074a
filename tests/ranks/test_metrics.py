"""Rows over two real ranks: each key may have parts on any of them, and everybody gets the same
row.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from r3.metrics import Max, Mean, Meter, Sum
from r3.run import RunDir, read_metrics
from r3.runtime.device import Device
from r3.runtime.mesh import Axis
from tests.tiny import tiny_config
from tests.world import run_world

pytestmark = pytest.mark.ranks


def report(device: Device, folder: str) -> dict[str, Any]:
    """One rank's share of two rows."""
    gathered: list[Any] = []

    class Counted(Axis):
        """The real axis, and how often it was used."""

        def all_gather_object(self, item: Any) -> list[Any]:
            gathered.append(item)
            return super().all_gather_object(item)

    meter = Meter(
        RunDir(Path(folder)),
        Counted.of("world", dist.group.WORLD),
        tiny_config(log={"tensorboard": True}),
    )
    with meter.phase("train"):
        time.sleep(0.1 * device.rank)
    meter.add({"reward/mean": Mean(total=float(device.rank), count=1.0 + 2.0 * device.rank)})
    if device.rank == 1:
        meter.add({"rollout/tokens": Sum(7.0)})
    else:
        meter.add({"memory/train_gib": Max(0.5)})
    first = meter.close_step(1)
    second = meter.close_step(2)
    meter.close()
    return {"first": first, "second": second, "collectives": len(gathered)}


def test_two_ranks_make_one_row(tmp_path: Path) -> None:
    ranks = run_world(report, 2, folder=str(tmp_path))
    assert ranks[0] == ranks[1]
    row = ranks[0]["first"]
    assert row["reward/mean"] == 1.0 / 4.0  # sums first: the mean of the ranks' means would be 1/6
    assert row["rollout/tokens"] == 7.0
    assert row["memory/train_gib"] == 0.5
    assert row["time/train_s"] >= 0.1  # the slowest rank
    assert ranks[0]["second"] == {}
    assert ranks[0]["collectives"] == 2  # one a row
    assert read_metrics(tmp_path) == [{"step": 1, **row}, {"step": 2}]
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1  # one writer
