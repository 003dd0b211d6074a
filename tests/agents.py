"""Agents that have a client of the endpoint; the test writes what the model says."""

from collections.abc import Awaitable, Callable
from typing import Any

import openai

from r3.envs import Model, Workflows, serve
from r3.types import Prompt, Rollout
from tests.rounds import env_of, numbered, play_round
from tests.talkers import values
from tests.tiny import tokenizer_with

ASK = [*numbered(1).messages]
CALL = 'I add.<tool_call>{"name": "calc", "arguments": {"x": 1}}</tool_call>'
NUMBER = {"type": "object", "properties": {"x": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "calc", "parameters": NUMBER}}]
PROMPT = numbered(1)
GENERATE = "/inference/v1/generate"

Agent = Callable[[Any], Awaitable[Any]]


class Played:
    """One episode of an agent that has the client and nothing else."""

    def __init__(self, agent: Agent, says: Callable[[str], str], **options: Any) -> None:
        class Served:
            async def run(self, task: Prompt, model: Model) -> Any:
                async with serve(model) as access, client_of(access) as client:
                    client.refused = model.refused
                    played.value = await agent(client)
                    return 1.0

        played = self
        self.value: Any = None
        self.tokenizer = tokenizer_with()
        workflows = Workflows(env_of(options), Served)
        options["says"] = lambda turn: says(self.tokenizer.decode(turn.tokens_T))
        collected, self.turns = play_round(workflows, self.tokenizer, {0: PROMPT}, **options)
        self.rollouts: list[Rollout] = collected.rollouts
        self.metrics = values(collected.metrics)

    @property
    def texts(self) -> list[str]:
        """What was sampled, by sequence."""
        sampled = [each.tokens_T[each.loss_mask_T > 0] for each in self.rollouts]
        return [self.tokenizer.decode(tokens) for tokens in sampled]


def play(agent: Agent, says: str = "hello", **options: Any) -> Played:
    return Played(agent, lambda asked: says, **options)


def chat(client: Any, messages: Any = ASK, /, **options: Any) -> Any:
    return client.chat.completions.create(**{"model": "policy", "messages": messages, **options})


def client_of(access: Any) -> Any:
    """The official client of an endpoint; it asks once."""
    given = {"base_url": access.base_url, "api_key": access.api_key}
    return openai.AsyncOpenAI(**given, max_retries=0)


def address_of(client: Any) -> str:
    """The address of the server, with no API's path behind it."""
    return str(client.base_url).removesuffix("/v1/")


async def post(client: Any, path: str, body: Any) -> Any:
    """What a client without types gets."""
    head = {"Authorization": f"Bearer {client.api_key}"}
    return await client._client.post(address_of(client) + path, json=body, headers=head)
