"""Run users' code while the engine samples: in worker processes, in threads, or directly.

    pool = Pool(extras.processes(2), timeout_s=10.0, retries=1)
    pool.submit("a key", function, *arguments)  # processes need picklable functions and arguments
    for done in pool.poll(timeout_s=0.0):
        done.key, done.value, done.failure

Calls have a time limit and are retried; attempts, errors, time-outs and crashes are counted. `poll`
never raises what the function raised. One thread drives a pool, between steps of the engine. Run
CPU-bound code in processes (`extras.processes`): a busy thread makes the engine four to five times
slower.
"""

from __future__ import annotations

import asyncio
import inspect
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

from r3.errors import Explained
from r3.user_code.calls import Failure, event_loop, failure_of, outcome, stop_event_loop

_LONGEST_BACKOFF_S = 60.0


@dataclass(frozen=True, slots=True)
class Done:
    """A call that has ended, its retries included."""

    key: Hashable
    value: Any
    failure: Failure | None


class WorkerError(Explained):
    """Worker processes cannot be started."""


Ended = tuple[int, Any, Failure | None]
"""A call in a place that has ended: its token, and its value or failure."""


class Place:
    """Where calls run. Each call has a token, which is used once."""

    def __init__(self) -> None:
        # From any thread. An exception is of the place itself: it ends the run.
        self._ended: queue.SimpleQueue[Ended | BaseException] = queue.SimpleQueue()

    def has_room(self) -> bool:
        """Whether a call can start now."""
        return True

    def start(self, token: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        """Start a call."""
        raise NotImplementedError

    def abandon(self, token: int) -> None:
        """Stop a call, or at least ignore its result."""

    def collect(self, timeout_s: float) -> list[Ended]:
        """Calls that have ended; waits at most `timeout_s` for the first one."""
        ended: list[Ended] = []
        with suppress(queue.Empty):
            while True:
                wait_s = 0.0 if ended else timeout_s
                result = self._ended.get(block=wait_s > 0, timeout=wait_s)
                if isinstance(result, BaseException):
                    raise result
                ended.append(result)
        return ended

    def close(self) -> None:
        """Stop everything that was started."""


@dataclass(slots=True)
class _Call:
    key: Hashable
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    retries: int
    attempts: int = 0
    deadline: float = 0.0
    due: float = 0.0


class Pool:
    """Calls in a place, each with a time limit and retries.

    The n-th retry waits `backoff_s` * 2^(n-1) seconds, at most a minute, or as long as the failure
    asks.

    Attributes:
        counts: calls, errors, timeouts, crashes and retries since it was last cleared.
        place: where they run.
    """

    def __init__(
        self,
        place: Place,
        *,
        timeout_s: float,
        retries: int = 0,
        backoff_s: float = 0.0,
        limit: float = float("inf"),
    ) -> None:
        """Start nothing yet.

        Args:
            limit: calls at once, without abandoned ones.
        """
        self.counts: Counter[str] = Counter()
        self.place = place
        self._timeout_s = timeout_s
        self._retries = retries
        self._backoff_s = backoff_s
        self._limit = limit
        self._waiting: deque[_Call] = deque()
        self._later: list[_Call] = []  # to be tried again, when it is time
        self._running: dict[int, _Call] = {}
        self._tokens = 0

    @property
    def outstanding(self) -> int:
        """Calls submitted and not yet returned by `poll`."""
        return len(self._waiting) + len(self._later) + len(self._running)

    def submit(self, key: Hashable, function: Callable[..., Any], *arguments: Any) -> None:
        """Call `function(*arguments)` as soon as there is room."""
        self._submit(_Call(key, function, arguments, self._retries))

    def submit_once(self, key: Hashable, function: Callable[..., Any], *arguments: Any) -> None:
        """Submit a call that is never retried."""
        self._submit(_Call(key, function, arguments, 0))

    def cancel(
        self,
        keep: Callable[[Hashable], bool],
        *,
        keep_started: Callable[[Hashable], bool] = lambda _: False,
    ) -> set[Hashable]:
        """Abandon calls; `poll` returns none of them.

        Args:
            keep: by key, calls that continue.
            keep_started: by key, calls that continue if they have started.

        Returns:
            The keys of the abandoned calls.
        """
        abandoned = set()
        for token, call in list(self._running.items()):
            if not (keep(call.key) or keep_started(call.key)):
                del self._running[token]
                self.place.abandon(token)
                abandoned.add(call.key)
        unstarted = [*self._waiting, *self._later]
        self._waiting = deque(call for call in self._waiting if keep(call.key))
        self._later = [call for call in self._later if keep(call.key)]
        return abandoned | {call.key for call in unstarted if not keep(call.key)}

    def poll(self, timeout_s: float = 0.0) -> list[Done]:
        """Calls that have ended; waits at most `timeout_s` for the first one."""
        until = time.monotonic() + timeout_s
        done: list[Done] = []
        while self.outstanding and not done:
            self._start_waiting()
            now = time.monotonic()
            events = [call.deadline for call in self._running.values()] + [
                call.due for call in self._later
            ]
            soonest = min([until, *events])
            for token, value, failure in self.place.collect(max(0.0, soonest - now)):
                if token in self._running:  # else it was abandoned
                    done += self._ended(self._running.pop(token), value, failure)
            now = time.monotonic()
            for token in [token for token, call in self._running.items() if call.deadline <= now]:
                self.place.abandon(token)
                failure = Failure("timeout", f"not done after {self._timeout_s:g} s")
                done += self._ended(self._running.pop(token), None, failure)
            self._start_waiting()
            if now >= until:
                break
        return done

    def close(self) -> None:
        """Stop everything that was started; outstanding calls are lost."""
        self.place.close()
        self._waiting.clear()
        self._later.clear()
        self._running.clear()

    def _submit(self, call: _Call) -> None:
        self.counts["calls"] += 1
        self._waiting.append(call)
        self._start_waiting()

    def _start_waiting(self) -> None:
        if self._later:
            now = time.monotonic()
            self._waiting += [call for call in self._later if call.due <= now]
            self._later = [call for call in self._later if call.due > now]
        while self._waiting and len(self._running) < self._limit and self.place.has_room():
            call = self._waiting.popleft()
            call.attempts += 1
            call.deadline = time.monotonic() + self._timeout_s
            self._tokens += 1
            self._running[self._tokens] = call
            self.place.start(self._tokens, call.function, call.arguments)

    def _ended(self, call: _Call, value: Any, failure: Failure | None) -> list[Done]:
        if failure is None:
            return [Done(call.key, value, None)]
        plural = {"error": "errors", "timeout": "timeouts", "crash": "crashes"}
        self.counts[plural[failure.kind]] += 1
        if call.attempts <= call.retries and failure.again:
            self.counts["retries"] += 1
            pause = min(self._backoff_s * 2.0 ** (call.attempts - 1), _LONGEST_BACKOFF_S)
            call.due = time.monotonic() + max(pause, failure.wait_s)
            self._later.append(call)
            return []
        return [Done(call.key, None, failure)]


class Here(Place):
    """Runs calls directly in the caller's thread: for functions that take microseconds."""

    def start(self, token: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self._ended.put((token, *outcome(function, arguments)))


class Lane:
    """A thread for calls that follow one another: what they open may belong to their thread."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        name = f"r3-lane-{id(self)}"
        threading.Thread(target=_work_off, args=(self._work,), daemon=True, name=name).start()

    def put(self, work: Callable[[], None]) -> None:
        """Run a function after those before it."""
        self._work.put(work)

    def leave(self) -> None:
        """Go on in another thread: a call hangs in this one."""
        self.end()
        self._begin()

    def end(self) -> None:
        """End the thread after what it has to do."""
        self._work.put(None)


def _work_off(work: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (function := work.get()) is not None:
        function()


@dataclass(frozen=True, slots=True)
class InLane:
    """A function whose calls `Threads` makes in a lane."""

    lane: Lane
    function: Callable[..., Any]

    def __call__(self, *arguments: Any) -> Any:
        return self.function(*arguments)


class Threads(Place):
    """A thread for each call that waits for something else; coroutines share the event loop.

    A thread cannot be killed: one that hangs is abandoned, and its later result is ignored.
    """

    _used: ClassVar[set[Threads]] = set()  # those whose calls may need the event loop

    def __init__(self) -> None:
        super().__init__()
        self._tasks: dict[int, Any] = {}
        self._lanes: dict[int, Lane] = {}

    def start(self, token: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self._used.add(self)
        if inspect.iscoroutinefunction(function):
            coroutine = self._await(token, function, arguments)
            self._tasks[token] = asyncio.run_coroutine_threadsafe(coroutine, event_loop())
        else:
            work = lambda: self._ended.put((token, *outcome(function, arguments)))  # noqa: E731
            if isinstance(function, InLane):
                self._lanes[token] = function.lane
                function.lane.put(work)
            else:
                threading.Thread(target=work, daemon=True, name=f"r3-call-{token}").start()

    async def _await(
        self, token: int, function: Callable[..., Any], arguments: tuple[Any, ...]
    ) -> None:
        try:
            self._ended.put((token, await function(*arguments), None))
        except BaseException as error:  # users' code may raise anything, CancelledError too
            task, is_cancelled = asyncio.current_task(), isinstance(error, asyncio.CancelledError)
            if is_cancelled and task and task.cancelling():
                raise  # abandoned
            self._ended.put((token, None, failure_of(error)))

    def abandon(self, token: int) -> None:
        if token in self._tasks:
            self._tasks.pop(token).cancel()
        if token in self._lanes:
            self._lanes.pop(token).leave()

    def collect(self, timeout_s: float) -> list[Ended]:
        ended = super().collect(timeout_s)
        for token, _, _ in ended:
            self._tasks.pop(token, None)
            self._lanes.pop(token, None)
        return ended

    def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        self._tasks.clear()
        self._used.discard(self)
        if not self._used:
            stop_event_loop()
