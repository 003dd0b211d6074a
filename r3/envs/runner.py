"""Run the environments of many conversations while the engine samples."""

from __future__ import annotations

import asyncio
import inspect
import pickle
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from r3.config import EnvConfig
from r3.config.arguments import keyword_arguments
from r3.envs import ENVIRONMENTS, Environment, Step, checked_messages, checked_step, find
from r3.types import Message, Prompt
from r3.user_code.loading import load
from r3.user_code.values import own_copy
from r3.user_code.workers import Failure, Here, Place, Pool, Processes, Threads

_CLOSE_POLL_S = 0.2

_Spec = tuple[str, dict[str, Any]]  # what env.path or env.name names, and env.args


class StateError(RuntimeError):
    """An environment cannot be pickled, or its pickle not be read."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What an environment returned: its first messages, a step, or a failure after all retries."""

    key: int
    opened: tuple[Message, ...] | None = None
    step: Step | None = None
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class _Closing:
    """Key of a call of `close`; unlike a conversation's key it gets no reply."""

    key: int


class Environments:
    """One environment per conversation in flight, by key.

    Built-in environments take microseconds and run in the caller's thread. A user's environment
    runs in threads, as an `async def` on an event loop, or, with `env.workers`, in processes. It
    then travels to a worker and back, pickled, with every call, so a worker that is killed loses
    nothing.

    An environment with a method `close` is closed exactly once when its conversation ends, however
    it ends. If a call failed in a worker process, `close` gets the environment as it was before
    that call. A thread cannot be killed: after a time-out there, `close` runs while the abandoned
    call may still be running.

    Attributes:
        tools: JSON schemas for the chat template.
        stop: strings that end a turn, from the environment and `env.stop`.
        one_turn: whether every conversation is the prompt and one response.
    """

    def __init__(self, settings: EnvConfig) -> None:
        """Load the class; workers start with the first conversation.

        Raises:
            ConfigError: the class cannot be loaded or used.
        """
        self.settings = settings
        self._class = cast("type[Environment]", find(settings))
        arguments = keyword_arguments(settings.args)
        self._factory = partial(_created, self._class, arguments)
        self._spec = (settings.path or settings.name, arguments)
        self.tools: Sequence[Any] = own_copy(tuple(getattr(self._class, "tools", ())))
        self.stop = tuple(dict.fromkeys([*getattr(self._class, "stop", ()), *settings.stop]))
        self.one_turn = self._class is ENVIRONMENTS["single_turn"]
        self._has_close = hasattr(self._class, "close")
        self._is_async = any(
            inspect.iscoroutinefunction(getattr(self._class, name, None))
            for name in ("reset", "step", "close")
        )
        place: Place
        if settings.workers:
            place = Processes(settings.workers, preload=[settings.path] if settings.path else [])
        else:
            place = Threads() if settings.path else Here()
        self._pool = Pool(place, timeout_s=settings.timeout_s, retries=settings.retries)
        # The environments themselves, or their pickles if they run in workers.
        self._states: dict[int, Any] = {}
        self._created: dict[int, Prompt] = {}  # conversations whose environment is being created
        # Conversations whose creation or reset is outstanding.
        self._opening: set[Hashable] = set()
        self._is_ending = False
        self._num_closing = 0
        self._close_failed = False

    @property
    def outstanding(self) -> int:
        """Calls that were submitted and have not returned."""
        return self._pool.outstanding

    def open(self, key: int, prompt: Prompt) -> None:
        """Begin a conversation."""
        source = self._spec if self.settings.workers else self._factory
        if self._has_close:
            # Created in a call of its own, so that it can be closed if `reset` fails.
            self._created[key] = prompt
            self._opening.add(key)
            self._pool.submit(key, _create_in_worker if self.settings.workers else _create, source)
        elif self.settings.workers:
            self._pool.submit(key, _open_in_worker, source, prompt)
        else:
            self._pool.submit(key, _open_async if self._is_async else _open, source, prompt)

    def send(self, key: int, message: Message) -> None:
        """Give the environment of a conversation the model's message."""
        self._pool.submit(key, self._method(_step), self._states[key], message)

    def suspend(self, key: int) -> bytes:
        """Remove the environment of a conversation that a later step resumes.

        Returns:
            Its state for `resume`.

        Raises:
            StateError: it cannot be pickled. The conversation keeps it.
        """
        state = self._states[key]
        if not self.settings.workers:
            try:
                state = pickle.dumps(state)
            except Exception as error:  # the user's objects may raise anything
                raise StateError(f"{type(error).__name__}: {error}") from error
        del self._states[key]
        return bytes(state)

    def resume(self, key: int, state: bytes) -> None:
        """Continue with an environment that was suspended.

        Raises:
            StateError: it cannot be restored.
        """
        self._states[key] = self._restored(state)

    def discard(self, state: bytes) -> None:
        """Close the environment of a suspended conversation that is not resumed."""
        if self._has_close:
            try:
                self._close(-1, self._restored(state))
            except StateError as error:
                self._warn_of_close(Failure("error", str(error)))

    def _restored(self, state: bytes) -> Any:
        if self.settings.workers:
            return state
        try:
            return pickle.loads(state)
        except Exception as error:  # the user's objects may raise anything
            raise StateError(f"{type(error).__name__}: {error}") from error

    def forget(self, key: int) -> None:
        """Close the environment of a conversation that is over."""
        state = self._states.pop(key, None)
        if state is not None and self._has_close:
            self._close(key, state)

    def poll(self, timeout_s: float = 0.0) -> list[Reply]:
        """Return what environments returned.

        Waits at most `timeout_s` for the first reply, and not at all if no call is outstanding.
        """
        replies = []
        for done in self._pool.poll(timeout_s):
            key: Any = done.key
            if isinstance(key, _Closing):
                self._closed(done.failure)
            elif done.failure is not None:
                self._created.pop(key, None)
                self._opening.discard(key)
                replies.append(Reply(key, failure=done.failure))
            elif key in self._created:
                self._states[key], prompt = done.value, self._created.pop(key)
                if self._is_ending:
                    self._opening.discard(key)
                else:
                    self._pool.submit(key, self._method(_reset), done.value, prompt)
            else:
                self._states[key], value = done.value
                self._opening.discard(key)
                is_step = isinstance(value, Step)
                replies.append(Reply(key, step=value) if is_step else Reply(key, opened=value))
        return replies

    def take_counts(self) -> Counter[str]:
        """Return calls, errors, timeouts, crashes and retries since the last call."""
        counts, self._pool.counts = self._pool.counts, Counter()
        return counts

    def close_all(self) -> None:
        """Abandon calls in flight and close every environment that is still open.

        Waits until `close` has returned everywhere, for at most `env.timeout_s` per call.
        """
        # Calls in flight that close an environment, or open one, are awaited: what a `reset` has
        # opened must be closed too. Conversations' other calls are not.
        self._is_ending = True
        self._opening -= self._pool.cancel(
            keep=lambda key: isinstance(key, _Closing),
            keep_started=lambda key: key in self._opening,
        )
        self._created = {key: self._created[key] for key in self._created.keys() & self._opening}
        while True:
            for key in [key for key in self._states if key not in self._opening]:
                self.forget(key)
            if not self._num_closing and not self._opening:
                break
            self.poll(_CLOSE_POLL_S)
        self._is_ending = False

    def close(self) -> None:
        """Close environments that are still open, then end workers and threads."""
        self.close_all()
        self._pool.close()

    def _method(self, method: Any) -> Any:
        """The form of `_reset`, `_step` or `_close` for the place where calls run."""
        if self.settings.workers:
            return _IN_WORKER[method]
        return _ON_LOOP[method] if self._is_async else method

    def _close(self, key: int, state: Any) -> None:
        self._num_closing += 1
        # Never retried: an environment is closed once.
        self._pool.submit_once(_Closing(key), self._method(_close), state)

    def _closed(self, failure: Failure | None) -> None:
        self._num_closing -= 1
        if failure is not None:
            self._warn_of_close(failure)

    def _warn_of_close(self, failure: Failure) -> None:
        if not self._close_failed:
            self._close_failed = True  # one warning per run; env/errors counts all
            warnings.warn(
                f"{self._spec[0]}: close() failed ({failure.kind}): {failure.text}", stacklevel=2
            )


