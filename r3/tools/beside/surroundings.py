"""State of the whole process that users' code may change and R3 depends on.

Loading a model may change torch's default dtype, a library the locale, a script the working folder:
R3 sets it back and says who changed it. Random numbers are not here: R3 draws from generators of
its own.
"""

from __future__ import annotations

import locale
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

from r3.runtime.process import is_leader
from r3.runtime.terminal import say

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
    return [entry for entry in warnings.filters if entry[0] == "error"]


def _set_raising_warnings(filters: list[Any]) -> None:
    raising = [entry for entry in _raising_warnings() if entry not in filters]
    kept = [entry for entry in warnings.filters if entry not in raising]
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
                if name not in self._said and is_leader():
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
