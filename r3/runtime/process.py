"""This process: which one it dies with, what it has started, how it imports, what is restored."""

from __future__ import annotations

import ctypes
import gc
import locale
import os
import resource
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from r3.runtime.terminal import say

_MOST_FILES = 1 << 16  # some libraries go through all that are allowed
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


def boot_id() -> str:
    """What Linux calls the time since this machine was started; "" elsewhere."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else ""


def addresses(host: str) -> list[str]:
    """The addresses of a host; none if its name does not resolve."""
    try:
        return [
            str(each[4][0]) for each in socket.getaddrinfo(host, None, proto=socket.IPPROTO_TCP)
        ]
    except OSError:
        return []


def is_leader() -> bool:
    """Whether this process is rank 0, before the ranks have joined too."""
    return os.environ.get("RANK", "0") == "0"


def start_command(words: str) -> str:
    """The command that starts this program with other words, as this process was started."""
    # launch/ and `r3.train` set R3_RESUME. Without it, torchrun or Python started a program.
    ranks = os.environ.get("LOCAL_WORLD_SIZE")
    launcher = f"torchrun --nproc_per_node {ranks}" if ranks else "python"
    program = "-m r3" if Path(sys.argv[0]).name == "__main__.py" else sys.argv[0]
    by_hand = f"{launcher} {program} --from RUN_DIR"
    return os.environ.get("R3_RESUME", by_hand).replace("--from RUN_DIR", words)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process as soon as process `parent`, which started it, is gone.

    Args:
        parent: the process id that `os.getppid` gave when this process began. If it has changed
            since, the parent is dead already, and this process ends at once.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before that line
        os._exit(1)


def children(parent: int) -> list[int]:
    """The processes that a process has started and that have not ended."""
    import psutil

    try:
        return [each.pid for each in psutil.Process(parent).children()]
    except psutil.NoSuchProcess:
        return []


def raise_file_limit() -> int:
    """Let this process open as many files as the system allows it; returns how many those are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = min(hard, _MOST_FILES) if hard != resource.RLIM_INFINITY else _MOST_FILES
    if soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return max(soft, most)


def name_process(name: str) -> None:
    """Show this process under a name, of up to 15 characters, in top and in the kernel's messages.

    A forked process has the command line of the one that forked it.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def die_with_launcher() -> None:
    """Let a rank die with the torchrun that started it. Does nothing without a launcher.

    Without this, ranks whose launcher was killed continue and write during the next run.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent(os.getppid())


@contextmanager
def importing(*, without: Iterable[str] = ()) -> Iterator[None]:
    """Search no garbage while the block imports modules, nor ever among their objects.

    Modules live as long as the process. Python would search their objects again and again while
    more are made, which takes a quarter of the CPU time of a start.

    Args:
        without: modules that cannot be imported in the block, for packages that would import them
            only because they are installed. Those that are imported already stay.
    """
    enabled = gc.isenabled()
    gc.disable()
    hidden = [name for name in without if name not in sys.modules]
    modules: dict[str, Any] = sys.modules
    modules.update(dict.fromkeys(hidden))  # where it finds None, Python raises ModuleNotFoundError
    try:
        yield
    finally:
        for name in hidden:
            del modules[name]
        gc.freeze()
        if enabled:
            gc.enable()


# ------------------------------------------------------------------------------------------------
# State of the whole process that users' code may change and R3 depends on. Loading a model may
# change torch's default dtype, a library the locale, a script the working folder: R3 sets it back
# and says who changed it. Random numbers are not here: R3 draws from generators of its own.

_HANDLED = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1)
# Where the ranks find each other and their devices. Other variables are the users' own.
_VARIABLES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"),
)


def _working_folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:  # a temporary one of users' code
        return "one that is gone"


def _raising_warnings() -> list[Any]:
    """Filters that make an error of a warning, which any library may print. Others may stay."""
    return [each for each in warnings.filters if each[0] == "error"]


def _set_raising_warnings(filters: list[Any]) -> None:
    raising = [each for each in _raising_warnings() if each not in filters]
    kept = [each for each in warnings.filters if each not in raising]
    cast("list[Any]", warnings.filters)[:] = kept
    with warnings.catch_warnings():
        pass  # tells Python that the filters have changed


def _set_variables(values: dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _set_handlers(handlers: dict[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)


def things() -> dict[str, tuple[Callable[[], Any], Callable[[Any], object]]]:
    """How to read and to set each thing, by name; those of torch only if it is imported."""
    things: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
        "the working folder": (_working_folder, os.chdir),
        "the locale": (
            lambda: locale.setlocale(locale.LC_ALL),
            lambda value: locale.setlocale(locale.LC_ALL, value),
        ),
        "warnings that raise errors": (_raising_warnings, _set_raising_warnings),
        "variables of the ranks": (
            lambda: {name: os.environ.get(name) for name in _VARIABLES},
            _set_variables,
        ),
    }
    if threading.current_thread() is threading.main_thread():
        things["signal handlers"] = (
            lambda: {number: signal.getsignal(number) for number in _HANDLED},
            _set_handlers,
        )
    if numpy := sys.modules.get("numpy"):
        things["numpy's errors"] = (numpy.geterr, lambda value: numpy.seterr(**value))
    if torch := sys.modules.get("torch"):
        things |= {
            "torch's default dtype": (torch.get_default_dtype, torch.set_default_dtype),
            "torch's default device": (
                torch.get_default_device,
                # None is the CPU without a mode of torch that looks at every call.
                lambda value: torch.set_default_device(None if value.type == "cpu" else value),
            ),
            "torch's gradients": (torch.is_grad_enabled, torch.set_grad_enabled),
            "torch's threads": (torch.get_num_threads, torch.set_num_threads),
            "torch's matmul precision": (
                torch.get_float32_matmul_precision,
                torch.set_float32_matmul_precision,
            ),
            "torch's deterministic mode": (
                torch.get_deterministic_debug_mode,
                torch.set_deterministic_debug_mode,
            ),
        }
    return things


class Surroundings:
    """What the process has now; `restore` sets it back."""

    def __init__(self) -> None:
        self._things = things()
        self._kept = {name: get() for name, (get, _) in self._things.items()}
        self._said: set[str] = set()

    def restore(self, who: str) -> None:
        """Restore what has changed; rank 0 reports each change once.

        Args:
            who: whose code ran meanwhile.
        """
        for name, (get, put) in self._things.items():
            if (now := get()) != (kept := self._kept[name]):
                put(kept)
                if name not in self._said and os.environ.get("RANK", "0") == "0":
                    self._said.add(name)
                    text = f"note: {who} changed {name} from {_of(kept, now)} to {_of(now, kept)}"
                    say(f"{text}; R3 has set it back", error=True)


def _of(value: Any, other: Any) -> str:
    """A value; of several named ones those that differ from the other's."""
    if isinstance(value, dict):
        names = [name for name in value if value[name] != other.get(name)]
        return ", ".join(f"{getattr(name, 'name', name)}={value[name]}" for name in names)
    return str(value)


@contextmanager
def restored(who: str) -> Iterator[None]:
    """Set everything back after the block, in which users' code runs on the main thread."""
    before = Surroundings()
    try:
        yield
    finally:
        before.restore(who)
