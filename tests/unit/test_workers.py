"""Pools: calls end in values or failures, never in a wait."""

import asyncio
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from r3.tools.beside.processes import Processes
from r3.user_code import Done, Here, Place, Pool, Threads, WorkerError, load
from tests.runs import program

PLACES: dict[str, Callable[[], Place]] = {
    "here": Here,
    "threads": Threads,
    "processes": lambda: Processes(2),
}


def double(value: int) -> int:
    return 2 * value


async def double_later(value: int) -> int:
    await asyncio.sleep(0.01)
    return 2 * value


async def cancels_its_own() -> None:
    task = asyncio.create_task(asyncio.sleep(600))
    task.cancel()
    await task


def misbehave(how: str, value: int = 0) -> int:
    match how:
        case "raise":
            raise KeyError("no such thing")
        case "exit":
            sys.exit(3)
        case "hang":
            time.sleep(600)
    return 2 * value


def once_broken(path: str) -> str:
    """Fails the first time it is called with a path."""
    if not Path(path).exists():
        Path(path).touch()
        raise OSError("not yet")
    return "mended"


@pytest.fixture(params=PLACES)
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    with closing(Pool(PLACES[request.param](), timeout_s=30.0)) as pool:
        yield pool


def drain(pool: Pool) -> dict[Any, Done]:
    """All that is outstanding, by key."""
    done: dict[Any, Done] = {}
    until = time.monotonic() + 60.0
    while pool.outstanding:
        assert time.monotonic() < until, "the pool never ended"
        done |= {ended.key: ended for ended in pool.poll(0.2)}
    return done


def test_every_place_answers_every_call_plain_and_async(pool: Pool) -> None:
    for i in range(20):
        pool.submit(("plain", i), double, i)
        pool.submit(("async", i), double_later, i)
    done = drain(pool)
    expected = {(kind, i): 2 * i for kind in ("plain", "async") for i in range(20)}
    assert {key: ended.value for key, ended in done.items()} == expected
    assert all(ended.failure is None for ended in done.values())
    assert pool.counts["calls"] == 40


def test_what_a_call_raises_comes_back_as_text_with_its_place(pool: Pool) -> None:
    pool.submit("raise", misbehave, "raise")
    pool.submit("exit", misbehave, "exit")
    pool.submit("cancelled", cancels_its_own)
    pool.submit("fine", misbehave, "fine", 4)
    done = drain(pool)
    assert done["fine"].value == 8
    raised, left = done["raise"].failure, done["exit"].failure
    assert raised is not None and raised.kind == "error" and "KeyError: 'no such" in raised.text
    assert left is not None and "SystemExit: 3" in left.text
    cancelled = done["cancelled"].failure  # not as if it had taken too long
    assert cancelled is not None and cancelled.kind == "error"
    assert "CancelledError" in cancelled.text
    assert pool.counts["errors"] == 3
    # The first line shown is one of the user, without the frames of the pool.
    assert raised.text.splitlines()[1].startswith(f'  File "{__file__}"')


def test_workers_hold_neither_torch_nor_vllm_nor_settings() -> None:
    # a new one: workers of the others have imported this file
    with closing(Pool(Processes(1), timeout_s=10.0)) as pool:
        pool.submit("loaded", eval, "sorted(__import__('sys').modules)")
        loaded = drain(pool)["loaded"].value
    assert "r3.types" in loaded
    assert not {"torch", "vllm", "transformers", "asyncio", "r3.config"} & {*loaded}


@pytest.mark.parametrize("pool", ["processes"], indirect=True)
def test_what_cannot_be_pickled_is_an_error_of_its_call(pool: Pool) -> None:
    pool.submit("fine", double, 1)
    pool.submit("value", threading.Lock)
    done = drain(pool)
    failure = done["value"].failure
    assert failure is not None and failure.kind == "error" and "pickle" in failure.text
    assert done["fine"].value == 2


@pytest.mark.parametrize("place", PLACES)
def test_retries_are_made_and_counted(place: str, tmp_path: Path) -> None:
    with closing(Pool(PLACES[place](), timeout_s=30.0, retries=1)) as pool:
        pool.submit("mended", once_broken, str(tmp_path / "flag"))
        pool.submit("hopeless", misbehave, "raise")
        done = drain(pool)
    assert done["mended"].value == "mended"
    assert done["hopeless"].failure is not None
    assert pool.counts == {"calls": 2, "errors": 3, "retries": 2}


def test_workers_that_cannot_load_the_users_file_say_why(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("raise RuntimeError('only in a worker')\n")
    with closing(Pool(Processes(1, preload=[f"{broken}:X"]), timeout_s=30.0)) as pool:
        pool.submit("never", double, 1)
        with pytest.raises(WorkerError, match="only in a worker"):
            drain(pool)


_DIES = """
import os
from tests.unit.test_workers import Pool, Processes, double, misbehave
pool = Pool(Processes(1), timeout_s=60.0)
pool.submit(0, double, 1)
while not pool.poll(1.0): pass
pool.submit(1, misbehave, "hang")
pool.poll(0.1)
print(pool.place._workers[0].process.pid, flush=True)
os.kill(os.getpid(), 9)
"""


def test_workers_die_with_the_process_that_started_them() -> None:
    worker = int(program(sys.executable, "-c", _DIES).stdout)
    until = time.monotonic() + 20
    while psutil.pid_exists(worker) and psutil.Process(worker).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until, "the worker outlived its parent"
        time.sleep(0.05)


def test_a_file_is_loaded_once_and_its_objects_can_be_pickled(tmp_path: Path) -> None:
    file = tmp_path / "my.module.py"
    file.write_text("class Thing:\n    def __init__(self): self.n = 3\n")
    thing = load(f"{file}:Thing")
    assert load(f"{file}:Thing") is thing
    assert pickle.loads(pickle.dumps(thing())).n == 3


def verify_with_own_limit(answer: str) -> bool:
    from math_verify import parse

    return bool(parse(answer))


def test_a_time_limit_by_signals_in_a_thread_names_the_fix() -> None:
    done = {}
    for place in (Threads(), Processes(1)):
        with closing(Pool(place, timeout_s=60.0)) as pool:
            pool.submit("verify", verify_with_own_limit, "$1/2$")
            done[type(place)] = drain(pool)["verify"]
    refused = done[Threads].failure
    assert refused is not None and "--reward.workers 2" in refused.text
    assert done[Processes].value is True, "a process has a main thread"
