"""Users' files: every run of a process gets them as they are."""

import asyncio
import itertools
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from r3.config import AlgoConfig, ConfigError, EnvConfig, RewardConfig
from r3.envs import Environments
from r3.rewards.scorer import RewardError, make_scorer
from r3.user_code import advantage_of, forget_files, load
from tests.environments import answered, collect, opened, prompt
from tests.errors import Patch
from tests.tiny import responded


def test_a_run_gets_a_file_and_what_it_imports_as_they_are(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "of_my_reward.py").write_text("SCALE = 1\n")
    source = "from of_my_reward import SCALE\nfrom r3.types import Prompt\nREWARD = 2 * SCALE\n"
    (tmp_path / "mine.py").write_text(source)
    assert load(f"{tmp_path}/mine.py:REWARD") == 2

    # The second file keeps its size: an edit of the same second, which a cache would not see.
    (tmp_path / "of_my_reward.py").write_text("SCALE = 10\n")  # another size: Python caches it
    (tmp_path / "mine.py").write_text(source.replace("2 *", "3 *"))
    assert load(f"{tmp_path}/mine.py:REWARD") == 2  # within a run a file runs once
    prompt = sys.modules["r3.types"]
    forget_files()
    assert load(f"{tmp_path}/mine.py:REWARD") == 30
    assert sys.modules["r3.types"] is prompt  # what is not the user's stays


BESIDE = """
import asyncio, helpers
from pack.inner import NUMBER as inner
from .helpers import NUMBER as relative

def number():
    import later  # when it is called, possibly in another thread
    assert helpers.NUMBER == inner == relative == later.NUMBER
    return later.Number().value

def score(response, prompt):
    return number()

def scale(rewards_R, groups_R):
    return rewards_R * 0 + number()

class Talk:
    def reset(self, prompt):
        import later
        self.mine = later.Number()  # travels to a worker that has not imported its class
        return [{"role": "user", "content": str(number())}]
    def step(self, message):
        return [], self.mine.value, True

class Flow:
    async def run(self, task, model):
        return number()
"""


def folder_with(number: int, folder: Path) -> Path:
    """A user's file and modules beside it, all of which know the number."""
    (folder / "pack").mkdir(parents=True)
    files = {"mine.py": BESIDE, "helpers.py": "", "pack/__init__.py": "", "pack/other.py": ""}
    files["later.py"] = "class Number:\n    def __init__(self): self.value = NUMBER\n"
    files["pack/inner.py"] = "import helpers\nfrom pack.other import NUMBER\n"
    files["pack/inner.py"] += "from . import NUMBER as own\nassert helpers.NUMBER == own\n"
    for name, text in files.items():
        known = "" if name in ("mine.py", "pack/inner.py") else f"NUMBER = {number}\n"
        (folder / name).write_text(known + text)
    return folder / "mine.py"


def of_reward(file: Path, workers: int) -> float:
    settings = RewardConfig(function=(f"{file}:score",), workers=workers)
    with closing(make_scorer(settings)) as scorer:
        return scorer(responded(), prompt())


def of_environment(file: Path, workers: int) -> float:
    settings = EnvConfig(path=f"{file}:Talk", workers=workers)
    with closing(Environments(settings)) as environments:
        first = opened(environments)
        assert first.failure is None, first.failure
        step = answered(environments, "hello").value
    assert float(first.value[0]["content"]) == step.reward
    return float(step.reward)


def of_workflow(file: Path, workers: int) -> float:
    return float(asyncio.run(load(f"{file}:Flow")().run(None, None)))


def of_advantage(file: Path, workers: int) -> float:
    advantages = advantage_of(AlgoConfig(advantage=f"{file}:scale"))
    return float(advantages(torch.zeros(2), torch.zeros(2, dtype=torch.long))[0])


KINDS = [of_reward, of_environment, of_workflow, of_advantage]


PAIRS = [(*pair, 0) for pair in itertools.combinations_with_replacement(KINDS, 2)]


@pytest.mark.parametrize(("first", "second", "workers"), [*PAIRS, (of_reward, of_environment, 1)])
def test_two_files_have_what_is_beside_them(
    first: Callable[..., float], second: Callable[..., float], workers: int, tmp_path: Path
) -> None:
    one, two = (folder_with(number, tmp_path / str(number)) for number in (1, 2))
    assert (first(one, workers), second(two, workers)) == (1, 2)
    # Python's own import would find neither, and would give the first to both.
    assert not {"helpers", "later", "pack"} & sys.modules.keys()
    forget_files()
    (tmp_path / "2/helpers.py").write_text("NUMBER = 3\n")
    with pytest.raises((ConfigError, RewardError, AssertionError)):
        second(two, workers)
    forget_files()