def _created(found: Callable[..., Environment], arguments: Mapping[str, Any]) -> Environment:
    return found(**own_copy(arguments))


def _create(factory: Callable[[], Environment]) -> Environment:
    return factory()


def _open(
    factory: Callable[[], Environment], prompt: Prompt
) -> tuple[Environment, tuple[Message, ...]]:
    return _reset(factory(), prompt)


def _reset(environment: Environment, prompt: Prompt) -> tuple[Environment, tuple[Message, ...]]:
    return environment, checked_messages(_awaited(environment.reset(own_copy(prompt))), "reset")


def _step(environment: Environment, message: Message) -> tuple[Environment, Step]:
    return environment, checked_step(_awaited(environment.step(own_copy(message))))


def _close(environment: Any) -> None:
    _awaited(environment.close())


def _awaited(value: Any) -> Any:
    return asyncio.run(_settled(value)) if inspect.isawaitable(value) else value


async def _settled(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


async def _open_async(
    factory: Callable[[], Environment], prompt: Prompt
) -> tuple[Environment, tuple[Message, ...]]:
    return await _reset_async(factory(), prompt)


async def _reset_async(
    environment: Environment, prompt: Prompt
) -> tuple[Environment, tuple[Message, ...]]:
    return environment, checked_messages(
        await _settled(environment.reset(own_copy(prompt))), "reset"
    )


async def _step_async(environment: Environment, message: Message) -> tuple[Environment, Step]:
    return environment, checked_step(await _settled(environment.step(own_copy(message))))


async def _close_async(environment: Any) -> None:
    await _settled(environment.close())


# In a worker. An environment travels as bytes that only workers open: the main process needs none
# of its classes.


def _create_in_worker(spec: _Spec) -> bytes:
    return pickle.dumps(_factory(spec)())


def _open_in_worker(spec: _Spec, prompt: Prompt) -> tuple[bytes, tuple[Message, ...]]:
    environment, messages = _open(_factory(spec), prompt)
    return pickle.dumps(environment), messages


def _reset_in_worker(state: bytes, prompt: Prompt) -> tuple[bytes, tuple[Message, ...]]:
    environment, messages = _reset(pickle.loads(state), prompt)
    return pickle.dumps(environment), messages


def _step_in_worker(state: bytes, message: Message) -> tuple[bytes, Step]:
    environment, step = _step(pickle.loads(state), message)
    return pickle.dumps(environment), step


def _close_in_worker(state: bytes) -> None:
    _close(pickle.loads(state))


def _factory(spec: _Spec) -> Callable[[], Environment]:
    name, arguments = spec
    return partial(_created, ENVIRONMENTS[name] if name in ENVIRONMENTS else load(name), arguments)


_ON_LOOP = {_reset: _reset_async, _step: _step_async, _close: _close_async}
_IN_WORKER = {_reset: _reset_in_worker, _step: _step_in_worker, _close: _close_in_worker}
