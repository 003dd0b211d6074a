"""Worker processes for users' code, by the settings `workers`.

A worker process that hangs or dies is replaced, and only its own call fails. Worker processes
import neither torch nor vllm, and they die with their rank.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from r3.user_code.calls import Failure
from r3.user_code.loading import START_LIMIT_S
from r3.user_code.workers import Ended, Place, WorkerError


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
    root = str(Path(__file__).resolve().parents[3])  # the folder that holds r3/
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", f"from r3.tools.worker import serve; serve({theirs.fileno()})"],
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
