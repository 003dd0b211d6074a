"""A coding agent with a shell, trained through the endpoint: `examples/swe_task/agent.py:Agent`.

The reward is 1 if the hidden test and all visible ones pass afterwards, 0.1 for an edit after which
only the visible ones pass, else 0.
"""

import json
import os
import re
from typing import Any

import openai
from repository import ISOLATED, Repository, isolation

CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command in the folder of the repository.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
        },
    },
}


def commands(message: Any) -> list[str]:
    """The commands of a message: calls as the API has them, or plain text in the tags."""
    if message.tool_calls:
        return [json.loads(each.function.arguments)["command"] for each in message.tool_calls]
    return [text.strip() for text in CALL.findall(message.content or "")]


class Agent:
    """Runs all episodes of a rank, each in a thread."""

    def __init__(self) -> None:
        self.prefix = isolation()
        print("commands are isolated:", self.prefix == ISOLATED)

    def run(self, task: dict[str, Any], model: Any) -> tuple[float, dict[str, int]]:
        client = openai.OpenAI(base_url=model.base_url, api_key=model.api_key, timeout=600.0)
        messages, count = task["messages"], 0
        with client, Repository(task["metadata"], self.prefix) as repository:
            while True:
                reply = client.chat.completions.create(
                    model=model.name, messages=messages, tools=[BASH]
                )
                message = reply.choices[0].message
                if not (found := commands(message)):
                    break
                messages.append(message.model_dump(exclude_none=True))
                for index, command in enumerate(found):
                    output, _ = repository.run(command)
                    name = message.tool_calls[index].id if message.tool_calls else str(index)
                    messages.append({"role": "tool", "tool_call_id": name, "content": output})
                count += len(found)
            edits = repository.edits()
            reward, metrics = repository.score(edits)
        record(task, reward, edits)
        return reward, metrics | {"swe_commands": count}


def record(task: dict[str, Any], reward: float, edits: str) -> None:
    """Keep the edits of an episode in the folder of the run."""
    if folder := os.environ.get("R3_RUN_DIR"):
        line = json.dumps({"id": task["id"], "reward": reward, "edits": edits}) + "\n"
        with open(os.path.join(folder, "agents", f"edits_{os.getpid()}.jsonl"), "a") as file:
            file.write(line)
