"""Servers of NeMo Gym, as they are, with the policy as their model.

    python examples/nemo_gym/agent.py chain_sum 64 > rows.jsonl
    --env.command "VENV/bin/python examples/nemo_gym/agent.py:Agent"

`gym env start` gives all agents one model server with one key. Here the apps of the servers run in
this process, and each episode has an agent and a model server of its own, whose URL and key are
those of the episode. It imports nothing of R3.
"""

import asyncio
import importlib
import itertools
import json
import socket
import sys
from contextlib import contextmanager
from typing import Any, override

import reasoning_gym
import uvicorn
from nemo_gym.server_utils import (
    GlobalAIOHTTPAsyncClientConfig,
    ServerClient,
    get_global_aiohttp_client,
    set_global_aiohttp_client,
)
from omegaconf import DictConfig

REASONING = "resources_servers.reasoning_gym.app:ReasoningGymResourcesServer"
SIMPLE = "responses_api_agents.simple_agent.app:SimpleAgent"
MODEL = "responses_api_models.openai_model.app:SimpleModelServer"


class Client(ServerClient):
    """Finds servers below paths of one address."""

    @override
    def _build_server_base_url(self, server_config_dict: Any) -> str:
        return str(server_config_dict.url)


class Agent:
    """Runs the episodes of one resources server and one kind of agent."""

    def __init__(self, resources: str = REASONING, agent: str = SIMPLE, **options: Any) -> None:
        """Take the classes, as `module:Class`, and settings of the agent."""
        self.resources, self.agent, self.options = resources, agent, options
        self.apps: dict[str, Any] = {}
        self.numbers, self.starts = itertools.count(), asyncio.Lock()
        self.url = ""

    async def run(self, task: dict[str, Any], model: Any) -> tuple[float, dict[str, float]]:
        await self.started()
        number = next(self.numbers)
        access = {
            "openai_base_url": model.base_url,
            "openai_api_key": model.api_key,
            "openai_model": model.name,
        }
        references = {
            "resources_server": {"type": "resources_servers", "name": "resources"},
            "model_server": {"type": "responses_api_models", "name": f"model-{number}"},
        }
        with (
            self.served(f"model-{number}", MODEL, access),
            self.served(f"agent-{number}", self.agent, references | self.options) as url,
        ):
            reply = await get_global_aiohttp_client().post(
                f"{url}/run", json=task["metadata"]["gym"]
            )
            text = await reply.text()
            if not reply.ok:
                raise RuntimeError(text)
        result = json.loads(text)
        numbers = {key: value for key, value in result.items() if isinstance(value, int | float)}
        reward = float(numbers.pop("reward"))
        return reward, {f"gym_{key}": float(value) for key, value in numbers.items()}

    @contextmanager
    def served(self, name: str, path: str, settings: dict[str, Any]) -> Any:
        """Serve the app of a class below a path while the context is open."""
        module, _, found = path.partition(":")
        kind = getattr(importlib.import_module(module), found)
        address = {"host": "127.0.0.1", "port": 0, "entrypoint": "app.py", "name": name}
        config = kind.model_fields["config"].annotation.model_validate(address | settings)
        client = Client(
            head_server_config={"host": "127.0.0.1", "port": 0},
            global_config_dict=DictConfig(
                {key: {"k": {"k": {"url": f"{self.url}/{key}"}}} for key in [*self.apps, name]}
            ),
        )
        app = kind(config=config, server_client=client).setup_webserver()
        self.apps[name] = app
        try:
            yield f"{self.url}/{name}"
        finally:
            del self.apps[name]

    async def started(self) -> None:
        """Start the server of all apps with the first episode."""
        async with self.starts:
            if self.url:
                return
            set_global_aiohttp_client(GlobalAIOHTTPAsyncClientConfig())
            listener = socket.create_server(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            self.resource = self.served("resources", self.resources, {"domain": "other"})
            self.resource.__enter__()  # until the process ends
            config = uvicorn.Config(
                self.dispatched, interface="asgi3", lifespan="off", log_level="warning"
            )
            server = uvicorn.Server(config)
            self.serving = asyncio.create_task(server.serve(sockets=[listener]))

    async def dispatched(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass `/NAME/...` on to the app NAME."""
        name, _, rest = scope["path"].removeprefix("/").partition("/")
        await self.apps[name](scope | {"path": f"/{rest}", "raw_path": None}, receive, send)


def rows(name: str, count: int) -> None:
    """Print rows of a data set of reasoning-gym in NeMo Gym's form."""
    small = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    for each in reasoning_gym.create_dataset(
        name, seed=0, size=count, **(small if name == "chain_sum" else {})
    ):
        asked = [{"role": "user", "content": each["question"]}]
        gym = dict(each) | {"responses_create_params": {"input": asked}}
        print(json.dumps({"question": each["question"], "answer": "", "gym": gym}))


if __name__ == "__main__":
    rows(sys.argv[1], int(sys.argv[2]))
