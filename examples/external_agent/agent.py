"""An agent in a process of its own: the official client of OpenAI's API, and a calculator.

It imports nothing of R3. The embedded model writes its calls as `<tool_call>47+38</tool_call>`, so
they are read from the text; calls in JSON arrive as `message.tool_calls`, as the API has them.
"""

import json
import os
import re
from pathlib import Path

import openai

CALL = re.compile(r"<tool_call>\s*(\d+)\s*([-+*])\s*(\d+)\s*</tool_call>")
TOOLS = [{"type": "function", "function": {"name": "calc", "parameters": {"type": "object"}}}]


def compute(left: str, operator: str, right: str) -> int:
    a, b = int(left), int(right)
    return {"+": a + b, "-": a - b, "*": a * b}[operator]


def solve(question: list[dict[str, str]]) -> tuple[str, int]:
    """Let the model call the calculator until it answers; return the answer and the calls."""
    client = openai.OpenAI()  # reads OPENAI_BASE_URL and OPENAI_API_KEY
    model, messages, count = os.environ["OPENAI_MODEL"], list(question), 0
    while True:
        reply = client.chat.completions.create(model=model, messages=messages, tools=TOOLS)
        text = reply.choices[0].message.content or ""
        calls = CALL.findall(text)
        if not calls:
            return text.rpartition("####")[2].strip(), count
        messages.append({"role": "assistant", "content": text})
        messages += [
            {"role": "tool", "tool_call_id": str(index), "content": str(compute(*call))}
            for index, call in enumerate(calls)
        ]
        count += len(calls)


task = json.loads(Path(os.environ["R3_TASK_FILE"]).read_text())
answer, calls = solve(task["messages"])
right = answer == task["answer"].rpartition("####")[2].strip()
result = {"reward": float(right), "metrics": {"tool_calls": calls}}
Path(os.environ["R3_RESULT_FILE"]).write_text(json.dumps(result))
