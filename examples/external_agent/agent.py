"""An agent in a process of its own: the official client of OpenAI's API, and a calculator.

It imports nothing of R3. The embedded model writes its calls as `<tool_call>47+38</tool_call>`, so
they are read from the text; calls in JSON arrive as `message.tool_calls`, as the API has them.
"""

import re
from typing import Any

import openai

CALL = re.compile(r"<tool_call>\s*(\d+)\s*([-+*])\s*(\d+)\s*</tool_call>")
TOOLS = [{"type": "function", "function": {"name": "calc", "parameters": {"type": "object"}}}]


def compute(left: str, operator: str, right: str) -> int:
    a, b = int(left), int(right)
    return {"+": a + b, "-": a - b, "*": a * b}[operator]


class Agent:
    """Runs all episodes of a rank, many at once."""

    async def run(self, task: dict[str, Any], model: Any) -> tuple[float, dict[str, int]]:
        client = openai.AsyncOpenAI(base_url=model.base_url, api_key=model.api_key, timeout=600.0)
        messages, count = task["messages"], 0
        while True:
            reply = await client.chat.completions.create(
                model=model.name, messages=messages, tools=TOOLS
            )
            text = reply.choices[0].message.content or ""
            calls = CALL.findall(text)
            if not calls:
                break
            messages.append({"role": "assistant", "content": text})
            messages += [
                {"role": "tool", "tool_call_id": str(index), "content": str(compute(*call))}
                for index, call in enumerate(calls)
            ]
            count += len(calls)
        right = text.rpartition("####")[2].strip() == task["answer"].rpartition("####")[2].strip()
        return float(right), {"tool_calls": count}
