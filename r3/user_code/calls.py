"""Call users' code: copies of its arguments, its numbers, how it failed.

Environments, workflows, rewards, losses and advantages get copies. If one changes what it was
given, no other call, sample, step or retry sees the change. A run may start hundreds of workers, so
this module and what it imports stay small.
"""

from __future__ import annotations

import copy
import inspect
import math
import os
import threading
import traceback
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import cache
from numbers import Real
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from r3.types import Message, Prompt
from r3.user_code.loading import as_named

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")

_UNCHANGEABLE = frozenset({str, int, float, bool, bytes, type(None)})


class CallError(Exception):
    """An error with advice: whether a retry may help, and how long to wait before it."""

    def __init__(self, text: str, *, again: bool = True, wait_s: float = 0.0) -> None:
        super().__init__(text)
        self.again, self.wait_s = again, wait_s


class CallTimeout(CallError):
    """A call that limits its own time has taken too long."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a call has no value: an exception, a time-out, or the end of its process.

    `again`: whether trying again may help; `wait_s`: not before so many seconds (`CallError`).
    """

    kind: Literal["error", "timeout", "crash"]
    text: str
    again: bool = True
    wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Step:
    """What a step of an environment returned, checked."""

    messages: tuple[Message, ...]
    reward: float | None
    done: bool
    metrics: Mapping[str, float] = field(default_factory=dict)


class StateError(RuntimeError):
    """An environment cannot be pickled, or its pickle not be read."""


def own_copy(value: T) -> T:
    """Return a copy that shares nothing changeable with the value.

    Mappings become dicts. Tokens of a prompt are not copied: they cannot be changed.
    """
    return cast("T", _copied(value))


def _copied(value: Any) -> Any:
    kind = type(value)
    if kind in _UNCHANGEABLE:
        return value
    if kind is list:
        return [_copied(entry) for entry in value]
    if kind is tuple:
        return tuple([_copied(entry) for entry in value])
    if kind is Prompt:
        return replace(
            value,
            messages=_copied(value.messages),
            metadata=_copied(value.metadata),
            tools=_copied(value.tools),
        )
    if isinstance(value, Mapping):
        return {key: _copied(entry) for key, entry in value.items()}
    return copy.deepcopy(value)


def number(value: Any) -> float:
    """Return a number of Python, numpy or torch as a finite float; True and False are 1 and 0.

    Raises:
        ValueError: it is something else, or not finite.
    """
    scalar = value
    # numpy's and torch's scalars, booleans included; an array of one number is none.
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        scalar = value.item()
    if not isinstance(scalar, Real | Decimal):
        raise ValueError(f"{value!r}, not a number")
    try:
        is_finite = math.isfinite(scalar)
    except OverflowError:  # an integer beyond all floats
        is_finite = False
    if not is_finite:
        raise ValueError(f"{value}, not a finite number")
    return float(scalar)


def flag(value: Any) -> bool:
    """Return True, False, 1 or 0, also of numpy and torch, as a bool.

    Raises:
        ValueError: it is something else: a text such as "false" would count as true.
    """
    figure = number(value)
    if figure not in (0.0, 1.0):
        raise ValueError(f"{value!r}, neither True nor False")
    return bool(figure)


def awaited(value: Any) -> Any:
    """Run a coroutine to its end; another value is returned as it is.

    All coroutines of a process share one event loop: what users' code keeps between calls, such as
    a client or a lock, belongs to the loop that it was first used on.
    """
    if not inspect.iscoroutine(value):
        return value
    import asyncio  # takes longer than most functions, which are no coroutines
    from contextvars import copy_context

    if threading.current_thread() is not threading.main_thread():
        result, error = asyncio.run_coroutine_threadsafe(_ended(value), event_loop()).result()
    else:  # of a worker process: signals, which some functions need, exist only here
        result, error = _runner().run(_ended(value), context=copy_context())
    if error is not None:
        raise error
    return result


async def _ended(coroutine: Coroutine[Any, Any, Any]) -> tuple[Any, BaseException | None]:
    """Return value or exception: SystemExit would end the loop."""
    try:
        return await coroutine, None
    except BaseException as error:
        return None, error


@cache
def _runner() -> asyncio.Runner:
    import asyncio

    return asyncio.Runner()


_loop: asyncio.AbstractEventLoop | None = None
_loop_lock = threading.Lock()


def event_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of this process, which runs in a thread of its own; start it first."""
    import asyncio

    global _loop
    with _loop_lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, daemon=True, name="r3-async").start()
        return _loop


def stop_event_loop() -> None:
    """Cancel what is left on the event loop and stop it; the next call starts another one."""
    import asyncio

    global _loop
    with _loop_lock:
        if _loop is not None:
            asyncio.run_coroutine_threadsafe(_stop(), _loop)
        _loop = None


async def _stop() -> None:
    """Stop this loop when its tasks have ended: asyncio warns of pending ones."""
    import asyncio

    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    asyncio.get_running_loop().stop()


def outcome(function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[Any, Failure | None]:
    """Call a function, and await what it returns if that is a coroutine: the value or failure."""
    try:
        return awaited(function(*arguments)), None
    except KeyboardInterrupt:  # of the person at the terminal
        raise
    except BaseException as error:
        # Users' code may raise anything, SystemExit too: it becomes the result of its call.
        return None, failure_of(error)


# Parts of errors about what only another thread can do, and what to do about them.
_SIGNALS = ("signal only works in main thread", "signal.alarm()")  # of Python and math-verify
_NO_SIGNALS = (
    "The function sets a time limit of its own by a signal, which threads cannot. Run it in "
    "processes (--reward.workers 2, or --env.workers 2 for an environment), or switch its limit "
    "off (math-verify: parsing_timeout=None, timeout_seconds=None)."
)
_THREADS = ("that same thread", "a different thread", "event loop in thread")
_OTHER_THREAD = (
    "R3 calls a reward function in a new thread each time, and all methods of an environment in "
    "one. Open in the call, or in `reset`, what belongs to a thread, or use processes "
    "(--reward.workers 2), which load and call in one thread. An `async def` has the event loop."
)


def failure_of(error: BaseException) -> Failure:
    """What an exception of users' code is to the run."""
    if isinstance(error, CallError):  # its text is enough without a traceback
        kind: Literal["error", "timeout"] = "timeout" if isinstance(error, CallTimeout) else "error"
        return Failure(kind, str(error), error.again, error.wait_s)
    frames = _from_users_code(error.__traceback__) or error.__traceback__
    frames_text = traceback.format_exception(type(error), error, frames, limit=-6)
    text = as_named("".join(frames_text).rstrip())
    for signs, advice in ((_SIGNALS, _NO_SIGNALS), (_THREADS, _OTHER_THREAD)):
        if any(sign in str(error) for sign in signs):
            text += f"\n{advice}"
    return Failure("error", text)


def _from_users_code(frames: TracebackType | None) -> TracebackType | None:
    """The frames from the first one outside of R3 on: a person looks for a line of their own."""
    package = str(Path(__file__).resolve().parents[1])
    while frames and os.path.abspath(frames.tb_frame.f_code.co_filename).startswith(package):
        frames = frames.tb_next
    return frames
