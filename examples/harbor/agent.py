"""Tasks of Harbor, as they are, played by the policy: `examples/harbor/agent.py:Agent`.

Each episode is a trial of Harbor; its verifier gives the reward. It imports nothing of R3.
"""

import asyncio
import os
import re
from pathlib import Path
from typing import Any, override

import openai
from harbor.agents.base import BaseAgent
from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext
from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig
from harbor.trial.trial import Trial

CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
BASH = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}
LIMIT_S = 30
LONGEST = 400  # characters of output that the model sees


class Policy(BaseAgent):
    """An agent of Harbor with a shell; others of Harbor take the same `base_url` and key."""

    def __init__(self, *args: Any, base_url: str, api_key: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.access = {"base_url": base_url, "api_key": api_key}

    @staticmethod
    @override
    def name() -> str:
        return "policy"

    @override
    def version(self) -> str:
        return "1"

    @override
    async def setup(self, environment: BaseEnvironment) -> None:
        pass

    @override
    async def run(
        self, instruction: str, environment: BaseEnvironment, context: AgentContext
    ) -> None:
        messages: list[Any] = [{"role": "user", "content": instruction.strip()}]
        async with openai.AsyncOpenAI(timeout=600.0, **self.access) as client:
            while True:
                reply = await client.chat.completions.create(
                    model="policy", messages=messages, tools=[BASH]
                )
                text = reply.choices[0].message.content or ""
                if not (found := CALL.findall(text)):
                    return
                messages.append({"role": "assistant", "content": text})
                for index, command in enumerate(found):
                    output = await self.shown(environment, command)
                    messages.append({"role": "tool", "tool_call_id": str(index), "content": output})

    async def shown(self, environment: BaseEnvironment, command: str) -> str:
        try:
            done = await environment.exec(
                command, env={"BASH_ENV": "/app/commands.sh"}, timeout_sec=LIMIT_S
            )
        except TimeoutError:
            return f"[ended after {LIMIT_S} s]"
        text = f"{done.stdout or ''}{done.stderr or ''}".strip()
        left_out = len(text) - LONGEST
        return text if left_out <= 0 else f"{text[:LONGEST]}\n[... {left_out} characters left out]"


class Agent:
    """Runs the trials of a rank, many at once."""

    def __init__(self, tasks: str, environment: str = "local:Local", **options: Any) -> None:
        """Take the folder of the tasks, and where they run: a type of Harbor or a class."""
        self.tasks = Path(tasks).absolute()
        key = "import_path" if ":" in environment else "type"
        self.environment = EnvironmentConfig(**{key: environment}, kwargs=options)
        self.trials = Path(os.environ.get("R3_RUN_DIR", ".")).absolute() / "agents" / "trials"

    async def run(self, task: dict[str, Any], model: Any) -> tuple[float, dict[str, float]]:
        access = {"base_url": model.base_url, "api_key": model.api_key}
        config = TrialConfig(
            task=TaskConfig(path=self.tasks / task["metadata"]["task"]),
            trials_dir=self.trials,
            agent=AgentConfig(
                import_path="agent:Policy", model_name=f"openai/{model.name}", kwargs=access
            ),
            environment=self.environment,
        )
        trial = await Trial.create(config)
        running = asyncio.ensure_future(trial.run())
        try:
            result = await running
        finally:
            running.cancel()
        failure = result.exception_info
        is_late = failure is not None and failure.exception_type == "AgentTimeoutError"
        if result.verifier_result is None or (failure is not None and not is_late):
            raise RuntimeError(f"{failure.exception_type}: {failure.exception_message}")
        # What an agent did before its time was over counts, as Harbor's verifier saw it.
        rewards = result.verifier_result.rewards | {"late": float(is_late)}
        return float(rewards["reward"]), {f"harbor_{key}": value for key, value in rewards.items()}
