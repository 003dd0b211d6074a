"""Start the ranks of this machine with torchrun, without a traceback of the launcher itself.

    python launch/ranks.py --check --standalone --nproc_per_node 2 train.py PRESET ...

With `--check`, mistakes in settings, data or reward end this program before there are ranks, with
one message and not one per rank. With `--die-with-parent` it ends with the process that started it.
Other words are torchrun's.

The exit code is that of the rank that failed first, and 75 if its watchdog ended it. SIGTERM,
SIGHUP, SIGINT and SIGUSR1 go to the ranks, which stop after their step with a checkpoint; the exit
code is then 75, or 130 after Ctrl-C. A second Ctrl-C ends them at once.

torchrun runs in a process of its own (`torchrun`), because it would answer a second Ctrl-C with
SIGTERM to the ranks and wait for them.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, Protocol

# Seconds between a signal and the end by force: for the step and its checkpoint.
_SHUTDOWN_S = "600"
SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1")
_LOGGERS = "torch.distributed.elastic"
REQUEUE = 75
FINISHED = 76  # as r3.run.goal: of the check
_ENDS_RANK = signal.SIGRTMAX  # as r3.tools.beside.watchdog
_INTERRUPTED_S = 5.0  # between a second Ctrl-C and the end of the ranks by force
_PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"}
_TORCHRUN = "--torchrun"  # the first word of the process that runs torchrun


class Process(Protocol):
    """What is used of `subprocess.Popen`."""

    @property
    def pid(self) -> int: ...
    def wait(self) -> int: ...


def start_torchrun(argv: list[str]) -> Process:
    """Start the process that runs torchrun, out of reach of the terminal's Ctrl-C."""
    program = ["-m", "r3.launch.ranks"] if __package__ else [os.path.abspath(__file__)]
    return subprocess.Popen([sys.executable, *program, _TORCHRUN, *argv], start_new_session=True)


def launch(argv: list[str], start: Callable[[list[str]], Process] = start_torchrun) -> int:
    """Run the ranks to their end; returns the exit code of the first rank that failed, or 0."""
    given = os.environ.get("R3_READ")  # from a program whose check has read the data
    with nullcontext(given) if given else tempfile.TemporaryDirectory(prefix="r3_") as folder:
        os.environ["R3_READ"] = folder  # what one process has read of the data, see r3.data.sources
        try:
            return _launch(argv, start)
        finally:
            del os.environ["R3_READ"]


def _launch(argv: list[str], start: Callable[[list[str]], Process]) -> int:
    if argv[:1] == ["--die-with-parent"]:
        from r3.runtime.process import die_with_parent

        die_with_parent(os.getppid())
        del argv[0]
    if argv[:1] == ["--check"]:
        del argv[0]
        code = checked(argv)
        if code is not None:
            return code
    _say("starting the ranks")  # importing torch takes seconds
    stopped_by: list[int] = []
    process: Process | None = None

    def stop(number: int, _frame: Any) -> None:
        stopped_by.append(number)
        if process is None:
            return
        pid = process.pid
        if len(stopped_by) == 1:
            _send(pid, number)
        elif number == signal.SIGINT:
            _to_ranks(pid, signal.SIGINT)  # a rank that can, says how to continue
            signal.signal(signal.SIGALRM, lambda *_: _to_ranks(pid, signal.SIGKILL))
            signal.setitimer(signal.ITIMER_REAL, _INTERRUPTED_S)

    # What this process ignores, as after nohup, its children ignore too.
    for number in map(signal.Signals.__getitem__, SIGNALS):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, stop)
    process = start(argv)
    if stopped_by:  # before there was a process
        _send(process.pid, stopped_by[0])
    code = process.wait()
    if stopped_by and code in (0, REQUEUE, 130, -stopped_by[0]):
        return 130 if stopped_by[0] == signal.SIGINT else REQUEUE
    return code if code >= 0 else 1


