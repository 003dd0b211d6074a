"""A judge asks every component of the reward about a conversation, and never makes the engine wait for the answers.

    judge.submit(key, rollout, prompt)               # when a conversation ends
    for verdict in judge.poll():                     # between steps of the engine
        verdict.reward, verdict.parts, verdict.failure

A component is a function and the place where its calls run: built-ins right here, users' functions and HTTP in threads,
`math` and users' functions with `reward.workers` in processes, the reward model in batches.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from r3.config import RewardConfig
from r3.rewards import REWARDS, Reward, checked, problem, resolve
from r3.runtime.workers import Failure, Here, Place, Pool, Processes, Threads, load
from r3.types import Prompt, Rollout

_SLICE_S = 0.01  # between looks at several components that are all waited for


class RewardError(RuntimeError):
    """A component of the reward failed on one sample and `reward.on_error` is "stop"; says which."""


@dataclass(frozen=True, kw_only=True)
class Component:
    """One part of the reward: `function(response, prompt)` is called in the pool's place and gives a finite number.

    Attributes:
        quick: it runs right here.
        whole: it is given the rollout instead of the response.
    """

    name: str
    function: Callable[..., Any]
    pool: Pool
    weight: float = 1.0
    quick: bool = False
    whole: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardResult:
    """What a conversation is worth: the weighted sum, and what each component gave.

    `failure` is not empty when a component failed and `reward.on_error` goes on all the same; the reward is 0 then.
    """

    key: Hashable
    reward: float
    parts: Mapping[str, float]
    failure: str = ""
    seconds: float = 0.0


@dataclass(slots=True)
class _Case:
    rollout: Rollout
    prompt: Prompt
    began: float
    parts: dict[str, float] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)


class Scorer:
    """The reward of a run or of a held-out set: a weighted sum of components."""

    def __init__(
        self, components: Sequence[Component], *, on_error: Literal["stop", "zero", "drop"] = "stop"
    ) -> None:
        assert len({component.name for component in components}) == len(components) > 0
        self.components = tuple(components)
        self.on_error = on_error
        self._cases: dict[Hashable, _Case] = {}

    @classmethod
    def of_function(cls, function: Callable[[Rollout, Prompt], float]) -> Scorer:
        """A judge that calls a quick function of the rollout right here."""
        return cls([replace(_here("function", function), whole=True)])

    @property
    def outstanding(self) -> int:
        """Conversations without a verdict."""
        return len(self._cases)

    @property
    def quick(self) -> bool:
        """Whether every verdict is there at the first `poll`."""
        return all(component.quick for component in self.components)

    def submit(self, key: Hashable, rollout: Rollout, prompt: Prompt) -> None:
        """Ask about a conversation that has ended."""
        assert key not in self._cases, f"{key} is being judged already"
        self._cases[key] = _Case(rollout, prompt, time.monotonic())
        for component in self.components:
            said = rollout if component.whole else rollout.response
            component.pool.submit(key, component.function, said, prompt)

    def poll(self, timeout_s: float = 0.0) -> list[RewardResult]:
        """Verdicts that are complete; waits at most so long for the first, not at all when nothing is outstanding.

        Raises:
            RewardError: a component failed, its retries included, and `reward.on_error` is "stop".
        """
        until = time.monotonic() + timeout_s
        while True:
            reward_results = self._look()
            left = until - time.monotonic()
            if reward_results or not self._cases or left <= 0:
                return reward_results
            time.sleep(min(_SLICE_S, left))

    def __call__(self, rollout: Rollout, prompt: Prompt) -> float:
        """The reward of one conversation, waited for."""
        assert not self._cases, f"{len(self._cases)} conversations are being judged"
        self.submit(None, rollout, prompt)
        while not (reward_results := self.poll(1.0)):
            pass
        return reward_results[0].reward

    def take_counts(self) -> Counter[str]:
        """Calls, errors, timeouts, crashes and retries of all components since last asked."""
        total: Counter[str] = Counter()
        for component in self.components:
            total += component.pool.counts
            component.pool.counts = Counter()
        return total

    def close(self) -> None:
        """End what was started."""
        for component in self.components:
            component.pool.close()
        self._cases.clear()

    def _look(self) -> list[RewardResult]:
        reward_results = []
        for component in self.components:
            for done in component.pool.poll(0.0):
                case = self._cases[done.key]
                if done.failure is None:
                    case.parts[component.name] = done.value
                else:
                    case.failures.append(self._told(component.name, done.failure, case))
                if len(case.parts) + len(case.failures) == len(self.components):
                    del self._cases[done.key]
                    reward_results.append(self._verdict(done.key, case))
        return reward_results

    def _told(self, name: str, failure: Failure, case: _Case) -> str:
        told = (
            f"reward {name} failed ({failure.kind}): {failure.text}\n"
            f"  prompt {case.prompt.id}, sample {case.rollout.sample_index}, "
            f"response (first 200 characters): {case.rollout.response[:200]!r}"
        )
        if self.on_error == "stop":
            raise RewardError(f"{told}\n  reward.on_error drop or zero goes on without it")
        return told

    def _verdict(self, key: Hashable, case: _Case) -> RewardResult:
        seconds = time.monotonic() - case.began
        if case.failures:
            failure = "\n".join(case.failures)
            return RewardResult(
                key=key, reward=0.0, parts=case.parts, failure=failure, seconds=seconds
            )
        # In the order of reward.function: sums of floats depend on it, and answers come as they like.
        parts = {each.name: case.parts[each.name] for each in self.components}
        reward = sum(each.weight * parts[each.name] for each in self.components)
        return RewardResult(key=key, reward=reward, parts=parts, seconds=seconds)


def make_scorer(
    settings: RewardConfig, functions: Sequence[str] = (), *, model: Any = None
) -> Scorer:
    """The judge that `reward.*` describe, or, with other `functions`, one of those, weighted alike.

    Args:
        model: the `r3.rewards.model.RewardModel` where a function is "model".

    Raises:
        ConfigError: what a user can mend.
    """
    specs = tuple(functions) or settings.function
    weights = (() if functions else settings.weights) or (1.0,) * len(specs)
    components = [
        _component(spec, name, weight, settings, model)
        for spec, name, weight in zip(specs, names_of(specs), weights, strict=True)
    ]
    return Scorer(components, on_error=settings.on_error)


def names_of(specs: Sequence[str]) -> list[str]:
    """Names of components in metrics and dumps: the built-in's, or the function's, numbered where two are alike."""
    names: list[str] = []
    for spec in specs:
        name = base = spec.rpartition(":")[2]
        number = 1
        while name in names:
            number += 1
            name = f"{base}_{number}"
        names.append(name)
    return names


def _component(
    spec: str, name: str, weight: float, settings: RewardConfig, model: Any
) -> Component:
    def pool(place: Place, backoff_s: float = 0.0) -> Pool:
        return Pool(
            place, timeout_s=settings.timeout_s, retries=settings.retries, backoff_s=backoff_s
        )

    if spec in REWARDS:
        return _here(name, REWARDS[spec], weight)
    if spec == "http":
        from r3.rewards.http import ChatJudge

        connections = pool(Threads(settings.max_connections), settings.backoff_s)
        return Component(
            name=name, function=ChatJudge(settings).score, pool=connections, weight=weight
        )
    if spec == "model":
        assert model is not None, "a reward model is loaded before its judges are made"
        return Component(name=name, function=model.score, pool=pool(model.batches()), weight=weight)
    if spec == "math":
        from r3.rewards import verify

        try:
            import math_verify  # noqa: F401
        except ImportError as error:
            fix = "pip install 'math-verify==0.9.0' (the extra math of pyproject.toml)"
            raise problem(spec, f"math-verify cannot be imported: {error}", fix) from None
        workers = Processes(max(1, settings.workers), preload=[f"{verify.__file__}:equal"])
        return Component(name=name, function=verify.equal, pool=pool(workers), weight=weight)
    function = resolve(spec)
    if settings.workers:
        workers = Processes(settings.workers, preload=[spec])
        return Component(
            name=name, function=partial(_call_there, spec), pool=pool(workers), weight=weight
        )
    call = _call_async if inspect.iscoroutinefunction(function) else _call
    return Component(
        name=name, function=partial(call, function), pool=pool(Threads()), weight=weight
    )


def _here(name: str, function: Callable[..., Any], weight: float = 1.0) -> Component:
    # No time limit can hold here, and what fails on a sample fails again.
    pool = Pool(Here(), timeout_s=float("inf"))
    return Component(
        name=name, function=partial(_call, function), pool=pool, weight=weight, quick=True
    )


def _call(function: Callable[..., Any], response: Any, prompt: Prompt) -> float:
    return checked(function(response, prompt))


async def _call_async(function: Reward, response: str, prompt: Prompt) -> float:
    return checked(await function(response, prompt))


def _call_there(spec: str, response: str, prompt: Prompt) -> float:
    """In a worker process, which has loaded the file already."""
    value = load(spec)(response, prompt)
    return checked(asyncio.run(value) if inspect.iscoroutine(value) else value)
