"""Every environment is closed once, however its conversation ends."""

import time
from dataclasses import replace
from pathlib import Path

import pytest

from r3.config import EnvConfig
from r3.envs import Environments
from r3.user_code import Done
from tests.environments import collect, prompt, said

CLOSING = """
import asyncio, os, time, uuid

LOG = {log!r}

def log(word, name):
    with open(LOG, "a") as file:
        file.write(f"{{word}} {{name}}\\n")

class Plain:
    def __init__(self):
        self.name = uuid.uuid4().hex
    def act(self, word):
        if word == "raise":
            raise ValueError("on purpose")
        if word == "hang":
            time.sleep(60)
        if word == "slow":
            time.sleep(0.5)
            log("acquired", self.name)
            self.has_acquired = True
        if word == "crash":
            os._exit(9)
    def reset(self, prompt):
        log("opened", self.name)
        self.act(prompt.answer)
        return prompt.messages
    def step(self, message):
        self.act(message["content"])
        return [{{"role": "user", "content": "go on"}}], None, False
    def close(self):
        log("closed", self.name)
        if getattr(self, "has_acquired", False):
            log("released", self.name)
        self.act("raise" if os.environ.get("R3_TEST_CLOSE_FAILS") else "")

class Async(Plain):
    async def reset(self, prompt):
        log("opened", self.name)
        if prompt.answer == "hang":
            await asyncio.sleep(60)
        self.act(prompt.answer)
        return prompt.messages
    async def step(self, message):
        if message["content"] == "hang":
            await asyncio.sleep(60)
        return super().step(message)
    async def close(self):
        await asyncio.sleep(0.01)
        super().close()
"""

PLACES = [("Plain", 0), ("Plain", 1), ("Async", 0), ("Async", 1)]
CRASHES = [("Plain", 1), ("Async", 1)]  # in a thread a crash would end the test itself


class Closing:
    """Conversations with environments that write down when they are opened and closed."""

    def __init__(self, folder: Path, name: str, workers: int) -> None:
        self.log = folder / "log"
        self.log.touch()
        file = folder / "closing.py"
        file.write_text(CLOSING.format(log=str(self.log)))
        settings = EnvConfig(path=f"{file}:{name}", workers=workers, timeout_s=1.5, retries=1)
        self.environments = Environments(settings)

    def open(self, answer: str = "") -> Done:
        self.environments.open(0, replace(prompt(), answer=answer))
        return collect(self.environments, 1)[0]

    def send(self, word: str) -> Done:
        self.environments.send(0, said(word))
        return collect(self.environments, 1)[0]

    def names(self, word: str) -> list[str]:
        lines = [line.split() for line in self.log.read_text().splitlines()]
        return [name for kind, name in lines if kind == word]

    def all_closed_once(self) -> None:
        self.environments.close()
        closed = self.names("closed")
        assert closed and len(set(closed)) == len(closed), f"closed twice: {closed}"
        assert set(closed) == set(self.names("opened"))


@pytest.mark.parametrize(
    ("name", "workers", "word"),
    [
        *((name, workers, "raise") for name, workers in PLACES),
        *((name, workers, "crash") for name, workers in CRASHES),
        ("Plain", 0, "hang"),
        ("Plain", 1, "hang"),
        ("Async", 0, "hang"),
    ],
)
@pytest.mark.parametrize("method", ["reset", "step"])
def test_an_environment_that_fails_is_closed_once(
    name: str, workers: int, word: str, method: str, tmp_path: Path
) -> None:
    closing = Closing(tmp_path, name, workers)
    if method == "reset":
        failure = closing.open(word).failure
    else:
        assert closing.open().value
        failure = closing.send(word).failure
    kinds = {"raise": "error", "crash": "crash", "hang": "timeout"}
    assert failure is not None and failure.kind == kinds[word]
    closing.environments.forget(0)
    closing.all_closed_once()


@pytest.mark.parametrize(("name", "workers"), PLACES)
def test_the_end_of_a_run_closes_what_is_open_even_inside_a_call(
    name: str, workers: int, tmp_path: Path
) -> None:
    closing = Closing(tmp_path, name, workers)
    assert closing.open().value
    closing.environments.send(0, said("hang"))
    began = time.monotonic()
    closing.all_closed_once()
    assert time.monotonic() - began < 30, "the call in flight was waited for"


@pytest.mark.parametrize(("name", "workers"), PLACES)
def test_a_suspended_environment_is_closed_when_it_is_dropped_or_over(
    name: str, workers: int, tmp_path: Path
) -> None:
    closing = Closing(tmp_path, name, workers)
    states = []
    for _ in range(2):
        assert closing.open().value
        states.append(closing.environments.suspend(0))
    closing.environments.close_all()
    assert not closing.names("closed"), "suspended is not over"
    closing.environments.discard(states[0])
    closing.environments.resume(0, states[1])
    assert closing.send("hello").value
    for _ in range(2):
        closing.environments.forget(0)
    closing.all_closed_once()


def test_a_close_that_fails_is_a_warning_and_not_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("R3_TEST_CLOSE_FAILS", "1")
    closing = Closing(tmp_path, "Plain", 0)
    assert closing.open().value
    closing.environments.forget(0)
    with pytest.warns(UserWarning, match=r"(?s)Plain: close\(\) failed \(error\).*on purpose"):
        closing.environments.close_all()
    assert closing.environments.take_counts()["errors"] == 1
    closing.all_closed_once()


@pytest.mark.parametrize(("name", "workers"), PLACES)
def test_what_a_reset_in_flight_acquires_is_released_at_the_end(
    name: str, workers: int, tmp_path: Path
) -> None:
    closing = Closing(tmp_path, name, workers)
    closing.environments.open(0, replace(prompt(), answer="slow"))
    while not closing.names("opened"):
        closing.environments.poll(0.01)
    assert not closing.names("acquired"), "reset is still running"
    closing.environments.close()
    assert closing.names("released") == closing.names("acquired") == closing.names("opened")
    assert len(closing.names("closed")) == 1
