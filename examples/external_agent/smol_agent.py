"""An agent of smolagents, with a calculator as its tool, trained through the endpoint.

smolagents writes its own prompts and rewrites the history of each turn, so an episode is several
token sequences. It imports nothing of R3, and R3 needs nothing of smolagents:

    python -m venv runs/smol && runs/smol/bin/pip install "smolagents[openai]"
"""

import re
from typing import Any

from smolagents import ChatMessage, LogLevel, OpenAIModel, Tool, ToolCallingAgent
from smolagents.models import ChatMessageToolCall, ChatMessageToolCallFunction

CALL = re.compile(r"<tool_call>\s*(\d+)\s*([-+*])\s*(\d+)\s*</tool_call>")
# What the framework says by default is longer than the context of the embedded model.
PROMPTS: dict[str, Any] = {
    "system_prompt": "Solve the problem.",
    "planning": {
        "initial_plan": "",
        "update_plan_pre_messages": "",
        "update_plan_post_messages": "",
    },
    "managed_agent": {"task": "", "report": ""},
    "final_answer": {"pre_messages": "", "post_messages": "{{task}}"},
}


class Calculator(Tool):  # type: ignore[misc]
    name = "calc"
    description = "Computes one operation."
    inputs = {"expression": {"type": "string", "description": "such as 47+38"}}  # noqa: RUF012
    output_type = "string"

    def forward(self, expression: str) -> str:
        match = CALL.fullmatch(f"<tool_call>{expression}</tool_call>")
        if match is None:
            return "error"
        left, operator, right = int(match[1]), match[2], int(match[3])
        return str({"+": left + right, "-": left - right, "*": left * right}[operator])


class EmbeddedModel(OpenAIModel):  # type: ignore[misc]
    """The embedded model calls by `<tool_call>47+38</tool_call>` and answers by `#### 85`.

    A model that writes calls in a format of vLLM's parsers (`env.tool_parser`) needs no such class.
    """

    def parse_tool_calls(self, message: ChatMessage) -> ChatMessage:
        text = message.content or ""
        match = CALL.search(text)
        name, key = ("calc", "expression") if match else ("final_answer", "answer")
        value = "".join(match.groups()) if match else text.rpartition("####")[2].strip()
        function = ChatMessageToolCallFunction(name=name, arguments={key: value})
        message.tool_calls = [ChatMessageToolCall(id="call", type="function", function=function)]
        return message


class Agent:
    """Runs all episodes of a rank, each in a thread."""

    def run(self, task: dict[str, Any], model: Any) -> tuple[float, dict[str, int]]:
        policy = EmbeddedModel(
            model.name,
            api_base=model.base_url,
            api_key=model.api_key,
            client_kwargs={"timeout": 600.0},
            tool_choice="auto",  # the framework's default, "required", would need a grammar
        )
        agent = ToolCallingAgent(
            [Calculator()], policy, PROMPTS, max_steps=5, verbosity_level=LogLevel.OFF
        )
        answer = str(agent.run(task["messages"][-1]["content"]))
        right = answer == task["answer"].rpartition("####")[2].strip()
        return float(right), {"agent_steps": len(agent.memory.get_full_steps()) - 1}
