"""Environments of OpenEnv, served on this machine or elsewhere, played by the policy.

    python examples/openenv/agent.py 64 > rows.jsonl        rows that only have a seed
    --env.command "VENV/bin/python examples/openenv/agent.py:Agent" --env.args server=word_env:app

The rewards of all steps, as the server gives them, are added up. It imports nothing of R3.
"""

import asyncio
import json
import os
import shlex
import socket
import subprocess
import sys
import urllib.request
from typing import Any

import openai
from openenv import GenericEnvClient


class Agent:
    """Runs all episodes of a rank: a session of the server and a client of the model for each."""

    def __init__(
        self,
        server: str = "",
        url: str = "",
        action: str = "message",
        shown: str = "text",
        turns: int = 20,
        timeout_s: float = 60.0,
    ) -> None:
        """Start a server, or take the URL of one.

        Args:
            server: `module:app` in this folder, and perhaps options of uvicorn.
            url: of a server that runs, instead.
            action: field of an action that gets the model's message.
            shown: field of an observation that the model sees.
            turns: after which an episode ends, if its environment never does.
            timeout_s: for each reply of the server.
        """
        self.turns, self.timeout_s = turns, timeout_s
        self.action, self.shown, self.server, self.url = action, shown, server, url
        self.process: subprocess.Popen[bytes] | None = None
        self.starts = asyncio.Lock()

    async def run(self, task: dict[str, Any], model: Any) -> tuple[float, dict[str, float]]:
        client = openai.AsyncOpenAI(base_url=model.base_url, api_key=model.api_key, timeout=600.0)
        url, seed = await self.address(), int(task["metadata"].get("seed", 0))
        total, steps, messages = 0.0, 0, []
        # One session per episode: a reply that comes too late can meet no other episode.
        session = GenericEnvClient(base_url=url, message_timeout_s=self.timeout_s)
        async with client, session as env:
            result = await env.reset(seed=seed)
            while True:
                total += result.reward or 0.0
                if result.done or steps == self.turns:
                    return total, {"openenv_steps": steps}
                role = "tool" if messages else "user"
                messages.append({"role": role, "content": str(result.observation[self.shown])})
                if role == "tool":
                    messages[-1]["tool_call_id"] = str(steps)
                reply = await client.chat.completions.create(model=model.name, messages=messages)
                text = reply.choices[0].message.content or ""
                messages.append({"role": "assistant", "content": text})
                result = await env.step({self.action: text})
                steps += 1

    async def address(self) -> str:
        """The URL of the server; it is started with the first episode, and again if it died."""
        async with self.starts:
            if self.server and (self.process is None or self.process.poll() is not None):
                with socket.create_server(("127.0.0.1", 0)) as free:
                    port = free.getsockname()[1]
                self.url = f"http://127.0.0.1:{port}"
                words = [*shlex.split(self.server), "--port", str(port), "--app-dir", sys.path[0]]
                self.process = subprocess.Popen(
                    [sys.executable, "-m", "uvicorn", *words],
                    env=os.environ | {"ENABLE_WEB_INTERFACE": "false"},
                )
                while not await asyncio.to_thread(self.is_up):
                    if self.process.poll() is not None:
                        raise RuntimeError(f"{self.server} ended: its output says why")
                    await asyncio.sleep(0.1)
            return self.url

    def is_up(self) -> bool:
        try:
            return urllib.request.urlopen(f"{self.url}/health", timeout=5).status == 200
        except OSError:
            return False


if __name__ == "__main__":
    for seed in range(int(sys.argv[1])):
        print(json.dumps({"question": f"seed {seed}", "answer": "", "seed": seed}))
