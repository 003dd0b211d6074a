"""Run workflows: the episodes of a round on one event loop in a thread beside the engine."""

from __future__ import annotations

import asyncio
import queue
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from r3.config import EnvConfig
from r3.config.arguments import keyword_arguments
from r3.envs.environment import announced, require_same
from r3.envs.workflow import Model, ModelLimit, Workflow
from r3.metrics.glossary import checked_metrics
from r3.runtime.device import has_gpu
from r3.types import Prompt
from r3.user_code.calls import CallError, CallTimeout, number, own_copy
from r3.user_code.workers import Done, Pool, Threads

_WAIT_S = 0.01  # for calls of the model, between looks at episodes that have ended
_LONGEST_PAUSE_S = 0.1  # for one more call
_BEAT_S = 1.0  # between signs of life that the event loop is asked for
_CANCEL_AGAIN_S = 1.0  # until an episode that ignores its cancellation is cancelled again


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What `Workflow.run` returned, checked.

    Attributes:
        reward: of the whole episode; None leaves it to reward functions.
        call_rewards: of each trained call, in the order of the calls; empty for one reward.
        metrics: by full names, `env/NAME`.
    """

    reward: float | None = None
    call_rewards: tuple[float, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)


def checked_result(value: Any, num_calls: int) -> Result:
    """Check what a user's `run` returned.

    Args:
        value: a number, None, or a list with one number per trained call; or a pair of that and
            metrics, numbers by name.
        num_calls: trained calls that the episode completed.

    Raises:
        CallError: it is something else.
    """
    metrics: Mapping[str, float] = {}
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping):
        value, reported = value
        try:
            metrics = checked_metrics(reported, "env")
        except ValueError as error:
            raise CallError(str(error), again=False) from error
    if getattr(value, "shape", ()):  # arrays of numpy and torch
        value = value.tolist()
    is_list = isinstance(value, list)
    rewards = value if is_list else [] if value is None else [value]
    try:
        rewards = [number(reward) for reward in rewards]
    except ValueError:
        raise CallError(
            "run must return a finite number, None, or a list with a number per trained call, and "
            f"may return metrics beside it, (1.0, {{'name': 2}}); it returned {value!r}",
            again=False,
        ) from None
    if is_list and len(value) != num_calls:
        raise CallError(
            f"run returned {len(value)} rewards, and the episode has {num_calls} calls with "
            "train=True that it has awaited. Return one reward per such call",
            again=False,
        )
    if is_list:
        return Result(call_rewards=tuple(rewards), metrics=metrics)
    return Result(reward=rewards[0] if rewards else None, metrics=metrics)


class OwnTime:
    """Cancels an episode that takes too long, calls of the model not counted.

    It lives on the event loop. While a call of the model is in flight the time stands still: how
    long the engine takes is not the workflow's doing.
    """

    def __init__(self, limit_s: float) -> None:
        """Start with the present task as the episode."""
        self.expired = False
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        self._left_s, self._calls = limit_s, 0
        self._start()

    def pause(self) -> None:
        """A call of the model begins."""
        if not self._calls:
            self.stop()
            self._left_s -= self._loop.time() - self._began
        self._calls += 1

    def resume(self) -> None:
        """A call of the model has ended."""
        self._calls -= 1
        if not self._calls:
            self._start()

    def stop(self) -> None:
        """The episode is over, or waits for the model."""
        self._timer.cancel()

    def _start(self) -> None:
        self._began = self._loop.time()
        self._timer = self._loop.call_later(max(0.0, self._left_s), self._expire)

    def _expire(self) -> None:
        assert self._task is not None
        self.expired = True
        self._task.cancel()
        # Code that catches every exception may ignore it.
        self._timer = self._loop.call_later(_CANCEL_AGAIN_S, self._expire)


class Episode(Protocol):
    """An episode, as its workflow drives it."""

    @property
    def num_calls(self) -> int:
        """Trained calls that the attempt has awaited."""

    def begin(self, own_time: OwnTime) -> Model:
        """An attempt starts, on the event loop; return what the workflow calls."""

    def end(self) -> None:
        """The attempt is over: calls in flight are ignored and further ones refused."""


class Workflows:
    """The episodes of workflows in flight, by key, on one event loop in a thread.

    Attributes:
        settings: `env.*`. `env.timeout_s` is the limit of an episode's own time (`OwnTime`).
        tools: JSON schemas for the chat template.
        stop: strings that end a message, from the class and `env.stop`.
        one_turn, is_workflow: see `r3.rollout.conversation_setup.OneTurn`.
        has_failed: whether a failure of an episode was shown; the first one is.
        wake: put anything into it to end a wait of `poll`.
    """

    one_turn, is_workflow = False, True

    def __init__(self, settings: EnvConfig, cls: type[Workflow]) -> None:
        """Take a class; the event loop starts with the first episode."""
        self.settings = settings
        self.wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.has_failed = False
        self._class = cls
        self._arguments = keyword_arguments(settings.args)
        if settings.command:
            self._arguments["command"] = settings.command
        self._shown = announced(cls, self._arguments, settings.path or cls.__name__)
        self.tools: Sequence[Any] = self._shown[0]
        self.stop = tuple(dict.fromkeys([*self._shown[1], *settings.stop]))
        # Episodes limit their own time. `env.workers` limits commands; other workflows refuse it.
        limit = settings.workers or float("inf")
        self._pool = Pool(Threads(), timeout_s=float("inf"), retries=settings.retries, limit=limit)
        self._thread = 0  # that of the event loop
        self._loop: asyncio.AbstractEventLoop | None = None
        self._beat_asked: float | None = None
        self._beat_due = 0.0
        self._alive = threading.Event()
        self._polled, self._gathers = 0.0, not has_gpu()

    @property
    def outstanding(self) -> int:
        """Episodes that have not ended."""
        return self._pool.outstanding

    def open(self, key: int, task: Prompt, episode: Episode) -> None:
        """Begin an episode; a retry begins it again."""
        self._pool.submit(key, self._run, task, episode)

    def poll(self, timeout_s: float = 0.0) -> list[Done]:
        """Return the episodes that have ended: (result, limit that ended it), or a failure.

        Waits at most `timeout_s` for one or for `wake`.
        """
        began = time.monotonic()
        until = began + timeout_s
        while not (done := self._pool.poll(0.0)) and self._pool.outstanding:
            remaining_s = until - time.monotonic()
            if remaining_s <= 0 or not self.wake.empty():
                break
            with suppress(queue.Empty):
                self.wake.get(timeout=min(_WAIT_S, remaining_s))
                break
        if self._gathers and not self.wake.empty():
            # Calls that come one by one would each make small batches of the engine's next steps,
            # and the engine would take the cores from the agents that are about to call. So the
            # engine waits for the next call as long as its last step took.
            pause_s = min(_LONGEST_PAUSE_S, began - self._polled)
            with suppress(queue.Empty):
                while True:
                    self.wake.get(timeout=pause_s)
            done = done or self._pool.poll(0.0)
        while not self.wake.empty():
            self.wake.get()
        self._polled = time.monotonic()
        return done

    def call_soon(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function on the event loop."""
        assert self._loop is not None, "no episode has started"
        self._loop.call_soon_threadsafe(function, *arguments)

    def blocked(self) -> str:
        """Where code has kept the event loop busy for longer than `env.timeout_s`; else ""."""
        now = time.monotonic()
        if self._loop is None or now < self._beat_due:
            return ""
        self._beat_due = now + _BEAT_S
        if self._beat_asked is None:
            self._beat_asked = now
            self._alive.clear()
            self._loop.call_soon_threadsafe(self._beat)
        # The engine may have kept the interpreter's lock for as long.
        elif now - self._beat_asked > self.settings.timeout_s and not self._alive.wait(_BEAT_S):
            frame = sys._current_frames().get(self._thread)
            return "".join(traceback.format_stack(frame, limit=4)) if frame else "unknown code"
        return ""

    def take_counts(self) -> Counter[str]:
        """Return calls, errors, timeouts, crashes and retries since the last call."""
        counts, self._pool.counts = self._pool.counts, Counter()
        return counts

    def close_all(self) -> None:
        """Cancel all episodes."""
        self._pool.cancel(keep=lambda _: False)

    def close(self) -> None:
        """Cancel all episodes and end the event loop."""
        self.close_all()
        self._pool.close()
        self._loop = None

    def _beat(self) -> None:
        self._beat_asked = None
        self._alive.set()

    async def _run(self, task: Prompt, episode: Episode) -> tuple[Result | None, ModelLimit | None]:
        """Live one attempt; return its result, or the limit that ended it."""
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        own_time = OwnTime(self.settings.timeout_s)
        model = episode.begin(own_time)
        try:
            workflow = self._class(**own_copy(self._arguments))
            value = await workflow.run(own_copy(task), model)
            if own_time.expired:  # it caught its cancellation
                raise asyncio.CancelledError
            require_same(self._shown, workflow, "run")
            return checked_result(value, episode.num_calls), None
        except ModelLimit as limit:
            return None, limit
        except asyncio.CancelledError as cancelled:
            if own_time.expired:
                text = f"not done after {self.settings.timeout_s:g} s, calls of the model excluded"
                notes = getattr(cancelled, "__notes__", [])
                raise CallTimeout("\n".join([text, *notes])) from None
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise  # the round was abandoned
            raise CallError("the workflow cancelled itself") from None
        finally:
            own_time.stop()
            episode.end()
            self.wake.put(None)
