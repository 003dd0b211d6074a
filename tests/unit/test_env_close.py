"""Every environment is closed once, however its conversation ends, and loses no other."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from r3.config import EnvConfig
from r3.envs import Environments
from r3.rollout import ConversationSetup, EnvironmentFailed, RoundResult
from r3.user_code import Done
from tests.environments import answered, opened, prompt, said
from tests.errors import Patch
from tests.rounds import env_of, numbered, play_round
from tests.rows import write
from tests.talkers import values

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


class Closing:
    """Conversations with environments that write down when they are opened and closed."""

    def __init__(self, folder: Path, name: str, workers: int) -> None:
        self.log = folder / "log"
        self.log.touch()
        file = write(folder, CLOSING.format(log=str(self.log)), name="closing.py")
        settings = EnvConfig(path=f"{file}:{name}", workers=workers, timeout_s=1.5, retries=1)
        self.environments = Environments(settings)

    def open(self, answer: str = "") -> Done:
        return opened(self.environments, replace(prompt(), answer=answer))

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
        *((*place, "raise") for place in PLACES),
        *((*place, "crash") for place in PLACES if place[1]),  # in a thread it would end the test
        *((*place, "hang") for place in PLACES if place != ("Async", 1)),
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
        failure = answered(closing.environments, word).failure
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
    assert answered(closing.environments, "hello").value
    for _ in range(2):
        closing.environments.forget(0)
    closing.all_closed_once()


def test_a_close_that_fails_is_a_warning_and_not_retried(
    tmp_path: Path, monkeypatch: Patch
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


TROUBLE = '''
import os, time
from pathlib import Path

HERE = Path(__file__).parent

class Trouble:
    """Two turns; a row ends its process, one never returns, one waits for 15 others."""
    def __init__(self, crash=-1, hang=-1, slow=-1):
        self.trouble = {crash: self.crash, hang: self.hang, slow: self.wait}
    def reset(self, prompt):
        self.number, self.turns = int(prompt.answer), 0
        self.log("opened")
        return prompt.messages
    def close(self):
        self.log("closed")
    def log(self, word):
        with open(HERE / word, "a") as file:
            file.write(f"{self.number}\\n")
    def step(self, message):
        self.turns += 1
        if self.turns == 2:
            self.log("ended")
            return [], 1.0, True
        self.trouble.get(self.number, int)()
        return [{"role": "user", "content": "go on"}], None, False
    def crash(self):
        os._exit(9)
    def hang(self):
        time.sleep(20)
    def wait(self):
        while len((HERE / "ended").read_text().split()) < 15:
            time.sleep(0.05)
'''
CRASH, HANG, SLOW = 5, 9, 11


@pytest.mark.parametrize(
    ("settings", "rows", "lost", "failed"),
    [
        ({"on_error": "drop", "retries": 1}, (CRASH, HANG, SLOW), {CRASH, HANG}, set()),
        ({"on_error": "zero"}, (CRASH, HANG, SLOW), set(), {CRASH, HANG}),
        ({"on_error": "drop", "keep_failed": True}, (CRASH, -1, -1), set(), {CRASH}),
        ({"on_error": "stop"}, (-1, HANG, -1), None, None),
    ],
    ids=["drop", "zero", "evaluation", "stop"],
)
def test_a_crashing_a_hanging_and_a_slow_tool_lose_nothing_else(
    settings: dict[str, Any],
    rows: tuple[int, ...],
    lost: set[int] | None,
    failed: set[int],
    tokenizer: Any,
    tmp_path: Path,
) -> None:
    (tmp_path / "trouble.py").write_text(TROUBLE)
    (tmp_path / "ended").touch()
    own: dict[str, Any] = {"path": f"{tmp_path}/trouble.py:Trouble", "workers": 3, "timeout_s": 5.0}
    own |= settings
    args = tuple(f"{name}={row}" for name, row in zip(("crash", "hang", "slow"), rows, strict=True))

    def play() -> RoundResult:
        setup = ConversationSetup.of(env_of(own, args=args), tokenizer, "tiny")
        prompts = {number: numbered(number) for number in range(64)}
        return play_round(setup, tokenizer, prompts, **own)[0]

    def logged(word: str) -> list[int]:
        return list(map(int, (tmp_path / word).read_text().split()))

    if lost is None:
        with pytest.raises(EnvironmentFailed, match=r"rollout rows:9/0 (.|\n)*env\.on_error"):
            play()
    else:
        made = play()
        rewards = {each.rollout.group: each.reward for each in made.samples}
        kept = set(range(64)) - lost
        assert rewards == {number: float(number not in failed) for number in kept}
        errors = {each.group for each in made.rollouts if each.finish_reason == "error"}
        assert errors == failed
        names = ("crashes", "timeouts", "retries", "errors", "dropped", "zeroed")
        found = values(made.metrics)
        times = 1 + settings.get("retries", 0)
        hangs = times * (HANG in rows)
        expected = (times, hangs, 2 * (times - 1), 0, len(lost), len(failed))
        assert tuple(found[f"env/{name}"] for name in names) == expected
        # The slow tool waits until 15 conversations are over: who waited for it would hang.
        order = logged("ended")
        assert len(order) == 64 - len(lost | failed)
        assert SLOW not in rows or order.index(SLOW) >= 15
    assert logged("opened") and sorted(logged("opened")) == sorted(logged("closed"))
