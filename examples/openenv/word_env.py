"""An environment of OpenEnv: a word problem whose steps a calculator does.

uvicorn word_env:app
"""

import json
import re
from pathlib import Path
from typing import Any

from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

DATA = Path(__file__).parents[2] / "r3" / "assets" / "data" / "word_problems_train.jsonl"
CALL = re.compile(r"<tool_call>\s*(\d+)\s*([-+*])\s*(\d+)\s*</tool_call>")
ROWS = [json.loads(line) for line in DATA.read_text().splitlines()]


class Message(Action):
    message: str


class Reply(Observation):
    text: str = ""


class WordEnv(Environment[Message, Reply, State]):
    """A call costs 0.05; the right number earns 1."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state, self._answer = State(step_count=0), ""

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Reply:
        self._state = State(episode_id=episode_id, step_count=0)
        row = ROWS[(seed or 0) % len(ROWS)]
        self._answer = row["answer"].rpartition("####")[2].strip()
        return Reply(text=row["question"], done=False, reward=None)

    def step(self, action: Message, timeout_s: float | None = None, **_: Any) -> Reply:
        self._state.step_count += 1
        if not (calls := CALL.findall(action.message)):
            right = action.message.rpartition("####")[2].strip() == self._answer
            return Reply(text="", done=True, reward=float(right))
        left, operator, right = calls[0]
        a, b = int(left), int(right)
        value = {"+": a + b, "-": a - b, "*": a * b}[operator]
        return Reply(text=str(value), done=False, reward=-0.05)

    @property
    def state(self) -> State:
        return self._state


app = create_app(WordEnv, Message, Reply, env_name="words", max_concurrent_envs=256)
