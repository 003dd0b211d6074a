"""A taskset of verifiers whose tasks bring a tool: a calculator as an MCP server."""

import verifiers.v1 as vf
from calculator import compute
from word_problems import WordData, WordProblems, WordTask


class Calculator(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = None

    @vf.tool
    def calc(self, left: int, operator: str, right: int) -> str:
        """Compute one operation: +, - or *."""
        return compute(str(left), operator, str(right))


class ToolConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class ToolTask(WordTask, vf.Task[WordData, vf.State, ToolConfig]):
    @classmethod
    def toolsets(cls, config: ToolConfig) -> list[vf.Toolset]:
        return [Calculator(config.tools)]

    @vf.metric
    async def tool_results(self, trace: vf.Trace) -> float:
        return float(sum(node.message.role == "tool" for node in trace.nodes))


class ToolConfigs(vf.TasksetConfig):
    task: ToolConfig = ToolConfig()


class ToolProblems(vf.Taskset[ToolTask, ToolConfigs]):
    def load(self) -> list[ToolTask]:
        return [ToolTask(each.data, self.config.task) for each in WordProblems(self.config).load()]


__all__ = ["ToolProblems"]

if __name__ == "__main__":
    Calculator.run()
