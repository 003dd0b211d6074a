"""Three attempts at a problem run side by side, each with a calculator; the majority answers."""

import asyncio
from collections import Counter

from r3.envs.calculator import Calculator
from r3.envs.workflow import ModelLimit

ATTEMPTS = 3


class VotingAgent:
    """Reward the answer that most attempts agree on."""

    tools = Calculator.tools

    async def run(self, task, model):
        # Each branch has a handle of its own, so that no branch depends on the speed of another.
        branches = [model.fork() for _ in range(ATTEMPTS)]
        answers = await asyncio.gather(*(attempt(task, branch) for branch in branches))
        (answer, votes), *_ = Counter(answers).most_common()
        return float(answer == number_of(task.answer)), {"votes": votes}


async def attempt(task, model):
    """One conversation with the tool; return the final number, or "" if there is none."""
    calculator, messages, done = Calculator(), list(task.messages), False
    try:
        while not done:
            message = await model.chat(messages)
            replies, _, done = calculator.step(message)
            messages += [message, *replies]
    except ModelLimit:  # no turns or tokens are left
        return ""
    return number_of(message["content"])


def number_of(text):
    """The text after the last ####."""
    return text.rpartition("####")[2].strip() if "####" in text else ""
