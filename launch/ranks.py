"""Start the ranks of this machine as torchrun does, without a traceback of the launcher itself.

    python launch/ranks.py --check --preload --standalone --nproc_per_node 2 train.py PRESET ...

With `--check`, mistakes in settings, data or reward end this program before there are ranks, with
one message and not one per rank. With `--preload` (on CPU), it imports what ranks need, meanwhile,
and forks them. Other words are torchrun's.

The exit code is that of the rank that failed first, and 75 if its watchdog ended it. SIGTERM,
SIGHUP, SIGINT and SIGUSR1 go to the ranks, which stop after their step with a checkpoint; the exit
code is then 75, or 130 after Ctrl-C. A second Ctrl-C ends them at once.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from itertools import takewhile
from pathlib import Path
from types import FrameType
from typing import Any

# Seconds between a signal and the end by force: for the step and its checkpoint.
_SHUTDOWN_S = "600"
_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1")
_LOGGERS = "torch.distributed.elastic"
_REQUEUE = 75
_FINISHED = 76  # as r3.run.finished: of the check
_ENDS_RANK = signal.SIGRTMAX  # as r3.run.watcher, which is not imported without --preload
_INTERRUPTED_S = 5.0  # between a second Ctrl-C and the end of the ranks by force
_stopped_by = 0  # the first signal


def launch(argv: list[str]) -> int:
    """Run the ranks to their end; returns the exit code of the first rank that failed, or 0."""
    own = list(takewhile(("--check", "--preload").__contains__, argv))
    argv = argv[len(own) :]
    check = "--check" in own
    if not check:
        _say("starting the ranks")  # importing torch takes seconds
    with checked(argv) if check else nullcontext():
        if "--preload" in own:
            script = program_of(argv)[0]
            if script != "-m":  # Python looks in the folder of a script; in this one's until now
                sys.path[0] = str(Path(script).resolve().parent)
            from r3.run.forked_ranks import fork_ranks, preload

            preload()
            fork_ranks()
        from torch.distributed.elastic.multiprocessing import api
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.run import main, parse_args

        if not __package__:  # a script: R3 may not be installed
            sys.path.append(str(Path(__file__).resolve().parents[1]))
        from r3.run.rendezvous import addressed, impatient
    if check:
        _say("starting the ranks")

    # The launcher reports which processes it ends. The rank that failed has printed why. Each of
    # torch's loggers has a level of its own.
    for name in filter(lambda name: name.startswith(_LOGGERS), logging.root.manager.loggerDict):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    api._terminate_process_handler = _stop_ranks
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
    # What this process ignores, as after nohup, it goes on to ignore.
    ignored = [each for each in signal.Signals if signal.getsignal(each) == signal.SIG_IGN]
    handled = [name for name in _SIGNALS if signal.Signals[name] not in ignored]
    try:
        with impatient(words, _say):
            main(["--signals-to-handle", ",".join(handled), *found, *argv])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code: int = failure.exitcode
        if -code == _ENDS_RANK:
            return _REQUEUE
        if code < 0:  # it could not print anything
            text = f"rank {rank} was ended by {signal.Signals(-code).name}"
            hint = "; out of memory?" if -code == signal.SIGKILL else ""
            _say(f"r3: {text}{hint}", descriptor=2)
        return code if code > 0 else 1
    except api.SignalException as error:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # one more must not change the exit code
        return 130 if error.sigval == signal.SIGINT else _REQUEUE
    return 0


def _say(text: str, *, descriptor: int = 1) -> None:
    """Write a line; a reader that has left does not end the run."""
    with suppress(OSError):
        os.write(descriptor, f"{text}\n".encode())


def _stop_ranks(signum: int, frame: FrameType | None) -> None:
    """Handle a signal in the place of torch: the first one stops the ranks after their step.

    torch would answer a second one with SIGTERM to the ranks and wait for them.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException

    global _stopped_by
    first, _stopped_by = not _stopped_by, _stopped_by or signum
    if first:
        raise SignalException(f"signal {signum}", sigval=signal.Signals(signum))
    if signum == signal.SIGINT:
        _signal_ranks(signal.SIGINT)  # a rank that can, says how to continue
        signal.signal(signal.SIGALRM, lambda *_: _signal_ranks(signal.SIGKILL))
        signal.setitimer(signal.ITIMER_REAL, _INTERRUPTED_S)


def _signal_ranks(number: int) -> None:
    """Send a signal to all processes that this one has started."""
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):  # it has ended
            facts = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2]
            if int(facts.split()[1]) == os.getpid():
                os.kill(int(pid), number)


def program_of(argv: list[str]) -> list[str]:
    """The words that torchrun gives to Python: a script or `-m` and a module, and what follows."""
    return argv[next(i for i, word in enumerate(argv) if word == "-m" or word.endswith(".py")) :]


@contextmanager
def checked(argv: list[str]) -> Iterator[None]:
    """Check the command line in another process beside the block; exit as it does if it fails.

    If it fails during the block, this process ends at once.
    """
    ranks = argv[argv.index("--nproc_per_node") + 1]
    words = [sys.executable, *program_of(argv), "--check", "--world-size", ranks]
    check = subprocess.Popen(words)

    def code() -> int:
        if check.returncode == _FINISHED:
            return 0
        return check.returncode if check.returncode > 0 else 1

    def ended(*_: Any) -> None:
        if check.poll():
            os._exit(code())

    def interrupted(*_: Any) -> None:  # an error would meet whatever is just being imported
        check.kill()
        os._exit(130)

    signal.signal(signal.SIGCHLD, ended)
    signal.signal(signal.SIGINT, interrupted)
    try:
        yield
        check.wait()
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        check.kill()
    if check.returncode:
        sys.exit(code())


if __name__ == "__main__":
    try:
        sys.exit(launch(sys.argv[1:]))
    except KeyboardInterrupt:  # before there were ranks
        sys.exit(130)
