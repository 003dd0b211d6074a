"""Run inside another program, such as a notebook, and restore the state of its process afterwards.

The run computes what it would in a new process, and afterwards the program's state is as before.
Imported modules stay, and so do the settings of the C library's heap.
"""

from __future__ import annotations

import gc
import logging
import os
import resource
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch

from r3.runtime.device import preserved_random_state
from r3.runtime.process_state import things

# A library sets variables and filters of warnings while it is imported, once per process.
_variables: dict[str, str] = {}
_filters: list[Any] = []

# What R3 depends on and a new process has; a program may have set something else.
_NEW = {
    "torch's default dtype": torch.float32,
    "torch's default device": torch.device("cpu"),
    "torch's gradients": True,
    "torch's matmul precision": "highest",
    "torch's deterministic mode": 0,
}


@contextmanager
def own_process() -> Iterator[None]:
    """Give the block a process like a new one; afterwards the caller has its own back."""
    before = dict(os.environ)
    state = {**things(), **_of_a_program()}
    kept = {name: get() for name, (get, _) in state.items()}
    with ExitStack() as undo:
        undo.callback(_set_environment, before)
        for name, (get, put) in state.items():
            undo.callback(_put_if_changed, get, put, kept[name])
        undo.enter_context(preserved_random_state(with_gpus=True))
        undo.enter_context(warnings.catch_warnings())
        undo.enter_context(torch.inference_mode(mode=False))
        for name, value in _NEW.items():
            state[name][1](value)
        for name, value in _variables.items():
            os.environ.setdefault(name, value)
        filters = cast("list[Any]", warnings.filters)
        filters[:0] = [each for each in _filters if each not in filters]
        yield


@contextmanager
def imports_that_last() -> Iterator[None]:
    """Remember what the imports of the block set for the process: they do it only once."""
    variables, filters = dict(os.environ), list(warnings.filters)
    yield
    new = {name: each for name, each in os.environ.items() if variables.get(name) != each}
    _variables.update(new)
    _filters[:0] = [each for each in warnings.filters if each not in filters]


def _of_a_program() -> dict[str, tuple[Callable[[], Any], Callable[[Any], object]]]:
    """How to read and to set what R3 or its libraries change, and do not depend on."""
    return {
        "excepthook": (lambda: sys.excepthook, lambda hook: setattr(sys, "excepthook", hook)),
        "excepthook of threads": (
            lambda: threading.excepthook,
            lambda hook: setattr(threading, "excepthook", hook),
        ),
        "triton": (lambda: sys.modules.get("triton", False), _set_triton),
        "handlers of logs": (
            lambda: list(logging.root.handlers),
            lambda handlers: setattr(logging.root, "handlers", handlers),
        ),
        "level of logs": (lambda: logging.root.level, logging.root.setLevel),
        "open files": (
            lambda: resource.getrlimit(resource.RLIMIT_NOFILE),
            lambda limits: resource.setrlimit(resource.RLIMIT_NOFILE, limits),
        ),
        "garbage collection": (gc.isenabled, lambda on: gc.enable() if on else gc.disable()),
    }


def _put_if_changed(get: Callable[[], Any], put: Callable[[Any], object], kept: Any) -> None:
    if get() != kept:
        put(kept)


def _set_environment(variables: dict[str, str]) -> None:
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    for name, value in variables.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def _set_triton(module: Any) -> None:
    """Set `sys.modules["triton"]`, which R3 hides on CPU; False is none."""
    if module is False:
        sys.modules.pop("triton", None)
    else:
        sys.modules["triton"] = module
