"""`launch/ranks.py` with CPU ranks forked from a process that has imported everything they need.

    python -m tests.forked_ranks --check --standalone --nproc_per_node 2 train.py PRESET ...

Imports are most of a start, and every rank would make the same ones. CUDA does not survive a fork,
so tests with GPUs use the launcher itself.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from r3.launch.ranks import launch, torchrun
from r3.runtime import die_with_parent, importing, visible

_POLL_S = 0.02
_PR_SET_NAME = 15


def start_torchrun(argv: list[str]) -> ForkedRank:
    """Fork the process that runs torchrun."""
    words = (sys.executable, "-u", "-m", "tests.forked_ranks", "--torchrun", *argv)
    return ForkedRank(words, dict(os.environ))


def preload() -> None:
    """Import what a rank on CPU imports. The environment stays as it is.

    Raises:
        RuntimeError: this machine has a GPU.
    """
    environment = dict(os.environ)
    with importing():
        import torch

        from r3.runtime.device import has_gpu, prepare_environment

        if has_gpu():
            raise RuntimeError("use launch/ranks.py: CUDA does not survive a fork")
        torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
        prepare_environment()  # vLLM reads some of it when it is imported
        from r3 import extras
        from r3.run import Session  # noqa: F401

        extras.engine_on_cpu().import_engine()
    os.environ.clear()
    os.environ.update(environment)


def fork_ranks() -> None:
    """Let torchrun (torch 2.13) fork ranks from this process where it would start a program."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    def popen(self: Any, args: tuple[str, ...], env: dict[str, str]) -> ForkedRank:
        return ForkedRank(args, env)

    SubprocessHandler._popen = popen
    # torch looks up the sources of all frames for the name of one, for a log that nobody keeps.
    # Beside the modules that ranks need, that takes seconds of every start and end.
    dynamic_rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name


class ForkedRank:
    """A rank, with what torchrun uses of `subprocess.Popen`.

    Attributes:
        pid: its process, which leads a session of its own.
        returncode: its exit code, negative for a signal; None while it runs.
    """

    def __init__(self, args: tuple[str, ...], env: dict[str, str]) -> None:
        """Fork it. `args` are the interpreter, `-u`, a script or `-m` and a module, its words."""
        _python, unbuffered, *argv = args
        assert unbuffered == "-u", f"a rank must be a Python program, not {' '.join(args)}"
        _flush()
        self.returncode: int | None = None
        launcher = os.getpid()
        with _signals_wait() as (handled, waiting):
            self.pid = os.fork()
            if not self.pid:
                _run(argv, env, launcher, handled, waiting)

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its exit code.

        Raises:
            subprocess.TimeoutExpired: after `timeout` seconds.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired(f"rank of process {self.pid}", timeout or 0.0)
            time.sleep(_POLL_S)
        return code


def _flush() -> None:
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with suppress(OSError):  # nobody reads
            stream.flush()


@contextmanager
def _signals_wait() -> Iterator[tuple[list[int], list[int]]]:
    """Call the handlers of signals that arrive in the block after it.

    Python drops an error that a handler raises in one of the functions that it calls around a
    fork: the signal would be lost, and with it the release of logging's lock.

    Yields:
        The signals that have handlers, and those that have arrived.
    """
    handlers: dict[int, Any] = {
        number: handler
        for number in signal.valid_signals()
        if callable(handler := signal.getsignal(number))
    }
    arrived: list[int] = []
    for number in handlers:
        signal.signal(number, lambda number, _: arrived.append(number))
    try:
        yield list(handlers), arrived
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in arrived:
            signal.raise_signal(number)


def _run(
    argv: list[str], env: dict[str, str], launcher: int, handled: list[int], waiting: list[int]
) -> NoReturn:
    """Be a rank.

    Args:
        argv, env: of `run_program`.
        launcher: the process that it ends with.
        handled: signals that the launcher has handlers for.
        waiting: those that have arrived since they were replaced.
    """

    def begin() -> None:
        os.setsid()
        die_with_parent(launcher)
        for number in handled:
            is_interrupt = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if is_interrupt else signal.SIG_DFL)
        for each in waiting:
            signal.raise_signal(each)
        name = f"r3-rank-{env['RANK']}" if "RANK" in env else "r3-torchrun"
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)  # in top

    run_program(argv, env, begin)


def run_program(argv: list[str], env: dict[str, str], begin: Callable[[], None]) -> NoReturn:
    """Run a program as Python does, then end this process, which is forked.

    Args:
        argv: a script or `-m` and a module, and its words.
        env: its environment.
        begin: what this process does before.
    """
    code: Any = 1
    try:
        begin()
        os.environ.clear()
        os.environ.update(env)
        sys.argv = argv[1:] if argv[0] == "-m" else argv
        for stream in filter(None, (sys.stdout, sys.stderr)):  # None: closed from the start
            stream.reconfigure(write_through=True)
        if argv[0] == "-m":
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(argv[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code or 0
        if not isinstance(code, int):
            print(visible(code), file=sys.stderr)
            code = 1
    except KeyboardInterrupt:
        code = 130
    finally:
        try:
            kind, error, trace = sys.exc_info()
            if kind and error:  # none of the above
                sys.excepthook(kind, error, trace)
            _flush()
        finally:  # an error of a closed stream must not enter the launcher's code
            os._exit(code)


if __name__ == "__main__":
    if sys.argv[1] == "--torchrun":
        fork_ranks()
        sys.exit(torchrun(sys.argv[2:]))
    preload()
    sys.exit(launch(sys.argv[1:], start_torchrun))
