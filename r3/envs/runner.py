"""Run the environments of many conversations while the engine samples."""

from __future__ import annotations

import inspect
import pickle
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from r3 import extras
from r3.config import EnvConfig
from r3.config.arguments import keyword_arguments
from r3.data.template import Renderer
from r3.envs.chat import Chat
from r3.envs.environment import Environment, Source, announced, call, call_async, call_in_worker
from r3.envs.find import find, is_workflow
from r3.envs.tool_calls import MessageReader, built_in
from r3.types import Message, Prompt
from r3.user_code.calls import Failure, StateError
from r3.user_code.workers import Done, Here, InLane, Lane, Place, Pool, Threads

_CLOSE_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class _Closing:
    """Key of a call of `close`; unlike a conversation's key it gets no reply."""

    key: int


class Environments:
    """One environment per conversation in flight, by key.

    Built-in environments take microseconds and run in the caller's thread. A user's environment
    runs in a thread of its own, as an `async def` on the event loop, or, with `env.workers`, in
    processes. It then travels to a worker and back, pickled, with every call, so a worker that is
    killed loses nothing.

    An environment with a method `close` is closed exactly once when its conversation ends, however
    it ends. If a call failed in a worker process, `close` gets the environment as it was before
    that call. A thread cannot be killed: after a time-out there, `close` runs while the abandoned
    call may still be running.

    Attributes:
        tools: JSON schemas for the chat template.
        stop: strings that end a turn, from the environment and `env.stop`.
        one_turn, is_workflow: False, see `r3.rollout.conversation_setup.OneTurn`.
        has_failed: whether a failure of a conversation was shown; the first one is.
    """

    one_turn = is_workflow = False

    def __init__(self, settings: EnvConfig) -> None:
        """Load the class; workers start with the first conversation.

        Raises:
            ConfigError: the class cannot be loaded or used.
        """
        self.settings = settings
        self._class = cast("type[Environment]", find(settings))
        self._name = settings.path or settings.name
        arguments = keyword_arguments(settings.args)
        by_path = settings.workers and settings.path  # workers load the file themselves
        shown = announced(self._class, arguments, self._name)
        self._source = Source(settings.path if by_path else self._class, arguments, shown)
        self.tools: Sequence[Any] = shown[0]
        self.stop = tuple(dict.fromkeys([*shown[1], *settings.stop]))
        self.has_failed = False
        self._has_close = hasattr(self._class, "close")
        is_async = any(
            inspect.iscoroutinefunction(getattr(self._class, name, None))
            for name in ("reset", "step", "close")
        )
        self._create = call_in_worker if settings.workers else call
        self._call: Callable[..., Any] = self._create
        if is_async and not settings.workers:
            self._call = call_async
        place: Place
        if settings.workers:
            preload = [settings.path] if settings.path else []
            place = extras.processes(settings.workers, preload=preload)
        else:
            place = Threads() if settings.path else Here()
        self._pool = Pool(place, timeout_s=settings.timeout_s, retries=settings.retries)
        self._has_lanes = isinstance(place, Threads) and not is_async
        self._lanes: dict[int, Lane] = {}
        # The environments themselves, or their pickles if they run in workers.
        self._states: dict[int, Any] = {}
        self._created: dict[int, Prompt] = {}  # conversations whose environment is being created
        # Conversations whose creation or reset is outstanding.
        self._opening: set[Hashable] = set()
        self._is_ending = False
        self._num_closing = 0
        self._close_failed = False

    @property
    def outstanding(self) -> int:
        """Calls that were submitted and have not returned."""
        return self._pool.outstanding

    def shared_sizes(self) -> dict[str, int]:
        """Sizes of lists, dicts and sets of the class, which all its instances share."""
        values = {
            name: value
            for cls in reversed(self._class.__mro__)
            for name, value in vars(cls).items()
        }
        kinds = list | dict | set
        return {name: len(shared) for name, shared in values.items() if isinstance(shared, kinds)}

    def open(self, key: int, prompt: Prompt) -> None:
        """Begin a conversation."""
        if self._has_close:
            # Created in a call of its own, so that it can be closed if `reset` fails.
            self._created[key] = prompt
            self._opening.add(key)
            self._pool.submit(key, self._in_lane(key, self._create), "", self._source)
        else:
            self._pool.submit(key, self._in_lane(key), "reset", self._source, prompt)

    def send(self, key: int, message: Message) -> None:
        """Give the environment of a conversation the model's message."""
        self._pool.submit(key, self._in_lane(key), "step", self._states[key], message)

    def suspend(self, key: int) -> bytes:
        """Remove the environment of a conversation that a later step resumes.

        Returns:
            Its state for `resume`.

        Raises:
            StateError: it cannot be pickled. The conversation keeps it.
        """
        state = self._states[key]
        if not self.settings.workers:
            try:
                state = pickle.dumps(state)
            except Exception as error:  # the user's objects may raise anything
                raise StateError(f"{type(error).__name__}: {error}") from error
        del self._states[key]
        self._end_lane(key)
        return bytes(state)

    def resume(self, key: int, state: bytes) -> None:
        """Continue with an environment that was suspended.

        Raises:
            StateError: it cannot be restored.
        """
        self._states[key] = self._restored(state)

    def discard(self, state: bytes) -> None:
        """Close the environment of a suspended conversation that is not resumed."""
        if self._has_close:
            try:
                self._close(-1, self._restored(state))
                self._end_lane(-1)
            except StateError as error:
                self._warn_of_close(Failure("error", str(error)))

    def _restored(self, state: bytes) -> Any:
        if self.settings.workers:
            return state
        try:
            return pickle.loads(state)
        except Exception as error:  # the user's objects may raise anything
            raise StateError(f"{type(error).__name__}: {error}") from error

    def forget(self, key: int) -> None:
        """Close the environment of a conversation that is over."""
        state = self._states.pop(key, None)
        if state is not None and self._has_close:
            self._close(key, state)
        self._end_lane(key)

    def poll(self, timeout_s: float = 0.0) -> list[Done]:
        """Return what environments returned: their first messages, a `Step`, or a failure.

        Waits at most `timeout_s` for the first reply, and not at all if no call is outstanding.
        """
        replies = []
        for done in self._pool.poll(timeout_s):
            key: Any = done.key
            if isinstance(key, _Closing):
                self._num_closing -= 1
                if done.failure is not None:
                    self._warn_of_close(done.failure)
                continue
            prompt = self._created.pop(key, None)
            if done.failure is not None:
                replies.append(done)
            else:
                self._states[key], value = done.value
                if prompt is None:
                    replies.append(Done(key, value, None))
                elif not self._is_ending:
                    self._pool.submit(key, self._in_lane(key), "reset", self._states[key], prompt)
                    continue
            self._opening.discard(key)
        return replies

    def take_counts(self) -> Counter[str]:
        """Return calls, errors, timeouts, crashes and retries since the last call."""
        counts, self._pool.counts = self._pool.counts, Counter()
        return counts

    def close_all(self) -> None:
        """Abandon calls in flight and close every environment that is still open.

        Waits until `close` has returned everywhere, for at most `env.timeout_s` per call.
        """
        # Calls in flight that close an environment, or open one, are awaited: what a `reset` has
        # opened must be closed too. Conversations' other calls are not.
        self._is_ending = True
        self._opening -= self._pool.cancel(
            keep=lambda key: isinstance(key, _Closing),
            keep_started=lambda key: key in self._opening,
        )
        self._created = {key: self._created[key] for key in self._created.keys() & self._opening}
        while True:
            for key in [key for key in self._states if key not in self._opening]:
                self.forget(key)
            if not self._num_closing and not self._opening:
                break
            self.poll(_CLOSE_POLL_S)
        self._is_ending = False

    def close(self) -> None:
        """Close environments that are still open, then end workers and threads."""
        self.close_all()
        self._pool.close()
        for key in list(self._lanes):
            self._end_lane(key)

    def _in_lane(self, key: int, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """A call that runs in the thread of its conversation, if conversations have threads."""
        function = function or self._call
        if not self._has_lanes:
            return function
        if key not in self._lanes:
            self._lanes[key] = Lane()
        return InLane(self._lanes[key], function)

    def _end_lane(self, key: int) -> None:
        if lane := self._lanes.pop(key, None):
            lane.end()

    def _close(self, key: int, state: Any) -> None:
        self._num_closing += 1
        # Never retried: an environment is closed once.
        self._pool.submit_once(_Closing(key), self._in_lane(key), "close", state)

    def _warn_of_close(self, failure: Failure) -> None:
        if not self._close_failed:
            self._close_failed = True  # one warning per run; env/errors counts all
            warnings.warn(
                f"{self._name}: close() failed ({failure.kind}): {failure.text}", stacklevel=2
            )


def conversations(
    settings: EnvConfig,
    renderer: Renderer,
    tokenizer: Any,
    model_path: str,
    template_kwargs: Mapping[str, Any],
) -> tuple[Any, Chat | None, MessageReader]:
    """Return environments or workflows, what renders the messages after the model's, and a parser.

    Raises:
        ConfigError: the environment, the chat template or a parser cannot be used.
    """
    parser = message_reader(settings, tokenizer, template_kwargs)
    if is_workflow(cls := find(settings)):
        from r3.envs.workflows import Workflows

        return Workflows(settings, cls), None, parser
    environments = Environments(settings)
    keep = settings.keep_reasoning
    chat = Chat(renderer, model_path, environments.tools, keep_reasoning=keep)
    return environments, chat, parser


def message_reader(
    settings: EnvConfig, tokenizer: Any, template_kwargs: Mapping[str, Any]
) -> MessageReader:
    """Return what reads tool calls and reasoning: parsers that the settings name, or R3's own.

    Raises:
        ConfigError: a parser cannot be used.
    """
    if not (settings.tool_parser or settings.reasoning_parser):
        return MessageReader(built_in)
    from r3.envs.parsers import message_parser

    return message_parser(settings, tokenizer, template_kwargs)
