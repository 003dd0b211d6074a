"""What the moves of the device's memory measure and say."""

from dataclasses import replace
from typing import Any

from r3.metrics import Max
from r3.runtime.device import Device
from r3.sync import Residency, State
from tests.errors import Capsys, Patch
from tests.memory import CPU


class Side:
    """An engine, or a policy, that moves nothing."""

    is_asleep = is_onloaded = True

    def __getattr__(self, _move: str) -> Any:
        return lambda *_: None


def test_fragments_are_measured_after_each_offload_and_reported_once(
    monkeypatch: Patch, capsys: Capsys
) -> None:
    side: Any = Side()
    residency = Residency(side, side, replace(CPU, rank=3))
    assert "memory/fragmented_gib" not in residency.metrics()  # nothing was offloaded yet
    known, errors = (0.4, 1.5, 11.0), []
    measured = iter(known)
    monkeypatch.setattr(Device, "fragmented_gib", lambda _: next(measured))
    for gib in known:
        for state in (State.SYNC, State.GENERATE, State.TRAIN):
            residency.move(state)
        assert residency.metrics()["memory/fragmented_gib"] == Max(gib)
        errors.append(capsys.readouterr().err)
    assert errors[0] == errors[2] == ""
    assert errors[1].startswith("warning: rank 3: memory/fragmented_gib = 1.5: ")
