"""A calculator tool: the model calls it until it answers the question."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from r3.envs.tool_calls import call_texts, read_json
from r3.types import Message, Prompt

_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_LONGEST_EXPRESSION = 200  # characters; without powers, nothing that short takes long


class Calculator:
    """Reply to `<tool_call>47+38</tool_call>` with a tool message `85`.

    A call may also be JSON with name and arguments. The reply to a call that cannot be computed is
    "error". A message without a call is the answer, which reward functions score.
    """

    tools = (
        {
            "type": "function",
            "function": {
                "name": "calc",
                "description": "Evaluate an expression of numbers, + - * / and parentheses.",
                "parameters": {
                    "type": "object",
                    "properties": {"expression": {"type": "string"}},
                    "required": ["expression"],
                },
            },
        },
    )

    def reset(self, prompt: Prompt) -> Sequence[Message]:
        """Return the prompt's own messages; the chat template adds the tool."""
        return prompt.messages

    def step(self, message: Message) -> tuple[Sequence[Message], float | None, bool]:
        """Reply to every call of the message, in order."""
        calls = [text for _, text in call_texts(message["content"])]
        return [{"role": "tool", "content": _reply(call)} for call in calls], None, not calls


def _reply(call: str) -> str:
    expression = call.strip()
    if expression.startswith("{"):
        try:
            expression = str(read_json(expression)["arguments"]["expression"])
        except (ValueError, KeyError, TypeError):
            return "error"
    try:
        return evaluate(expression)
    except (ValueError, SyntaxError, ArithmeticError, RecursionError, MemoryError):
        return "error"


def evaluate(expression: str) -> str:
    """Evaluate an expression of numbers exactly; whole numbers have no decimal point.

    Raises:
        ValueError, SyntaxError, ArithmeticError: it has no value, or is too long.
    """
    if len(expression) > _LONGEST_EXPRESSION:
        raise ValueError("too long")
    value = _value(ast.parse(expression.strip(), mode="eval").body)
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.10g}"


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return Fraction(str(number))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return Fraction(_OPERATORS[type(op)](_value(left), _value(right)))
    raise ValueError(f"{ast.unparse(node)} is not arithmetic")
