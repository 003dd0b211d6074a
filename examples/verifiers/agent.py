"""Environments of verifiers 0.4 as they are: their tasks, harnesses, tools and rubrics.

    python examples/verifiers/agent.py calculator 64 > rows.jsonl       rows that name the tasks
    --env.command "VENV/bin/python examples/verifiers/agent.py:Agent"   one process runs them

The arguments of the class are the `[env]` table of a verifiers config. The weighted sum of a
task's rewards is the reward, and its metrics and single rewards are metrics. It imports nothing of
R3, and R3 needs nothing of verifiers.
"""

import json
import os
import sys
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

# Harnesses run their programs by uv, which is installed beside this interpreter, and tool servers
# import modules of this folder.
FOLDERS = {"PATH": os.path.dirname(sys.executable), "PYTHONPATH": sys.path[0]}
os.environ |= {key: f"{here}{os.pathsep}{os.environ.get(key, '')}" for key, here in FOLDERS.items()}


class Agent:
    """Runs the episodes of one environment."""

    def __init__(self, **env: Any) -> None:
        self.config = resolve_env_config(env)
        self.tasks: dict[int, vf.Task] = {}
        self.waiting = enumerate(load_environment(self.config).taskset)

    async def run(self, task: dict[str, Any], model: Any) -> tuple[float, dict[str, float]]:
        """Let verifiers play the task of a row; return its reward and metrics."""
        index = task["metadata"]["task"]
        while index not in self.tasks:
            self.tasks.update([next(self.waiting)])
        name = f"R3_KEY_{model.api_key}"
        os.environ[name] = model.api_key  # clients of verifiers read their key from a variable
        client = vf.EvalClientConfig(base_url=model.base_url, api_key_var=name)
        environment = load_environment(self.config)
        try:
            async with environment.serving():
                context = vf.ModelContext(model=model.name, client=client)
                episode = await environment.run_episode(self.tasks[index], context)
        finally:
            del os.environ[name]
        if folder := os.environ.get("R3_RUN_DIR"):
            with open(os.path.join(folder, "agents", f"traces_{os.getpid()}.jsonl"), "a") as file:
                file.write(episode.model_dump_json() + "\n")
        if errors := [*episode.errors, *(each for t in episode.traces for each in t.errors)]:
            raise RuntimeError("\n".join(f"{each.type}: {each.message}" for each in errors))
        trained = [each for each in episode.traces if each.agent.trainable]
        metrics = {}  # with a name of their own: R3 has `env/calls` and others
        for each in trained:
            metrics |= {f"vf_{key}": value for key, value in each.metrics.items()}
            metrics |= {f"vf_{key}": value.score for key, value in each.rewards.items()}
        return sum(each.reward for each in trained), metrics


def rows(taskset: str, count: int) -> None:
    """Print the first rows of a taskset for `data.path`."""
    found = load_environment(resolve_env_config({"taskset": {"id": taskset}})).taskset
    for index, each in enumerate(found.take(count)):
        question = each.data.prompt_text or taskset
        print(json.dumps({"question": question, "answer": "", "task": index}))


if __name__ == "__main__":
    rows(sys.argv[1], int(sys.argv[2]))