def test_a_module_that_python_finds_keeps_its_name(tmp_path: Path, monkeypatch: Patch) -> None:
    """Another module of the process that imports it gets the same one."""
    file = folder_with(4, tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    number = load(f"{file}:number")
    assert number() == 4 and sys.modules["helpers"] is number.__globals__["helpers"]
    # Another file of that name is not what a file elsewhere means.
    other = folder_with(5, tmp_path / "other")
    assert load(f"{other}:number")() == 5 and sys.modules["helpers"].NUMBER == 4
    forget_files()
    assert "helpers" not in sys.modules


def test_a_module_that_is_nowhere_names_the_variable(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import elsewhere_of_mine\ndef score(response, prompt): 0\n")
    with pytest.raises(ConfigError, match=r"'elsewhere_of_mine'\. Fix: .*PYTHONPATH"):
        of_reward(tmp_path / "mine.py", 0)


LOOPS = """
import asyncio, functools

lock = asyncio.Lock()
loops = []

async def score(response, prompt):
    # Two calls at once bind the lock to their loop; a call on another loop would raise an error.
    await asyncio.gather(held(), held())
    loops.append(asyncio.get_running_loop())
    return float(len(set(loops)))

async def held():
    async with lock:
        await asyncio.sleep(0.001)

async def leaves(response, prompt):
    raise SystemExit(3)

class Scores:
    async def __call__(self, response, prompt):
        return await score(response, prompt)

called = Scores()

@functools.wraps(score)
def wrapped(response, prompt):
    return score(response, prompt)

class Talk:
    async def reset(self, prompt):
        return [{"role": "user", "content": str(await score("", prompt))}]
    def step(self, message):
        return [], 1.0, True
"""


@pytest.mark.parametrize("workers", [0, 1])
def test_all_coroutines_of_a_file_share_an_event_loop(workers: int, tmp_path: Path) -> None:
    """Clients and locks of a module belong to the loop that used them first."""
    (tmp_path / "mine.py").write_text(LOOPS)
    spec = f"{tmp_path}/mine.py"
    functions = tuple(f"{spec}:{name}" for name in ("score", "called", "wrapped"))
    settings = RewardConfig(function=functions, workers=workers, on_error="drop")
    training, heldout = make_scorer(settings), make_scorer(settings, functions[:1])
    for scorer in (training, heldout, training):
        result = scorer.trial(responded(), prompt())
        assert not result.failure and set(result.parts.values()) == {1.0}
    environments = Environments(EnvConfig(path=f"{spec}:Talk", workers=workers))
    for key in range(2):
        environments.open(key, prompt())
        assert collect(environments, 1)[key].value[0]["content"] == "1.0"
    # A coroutine that ends its process is a failure, and calls after it are answered.
    leaving = make_scorer(replace(settings, function=(f"{spec}:leaves", f"{spec}:score")))
    for _ in range(2):
        result = leaving.trial(responded(), prompt())
        assert "SystemExit: 3" in result.failure and result.parts == {"score": 1.0}
    for each in (training, heldout, environments, leaving):
        each.close()
    names = [thread.name for thread in threading.enumerate() if thread.name == "r3-async"]
    assert workers or len(names) <= 1, "the loop ends with those who used it"


def test_a_new_loop_per_call_would_break_what_a_module_keeps(tmp_path: Path) -> None:
    """The control: asyncio.run, which makes one."""
    (tmp_path / "mine.py").write_text(LOOPS)
    score = load(f"{tmp_path}/mine.py:score")
    asyncio.run(score("", None))
    with pytest.raises(RuntimeError, match="different event loop"):
        asyncio.run(score("", None))


def test_what_belongs_to_another_thread_names_the_fix(tmp_path: Path) -> None:
    """A connection of the module: made where the file is imported."""
    (tmp_path / "mine.py").write_text(
        "import asyncio, sqlite3\nbase = sqlite3.connect(':memory:')\n"
        "def score(response, prompt):\n    return base.execute('select 2').fetchone()[0]\n"
        "def loops(response, prompt):\n    return asyncio.get_event_loop() and 1\n"
    )
    for name in ("score", "loops"):
        settings = RewardConfig(function=(f"{tmp_path}/mine.py:{name}",))
        refused = pytest.raises(RewardError, match=r"--reward\.workers 2")
        with closing(make_scorer(settings)) as scorer, refused:
            scorer(responded(), prompt())
    assert of_reward(tmp_path / "mine.py", 1) == 2
