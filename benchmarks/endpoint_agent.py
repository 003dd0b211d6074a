"""The agent of endpoint.py: the calculator's conversation by OpenAI's official client."""

from typing import Any

import httpx
import openai

from r3.envs import Calculator

MAX_CALLS = 8  # more than env.max_turns: the endpoint ends a conversation that is too long


class Agent:
    """Runs the episodes of a rank, many at once."""

    async def run(self, task: dict[str, Any], model: Any) -> None:
        """Talk until the calculator has nothing to say; reward.function scores the last message."""
        # A client per episode: a pool looks at all of its connections for each request. By default
        # a connection may take 5 s, which is short where cores are shared.
        http = httpx.AsyncClient(verify=False, timeout=600.0)
        async with openai.AsyncOpenAI(
            base_url=model.base_url, api_key=model.api_key, http_client=http
        ) as client:
            messages = task["messages"]
            for _ in range(MAX_CALLS):
                reply = await client.chat.completions.create(
                    model=model.name, messages=messages, tools=Calculator.tools
                )
                said = {"role": "assistant", "content": reply.choices[0].message.content or ""}
                replies, _, is_over = Calculator().step(said)
                if is_over:
                    return
                messages += [said, *replies]
