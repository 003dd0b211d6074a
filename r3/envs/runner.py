"""Many conversations' environments at once: opened, stepped and answered while the engine goes on."""

from __future__ import annotations

import asyncio
import inspect
import pickle
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from r3.config import EnvConfig
from r3.envs import ENVIRONMENTS, Environment, Step, checked_messages, checked_step, find
from r3.runtime.workers import Failure, Here, Place, Pool, Processes, Threads, load
from r3.types import Message, Prompt


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back for a conversation: its first messages, a step, or a failure after all retries."""

    key: int
    opened: tuple[Message, ...] | None = None
    step: Step | None = None
    failure: Failure | None = None


class Environments:
    """One environment for each conversation in flight, by key.

    Built-in ones take microseconds and run here. A user's runs in threads, as an `async def` on an event loop, or, with
    `env.workers`, in processes: there the environment travels to the worker and back with every call, so that a worker that
    is killed takes nothing with it.

    Attributes:
        tools: for the chat template; stop: strings that end a turn, the environment's and `env.stop`'s.
        one_turn: whether every conversation is the prompt and one answer.
    """

    def __init__(self, settings: EnvConfig) -> None:
        """Load the class; raises ConfigError when it cannot be used. Workers start with the first conversation."""
        self.settings = settings
        self._class = find(settings)
        self._spec = settings.path or settings.name
        self.tools: Sequence[Any] = tuple(getattr(self._class, "tools", ()))
        self.stop = tuple(dict.fromkeys([*getattr(self._class, "stop", ()), *settings.stop]))
        self.one_turn = self._class is ENVIRONMENTS["single_turn"]
        self._is_async = any(
            inspect.iscoroutinefunction(getattr(self._class, name)) for name in ("reset", "step")
        )
        place: Place
        if settings.workers:
            place = Processes(settings.workers, preload=[settings.path] if settings.path else [])
        else:
            place = Threads() if settings.path else Here()
        self._pool = Pool(place, timeout_s=settings.timeout_s, retries=settings.retries)
        self._states: dict[
            int, Any
        ] = {}  # the environment itself, or its pickle when it lives in workers

    @property
    def outstanding(self) -> int:
        """Conversations that wait for their environment."""
        return self._pool.outstanding

    def open(self, key: int, prompt: Prompt) -> None:
        """Begin a conversation."""
        if self.settings.workers:
            self._pool.submit(key, _open_there, self._spec, prompt)
        elif self._is_async:
            self._pool.submit(key, _open_async, self._class, prompt)
        else:
            self._pool.submit(key, _open, self._class, prompt)

    def send(self, key: int, message: Message) -> None:
        """Give the environment of a conversation the model's message."""
        step = _step_there if self.settings.workers else _step_async if self._is_async else _step
        self._pool.submit(key, step, self._states[key], message)

    def suspend(self, key: int) -> bytes:
        """Take the environment of a conversation that goes on later, as bytes that only `resume` opens.

        Raises what pickling an object raises that cannot be pickled.
        """
        state = self._states.pop(key)
        return state if self.settings.workers else pickle.dumps(state)

    def resume(self, key: int, state: bytes) -> None:
        """Go on with an environment that was suspended."""
        self._states[key] = state if self.settings.workers else pickle.loads(state)

    def forget(self, key: int) -> None:
        """The conversation is over."""
        self._states.pop(key, None)

    def poll(self, timeout_s: float = 0.0) -> list[Reply]:
        """What came back; waits at most so long for the first, not at all when nothing is outstanding."""
        replies = []
        for done in self._pool.poll(timeout_s):
            key: Any = done.key
            if done.failure is not None:
                replies.append(Reply(key, failure=done.failure))
                continue
            self._states[key], value = done.value
            is_step = isinstance(value, Step)
            replies.append(Reply(key, step=value) if is_step else Reply(key, opened=value))
        return replies

    def take_counts(self) -> Counter[str]:
        """Calls, errors, timeouts, crashes and retries since last asked."""
        counts, self._pool.counts = self._pool.counts, Counter()
        return counts

    def close(self) -> None:
        """End workers and threads."""
        self._pool.close()
        self._states.clear()


def _open(factory: type[Environment], prompt: Prompt) -> tuple[Environment, tuple[Message, ...]]:
    environment = factory()
    return environment, checked_messages(_awaited(environment.reset(prompt)), "reset")


def _step(environment: Environment, message: Message) -> tuple[Environment, Step]:
    return environment, checked_step(_awaited(environment.step(message)))


def _awaited(value: Any) -> Any:
    return asyncio.run(_settled(value)) if inspect.isawaitable(value) else value


async def _open_async(
    factory: type[Environment], prompt: Prompt
) -> tuple[Environment, tuple[Message, ...]]:
    environment = factory()
    return environment, checked_messages(await _settled(environment.reset(prompt)), "reset")


async def _step_async(environment: Environment, message: Message) -> tuple[Environment, Step]:
    return environment, checked_step(await _settled(environment.step(message)))


async def _settled(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def _open_there(spec: str, prompt: Prompt) -> tuple[bytes, tuple[Message, ...]]:
    """In a worker: make the environment, and send it home as bytes that only workers open."""
    factory = ENVIRONMENTS[spec] if spec in ENVIRONMENTS else load(spec)
    environment, messages = _open(factory, prompt)
    return pickle.dumps(environment), messages


def _step_there(state: bytes, message: Message) -> tuple[bytes, Step]:
    environment, step = _step(pickle.loads(state), message)
    return pickle.dumps(environment), step