def torchrun(argv: list[str]) -> int:
    """Be the process that runs torchrun; returns the exit code for `launch`."""
    from r3.runtime.process import die_with_parent

    die_with_parent(os.getppid())
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main, parse_args

    from r3.launch.rendezvous import addressed, impatient
    from r3.runtime.device import has_gpu

    if not has_gpu():
        # Ranks share the cores. Threads that spin while they wait take them from each other: ten
        # times slower.
        for name, value in _PASSIVE.items():
            os.environ.setdefault(name, value)
    # The launcher reports which processes it ends. The rank that failed has printed why. Each of
    # torch's loggers has a level of its own.
    for name in filter(lambda name: name.startswith(_LOGGERS), logging.root.manager.loggerDict):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", _SHUTDOWN_S)
    words = parse_args(argv)
    if words.max_restarts or not words.standalone:
        # Ranks that are restarted would otherwise read the addresses of the dead ones. The price:
        # rank 0 listens on a port that was free seconds ago, when the launcher chose it.
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    try:
        found = addressed(words)
    except ValueError as error:
        _say(f"r3: {error}", descriptor=2)
        return 1
    handled = [name for name in SIGNALS if signal.getsignal(signal.Signals[name]) != signal.SIG_IGN]
    try:
        with impatient(words, _say):
            main(["--signals-to-handle", ",".join(handled), *found, *argv])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code: int = failure.exitcode
        if -code == _ENDS_RANK:
            return REQUEUE
        if code < 0:  # it could not print anything
            text = f"rank {rank} was ended by {signal.Signals(-code).name}"
            hint = "; out of memory?" if -code == signal.SIGKILL else ""
            _say(f"r3: {text}{hint}", descriptor=2)
        elif code not in (1, 2, 130, REQUEUE):  # nothing of R3 ends so, and it prints no traceback
            text = f"rank {rank} ended with exit code {code}; did your code or a library call exit?"
            _say(f"r3: {text}", descriptor=2)
        return code if code > 0 else 1
    except SignalException:
        return REQUEUE
    return 0


def _say(text: str, *, descriptor: int = 1) -> None:
    """Write a line; a reader that has left does not end the run."""
    with suppress(OSError):
        os.write(descriptor, f"{text}\n".encode())


def _send(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _to_ranks(torchrun: int, number: int) -> None:
    from r3.launch.rendezvous import children

    for pid in children(torchrun):
        _send(pid, number)


def program_of(argv: list[str]) -> list[str]:
    """The words that torchrun gives to Python: a script or `-m` and a module, and what follows."""
    return argv[next(i for i, word in enumerate(argv) if word == "-m" or word.endswith(".py")) :]


def number_of_ranks(argv: list[str]) -> str:
    """The value of torchrun's --nproc_per_node, in any of its spellings; "" without one."""
    for word, following in zip(argv, [*argv[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if name.replace("-", "_") == "__nproc_per_node":
            return value if equals else following
    return ""


def checked(argv: list[str]) -> int | None:
    """Check the command line in another process.

    Returns:
        The exit code if there is nothing to launch; None: start the ranks.
    """
    words = [sys.executable, *program_of(argv), "--check"]
    if (ranks := number_of_ranks(argv)).isdecimal():  # torchrun takes `gpu` and `auto`, too
        words += ["--world-size", ranks]
    code = subprocess.run(words).returncode
    if code in (0, FINISHED):
        return None if code == 0 else 0
    return code if code > 0 else 1


if __name__ == "__main__":
    if not __package__:  # a script: R3 may not be installed
        sys.path.append(str(Path(__file__).resolve().parents[1]))
    try:
        if sys.argv[1:2] == [_TORCHRUN]:
            sys.exit(torchrun(sys.argv[2:]))
        sys.exit(launch(sys.argv[1:]))
    except KeyboardInterrupt:  # before there were ranks
        sys.exit(130)
