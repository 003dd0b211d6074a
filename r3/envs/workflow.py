"""Workflows: agents that call the model themselves. Yours is one class: `--env.path my.py:Agent`.

    class Agent:
        async def run(self, task, model):      # task is the Prompt of a row
            plan = await model.chat([{"role": "user", "content": f"Plan: {task.answer}"}])
            drafts = [model.chat([*task.messages, plan]) for _ in range(2)]
            first, second = await asyncio.gather(*drafts)
            return 1.0                         # reward of the episode; see `checked_result`

R3 creates one instance per episode and runs all episodes of a round on one event loop in a thread
beside the engine, so `run` must not block: `await asyncio.to_thread(function)` calls what does. A
class may have `tools` and `stop`, as an environment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict, Unpack

from r3.envs.tool_calls import Parsed
from r3.types import Message, Prompt

if TYPE_CHECKING:
    import numpy as np


class ModelLimit(Exception):
    """The model cannot be called: no turns or no tokens are left.

    An episode that does not catch it ends unfinished, with `env.unfinished_reward`.

    Attributes:
        limit: "turns" (`env.max_turns`), or "length" (`rollout.max_response_tokens`, or the
            context).
    """

    def __init__(self, limit: Literal["turns", "length"], text: str) -> None:
        super().__init__(limit, text)  # what unpickling gives to __init__
        self.limit = limit

    def __str__(self) -> str:
        return str(self.args[1])


class EpisodeOver(RuntimeError):
    """The model is called after its episode ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """What the model sampled in one call.

    Attributes:
        text: decoded, without the token that ends the model's turn.
        tokens: ids, that token included.
        logprobs: log-probability of each token under the distribution it was drawn from.
        finish_reason: "stop" or "length".
        prompt: ids of the tokens before them.
        routes: returns the experts of each token from an index on but the last, [rows, L, K]; None
            if they are not captured.
        kept: the tokens that each token was drawn from; empty if that is the whole vocabulary.
    """

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    prompt: tuple[int, ...]
    routes: Callable[[int], np.ndarray | None] = lambda start: None
    kept: Sequence[np.ndarray] = ()

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens before the sampled ones."""
        return len(self.prompt)


class ModelMessage(dict[str, Any]):
    """A message of the model, as plain data for chat templates.

    It has `role`, `content`, `finish_reason` and, as `{"name": ..., "arguments": {...}}`, the
    `tool_calls` that the content holds. With `env.reasoning_parser` it has the `reasoning` that the
    content holds.

    Attributes:
        completion: its tokens and their log-probabilities.
        parsed: its content without calls and reasoning, and these.
    """

    def __init__(self, message: Mapping[str, Any], completion: Completion, parsed: Parsed) -> None:
        super().__init__(message)
        self.completion, self.parsed = completion, parsed


class CallOptions(TypedDict, total=False):
    """Keywords of a call of the model.

    Attributes:
        train: whether the sampled tokens are trained on; True if it is left out.
        max_tokens: maximum tokens of the message, within the limits of the run.
        stop: strings that end the message, besides those of the class and of `env.stop`.
        stop_tokens: ids of tokens that end it, besides those of the model.
        temperature: of a call with `train=False`; None is the run's. So are `top_p`, `top_k`.
    """

    train: bool
    max_tokens: int | None
    stop: Sequence[str]
    stop_tokens: Sequence[int]
    temperature: float | None
    top_p: float | None
    top_k: int | None


class Model(Protocol):
    """The policy, as an episode calls it. Calls may be in flight together."""

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Unpack[CallOptions],
    ) -> ModelMessage:
        """Sample the next message of a conversation.

        Args:
            messages: the whole conversation, rendered by the model's chat template.
            tools: JSON schemas for the template; None: those of the row, or of the class.
            options: see `CallOptions`.

        Raises:
            ModelLimit: no turns or no tokens are left.
            ValueError: an argument cannot be used, or the chat template refuses the messages.
        """

    async def complete(
        self, prompt: str | Sequence[int], **options: Unpack[CallOptions]
    ) -> Completion:
        """Continue a text or tokens, without a chat template; otherwise as `chat`."""

    @property
    def max_tokens_total(self) -> int:
        """Maximum tokens of a prompt and its response."""

    @property
    def address(self) -> tuple[str, str]:
        """Where `serve` listens, and the host agents are told: `env.listen`, `env.advertise`."""

    @property
    def refused(self) -> Counter[str]:
        """Calls of the episode that got no message, by cause, a key of `REFUSED`."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""

    def token_bytes(self, token: int) -> bytes:
        """Return the UTF-8 bytes of a token, which may be part of a character."""

    def num_tokens(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> int:
        """Return how many tokens a conversation has; raises what `chat` does."""

    def fork(self) -> Model:
        """Return a handle with random streams of its own, for a branch that runs concurrently."""


class Workflow(Protocol):
    """The method that every workflow has."""

    async def run(self, task: Prompt, model: Model) -> Any:
        """Live one episode; return its result (`checked_result`)."""
