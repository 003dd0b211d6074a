"""Memory phases of a device: TRAIN -> SYNC -> GENERATE -> TRAIN, in this order only.

state      policy                                engine
TRAIN      weights, gradients, optimizer state   asleep
SYNC       weights                               weights awake, being replaced
GENERATE   weights                               weights and KV cache awake; the reward model too
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any

from r3.metrics.reduce import Max
from r3.runtime.device import Device
from r3.runtime.terminal import say

if TYPE_CHECKING:
    from r3.engine import Engine
    from r3.policy import Policy


class State(Enum):
    """Owner of the memory."""

    TRAIN = "train"
    SYNC = "sync"
    GENERATE = "generate"


_NEXT = {State.TRAIN: State.SYNC, State.SYNC: State.GENERATE, State.GENERATE: State.TRAIN}


_MOST_FRAGMENTED_GIB = 1.0
"""More of it is reported. 11 GiB were measured where one tensor per MoE layer outlived its step."""


class ResidencyError(RuntimeError):
    """A move would put trainer and engine into memory at once, or neither."""


class Residency:
    """Moves the device's memory between policy and engine, and measures what each state uses.

    Attributes:
        state: the present state.
        used_gib: memory in use on entering each state, in GiB, and "residue": what remains when
            both policy and engine have released theirs.
        fragmented_gib: memory in GiB that is in no tensor and cannot be returned to the device
            after the policy's offload; None before the first one.
    """

    def __init__(
        self,
        engine: Engine | None,
        policy: Policy,
        device: Device,
        *,
        reward_model: Any = None,
    ) -> None:
        """A run without an engine stays in TRAIN."""
        assert (engine is None or engine.is_asleep) and policy.is_onloaded, (
            "a run begins in TRAIN: engine asleep, policy onloaded"
        )
        self._engine, self._policy, self._device = engine, policy, device
        self._reward_model = reward_model
        self.state = State.TRAIN
        self.used_gib: dict[str, float] = {State.TRAIN.value: device.used_gib()}
        self.fragmented_gib: float | None = None

    def move(self, to: State) -> None:
        """Move to the next state. Local to the rank: no collective.

        Raises:
            ResidencyError: `to` is not the state after the present one.
        """
        if to is not _NEXT[self.state]:
            raise ResidencyError(
                f"rank {self._device.rank}: memory is in state {self.state.name}, "
                f"the next state is {_NEXT[self.state].name}, not {to.name}"
            )
        assert self._engine is not None, "memory changes hands only in a run with an engine"
        if to is State.SYNC:
            self.note(State.TRAIN.value)
            self._policy.offload()
            self.note("residue")
            self._note_fragments()
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
        """Return partials of memory/*: what each state used on this rank, in GiB."""
        parts: dict[str, Any] = {
            f"memory/{name}_gib": Max(gib) for name, gib in self.used_gib.items()
        }
        if self.fragmented_gib is not None:
            parts["memory/fragmented_gib"] = Max(self.fragmented_gib)
        return parts | {"memory/peak_gib": Max(max(self.used_gib.values()))}

    def note(self, name: str) -> None:
        """Measure the memory in use now under `name`."""
        self.used_gib[name] = self._device.used_gib()

    def _note_fragments(self) -> None:
        """Measure fragments, and warn where they have become many."""
        before, self.fragmented_gib = self.fragmented_gib, self._device.fragmented_gib()
        if (before or 0.0) <= _MOST_FRAGMENTED_GIB < self.fragmented_gib:
            say(
                f"warning: rank {self._device.rank}: memory/fragmented_gib = "
                f"{self.fragmented_gib:.1f}: memory of the device that no tensor uses cannot be "
                "returned, because small tensors lie beside it. The engine has that much less. "
                "Lower engine.kv_cache_gib if it does not fit, and report this",
                error=True,
            )
