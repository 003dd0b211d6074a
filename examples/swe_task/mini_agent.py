"""mini-swe-agent as it is, in the same repositories: `examples/swe_task/mini_agent.py:Agent`.

Its loop, templates and LiteLLM client are the package's own; its commands run in `repository.py`.
"""

import os
from typing import Any

os.environ |= {"MSWEA_SILENT_STARTUP": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}

from agent import record
from minisweagent.agents.default import DefaultAgent
from minisweagent.models.litellm_textbased_model import LitellmTextbasedModel
from repository import Repository, isolation


class Shell:
    """An environment of mini-swe-agent."""

    def __init__(self, repository: Repository) -> None:
        self.repository = repository

    def execute(self, action: dict[str, Any], cwd: str = "") -> dict[str, Any]:
        output, code = self.repository.run(action["command"])
        return {"output": output, "returncode": code, "exception_info": ""}

    def get_template_vars(self, **_: Any) -> dict[str, Any]:
        return {}

    def serialize(self) -> dict[str, Any]:
        return {}


class Agent:
    """Runs all episodes of a rank, each in a thread."""

    def __init__(self) -> None:
        self.prefix = isolation()

    def run(self, task: dict[str, Any], model: Any) -> tuple[float, dict[str, int]]:
        how = {"api_base": model.base_url, "api_key": model.api_key, "timeout": 600.0}
        client = LitellmTextbasedModel(
            model_name=f"openai/{model.name}",
            model_kwargs=how,
            cost_tracking="ignore_errors",
            action_regex=r"(?s)<tool_call>(.*?)</tool_call>",
            observation_template="{{ output.output }}",
        )
        with Repository(task["metadata"], self.prefix) as repository:
            agent = DefaultAgent(
                client,
                Shell(repository),
                system_template="bash",
                instance_template="{{ task }}",
                max_consecutive_format_errors=1,  # a message without a command ends the episode
            )
            agent.run(task["messages"][-1]["content"])
            edits = repository.edits()
            reward, metrics = repository.score(edits)
        record(task, reward, edits)
        return reward, metrics | {"swe_commands": agent.n_calls}
