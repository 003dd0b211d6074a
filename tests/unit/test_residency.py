"""What the moves of the device's memory measure and say."""

from typing import Any

import torch

from r3.metrics import Max
from r3.runtime.device import Device
from r3.sync import Residency, State
from tests.errors import Capsys


class Fragmented(Device):
    """A device on which the next measurements of fragments are known."""

    def fragmented_gib(self) -> float:
        return NEXT.pop(0)


NEXT: list[float] = []


class Side:
    """An engine, or a policy, that moves nothing."""

    is_asleep = is_onloaded = True

    def __getattr__(self, _move: str) -> Any:
        return lambda *_: None


def test_fragments_are_measured_after_each_offload_and_reported_once(capsys: Capsys) -> None:
    here: dict[str, Any] = dict(rank=3, local_rank=0, world_size=1, host="here")
    device = Fragmented(torch=torch.device("cpu"), is_cuda=False, **here)
    engine: Any = Side()
    policy: Any = Side()
    residency = Residency(engine, policy, device)
    assert "memory/fragmented_gib" not in residency.metrics()  # nothing was offloaded yet
    NEXT[:] = [0.4, 1.5, 11.0]
    errors = []
    for gib in list(NEXT):
        for state in (State.SYNC, State.GENERATE, State.TRAIN):
            residency.move(state)
        assert residency.metrics()["memory/fragmented_gib"] == Max(gib)
        errors.append(capsys.readouterr().err)
    assert errors[0] == errors[2] == ""
    assert errors[1].startswith("warning: rank 3: memory/fragmented_gib = 1.5: ")
