"""A calculator that costs something per call. One instance per conversation, so state is easy."""

import re

CALL = re.compile(r"<tool_call>\s*(\d+)\s*([-+*])\s*(\d+)\s*</tool_call>")
FINAL = re.compile(r"####\s*(-?\d+)")
PRICE = 0.02


class PricedCalculator:
    """The model may call the tool; a message without a call is its final answer."""

    # Shown by the model's chat template.
    tools = (
        {
            "type": "function",
            "function": {
                "name": "calc",
                "description": "Add, subtract or multiply two whole numbers.",
                "parameters": {
                    "type": "object",
                    "properties": {"expression": {"type": "string"}},
                    "required": ["expression"],
                },
            },
        },
    )

    def reset(self, prompt):
        """Begin a conversation: the first messages, which the model answers."""
        self.calls = 0
        self.expected = FINAL.findall(prompt.answer)[-1]
        return prompt.messages

    def step(self, message):
        """Take the model's message; return new messages, a reward or None, and whether it ends."""
        calls = CALL.findall(message["content"])
        if calls:
            self.calls += len(calls)
            replies = [{"role": "tool", "content": str(compute(*call))} for call in calls]
            return replies, None, False
        found = FINAL.findall(message["content"])
        right = bool(found) and found[-1] == self.expected
        return [], float(right) - PRICE * self.calls, True


def compute(left, operator, right):
    """The value of `left operator right`."""
    a, b = int(left), int(right)
    return {"+": a + b, "-": a - b, "*": a * b}[operator]
