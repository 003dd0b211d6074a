"""Run users' code while the engine samples: in worker processes, in threads, or directly.

    pool = Pool(Processes(2), timeout_s=10.0, retries=1)
    pool.submit("a key", function, *arguments)  # processes need picklable functions and arguments
    for done in pool.poll(timeout_s=0.0):
        done.key, done.value, done.failure

Calls have a time limit and are retried; attempts, errors, time-outs and crashes are counted. `poll`
never raises what the function raised. One thread drives a pool, between steps of the engine. Run
CPU-bound code in processes: a busy thread makes the engine four to five times slower. A worker
process that hangs or dies is replaced, and only its own call fails. Worker processes import neither
torch nor vllm, and they die with their rank.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, ClassVar

from r3.errors import Explained
from r3.user_code.calls import Failure, event_loop, failure_of, outcome, stop_event_loop
from r3.user_code.loading import START_LIMIT_S

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
                found = self._ended.get(block=wait_s > 0, timeout=wait_s)
                if isinstance(found, BaseException):
                    raise found
                ended.append(found)
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
        except asyncio.CancelledError:
            raise  # abandoned
        except BaseException as error:  # users' code may raise anything
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


@dataclass(slots=True)
class _Worker:
    process: subprocess.Popen[bytes]
    connection: Connection
    token: int | None = None
    ready: bool = False
    start_deadline: float = 0.0


class Processes(Place):
    """A fixed number of fresh interpreters, one call at a time each. A worker that is stopped or
    dies is replaced.

    Args:
        count: workers, started at the first call.
        preload: `path/to/file.py:name` of what calls need, loaded before a worker takes calls, so
            that loading does not count as time of a call.
    """

    def __init__(self, count: int, *, preload: Sequence[str] = ()) -> None:
        super().__init__()
        self._count = count
        self._preload = tuple(preload)
        self._workers: list[_Worker] = []

    def has_room(self) -> bool:
        while len(self._workers) < self._count:
            self._workers.append(_spawn(self._preload))
        return any(worker.ready and worker.token is None for worker in self._workers)

    def start(self, token: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        worker = next(worker for worker in self._workers if worker.ready and worker.token is None)
        worker.token = token
        # A worker that died while idle is reported by `collect`.
        with suppress(BrokenPipeError, ConnectionResetError):
            worker.connection.send((function, arguments))

    def abandon(self, token: int) -> None:
        self._replace(next(worker for worker in self._workers if worker.token == token))

    def collect(self, timeout_s: float) -> list[Ended]:
        self.has_room()
        ended: list[Ended] = []
        by_connection = {id(worker.connection): worker for worker in self._workers}
        for connection in wait([worker.connection for worker in self._workers], timeout_s):
            worker = by_connection[id(connection)]
            try:
                value, failure = worker.connection.recv()
            except (EOFError, ConnectionResetError):
                self._died(worker, ended)
                continue
            if worker.ready:
                assert worker.token is not None, "a worker returned a result that no call waits for"
                ended.append((worker.token, value, failure))
                worker.token = None
            elif failure is not None:
                raise WorkerError(
                    f"a worker process could not load {', '.join(self._preload)}:\n{failure.text}"
                )
            worker.ready = True
        now = time.monotonic()
        if late := [
            worker for worker in self._workers if not worker.ready and worker.start_deadline < now
        ]:
            raise WorkerError(
                f"{len(late)} worker processes did not start in {START_LIMIT_S:.0f} s"
            )
        return ended

    def close(self) -> None:
        for worker in self._workers:
            _end(worker)
        self._workers.clear()

    def _died(self, worker: _Worker, ended: list[Ended]) -> None:
        code = worker.process.wait()
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        if not worker.ready:
            raise WorkerError(f"a worker process ended with {how} before it could take a call")
        if worker.token is not None:
            ended.append(
                (worker.token, None, Failure("crash", f"its worker process ended with {how}"))
            )
        self._replace(worker)

    def _replace(self, worker: _Worker) -> None:
        _end(worker)
        self._workers[self._workers.index(worker)] = _spawn(self._preload)


def _spawn(preload: Sequence[str]) -> _Worker:
    """Start a fresh interpreter, not a fork: torch, vllm, their threads and locks stay out."""
    ours, theirs = socket.socketpair()
    root = str(Path(__file__).resolve().parents[2])  # the folder that holds r3/
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    with theirs:
        process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                f"from r3.user_code.calls import serve; serve({theirs.fileno()})",
            ],
            env=environment,
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # so that it can be killed with everything it started
        )
    connection = Connection(ours.detach())
    connection.send((os.getpid(), tuple(preload), sys.path))
    return _Worker(process, connection, start_deadline=time.monotonic() + START_LIMIT_S)


def _end(worker: _Worker) -> None:
    with suppress(ProcessLookupError):
        os.killpg(worker.process.pid, signal.SIGKILL)
    worker.process.wait()
    worker.connection.close()
