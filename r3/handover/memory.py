"""Who owns the device's memory now. TRAIN -> SYNC -> GENERATE -> TRAIN; any other move is an error that says the state.

state      policy                                      engine
TRAIN      weights, gradients, optimizer state         asleep
SYNC       weights                                     weights awake, being replaced
GENERATE   weights                                     weights and KV cache awake; a reward model is on the device too
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any

from r3.metrics.reduce import Max
from r3.runtime.device import Device

if TYPE_CHECKING:
    from r3.engine import Engine
    from r3.policy import Policy
    from r3.rewards.model import RewardModel


class State(Enum):
    """Owner of the memory."""

    TRAIN = "train"
    SYNC = "sync"
    GENERATE = "generate"


_NEXT = {State.TRAIN: State.SYNC, State.SYNC: State.GENERATE, State.GENERATE: State.TRAIN}


class ResidencyError(RuntimeError):
    """A move that would have both worlds in memory at once, or neither."""


class Residency:
    """Hands the memory over between one engine and one policy, and remembers what each state took.

    Attributes:
        used_gib: memory in use on entering each state, and "residue": what stays when both worlds have given up theirs.
    """

    def __init__(
        self,
        engine: Engine,
        policy: Policy,
        device: Device,
        *,
        reward_model: RewardModel | None = None,
    ) -> None:
        assert engine.is_asleep and policy.is_onloaded, (
            "a run begins in TRAIN: engine asleep, policy onloaded"
        )
        self._engine, self._policy, self._device = engine, policy, device
        self._reward_model = reward_model
        self.state = State.TRAIN
        self.used_gib: dict[str, float] = {State.TRAIN.value: device.used_gib()}

    def move(self, to: State) -> None:
        """Hand the memory over. Local to the rank: no collective."""
        if to is not _NEXT[self.state]:
            raise ResidencyError(
                f"rank {self._device.rank}: memory is in {self.state.name}, the only way on is {_NEXT[self.state].name}, "
                f"not {to.name}"
            )
        if to is State.SYNC:
            self.note(State.TRAIN.value)
            self._policy.offload()
            self.note("residue")
            self._engine.wake("weights")
            self.note(State.SYNC.value)
        elif to is State.GENERATE:
            self._engine.wake("kv_cache")
            if self._reward_model:
                self._reward_model.wake(self._device)
        else:
            self.note(State.GENERATE.value)
            if self._reward_model:
                self._reward_model.sleep(self._device)
            self._engine.sleep()
            self._policy.onload()
        self.state = to

    def metrics(self) -> dict[str, Any]:
        """Partials of memory/*: what each state took on this rank, in GiB."""
        parts: dict[str, Any] = {
            f"memory/{name}_gib": Max(gib) for name, gib in self.used_gib.items()
        }
        return parts | {"memory/peak_gib": Max(max(self.used_gib.values()))}

    def note(self, name: str) -> None:
        """Measure the memory in use now under `name`."""
        self.used_gib[name] = self._device.used_gib()
