"""An environment of verifiers in several turns: the user of the agent is a calculator."""

import re

import verifiers.v1 as vf
from word_problems import WordProblems, WordTask

CALL = re.compile(r"<tool_call>\s*(\d+)\s*([-+*])\s*(\d+)\s*</tool_call>")


def compute(left: str, operator: str, right: str) -> str:
    a, b = int(left), int(right)
    return str({"+": a + b, "-": a - b, "*": a * b}[operator])


class CalculatorConfig(vf.EnvConfig):
    solver: vf.AgentConfig = vf.AgentConfig()


class CalculatorEnv(vf.Env[CalculatorConfig]):
    async def run(self, task: WordTask, agents: vf.Agents) -> None:
        async with agents.solver.interaction(task) as interaction:
            segment, count = await interaction.turn(), 0
            while not segment.terminated and (calls := CALL.findall(segment.last_reply)):
                count += len(calls)
                segment = await interaction.turn("\n".join(compute(*each) for each in calls))
        interaction.trace.record_metric("tool_calls", count)


__all__ = ["CalculatorEnv", "WordProblems"]
