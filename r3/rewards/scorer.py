"""The reward of a conversation: a weighted sum of components, computed while the engine samples.

    scorer.submit(key, rollout, prompt)              # when a conversation ends
    for result in scorer.poll():                     # between steps of the engine
        result.reward, result.parts, result.failure

A component of a group scores all samples of a prompt at once. It is called when
`complete_group` says that the group has no more conversations to score.

A component is a function and the place where its calls run: built-in functions in the caller's
thread, users' functions and HTTP in threads, `math` and users' functions with `reward.workers` in
processes, the reward model in batches, `self_judge` in the engine of the round. The engine never
waits for a component.
"""

from __future__ import annotations

import inspect
import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

from r3 import extras
from r3.config import RewardConfig
from r3.config.arguments import ENVIRONMENT, JUDGES, reward_names
from r3.data.conversation import replied
from r3.data.rows import verifier_of
from r3.data.template import Renderer
from r3.errors import Explained
from r3.rewards import REWARDS, Own, Score, checked_score, own_functions
from r3.runtime.terminal import say
from r3.types import Message, Prompt, Rollout
from r3.user_code.calls import CallError, Failure
from r3.user_code.loading import UserFunction
from r3.user_code.workers import Here, Place, Pool, Threads

_POLL_INTERVAL_S = 0.01  # between looks at components that are all waited for


class RewardError(Explained):
    """A component failed and `reward.on_error` is "stop". The message names the sample."""


@dataclass(frozen=True, kw_only=True)
class Component:
    """One part of the reward.

    Attributes:
        name: in metrics and dumps.
        function: called as `function(argument, prompt)`; returns a finite number or a `Score`.
        pool: where it runs.
        weight: its factor in the sum; with 0 it is only reported.
        takes: the first argument: the response, the whole rollout, or the environment's reward.
        wants_messages: whether the whole conversation is a third argument.
        judges: whether it judges the last message of a conversation: its prompt has the messages
            before that one, of all turns, and not those of the row.
        of_group: whether it is called once for all samples of a prompt. The first argument is then
            the list of their responses, the third the list of their conversations, and it returns
            as many numbers or `Score`s.
        by_verifier: of the function `row`: the components by the names that rows have in their
            column `verifier`. The component itself fails for rows that name none of them.
        lacks: why it cannot be called before the run has started; empty if it can.
    """

    name: str
    function: Callable[..., Any]
    pool: Pool
    weight: float = 1.0
    takes: Literal["response", "rollout", "environment"] = "response"
    wants_messages: bool = False
    judges: bool = False
    of_group: bool = False
    by_verifier: Mapping[str, Component] = field(default_factory=dict)
    lacks: str = ""

    @property
    def choices(self) -> tuple[Component, ...]:
        """All components of which a row names one, or this one alone."""
        return (*self.by_verifier.values(), self)

    def of(self, prompt: Prompt) -> Component:
        """Return the component that scores responses to this prompt."""
        # Rows are checked when they are read, unless their environment was to reward them.
        return self.by_verifier.get(str(verifier_of(prompt.metadata)), self)


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardResult:
    """The reward of one conversation.

    Attributes:
        reward: weighted sum of the components; 0 after a failure.
        parts: the value of each component. The function row has its value twice: as row, and as
            row_NAME for the function that the row named.
        metrics: what users' functions reported, by full names.
        failure: why a component failed; empty if none did. A component of weight 0 does not count:
            it only reports.
        unreported: why components of weight 0 failed; empty if none did.
        seconds: time from `submit` to the last component.
    """

    key: Hashable
    reward: float
    parts: Mapping[str, float]
    metrics: Mapping[str, float] = field(default_factory=dict)
    failure: str = ""
    unreported: str = ""
    seconds: float = 0.0


@dataclass(slots=True)
class _Case:
    rollout: Rollout
    prompt: Prompt
    submitted: float
    parts: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    unreported: list[str] = field(default_factory=list)

    @property
    def num_done(self) -> int:
        """Components that returned or failed."""
        return len(self.parts) + len(self.failures) + len(self.unreported)

    def take(self, name: str, value: float | Score) -> Failure | None:
        """Take what a component returned; fail if another one reported the same metric."""
        score = value if isinstance(value, Score) else Score(value)
        # Two functions may be math (one by the row), which says the same of one response.
        twice = sorted(self.metrics.keys() & score.metrics.keys())
        if twice := [name for name in twice if not name.endswith("_unread")]:
            return Failure("error", f"two functions report {', '.join(twice)}. Rename one")
        self.parts[name] = score.value
        self.metrics |= score.metrics
        return None


class Scorer:
    """The reward of a run or of a held-out set: a weighted sum of components."""

    def __init__(
        self,
        components: Sequence[Component],
        *,
        on_error: Literal["stop", "zero", "drop"] = "stop",
        deciding: str = "",
    ) -> None:
        """Combine components.

        Args:
            deciding: name of the component that decides whether a response is right; empty: the
                first.
        """
        names = [component.name for component in components]
        assert len(set(names)) == len(names) > 0, f"components {names}"
        self.components = tuple(components)
        self.on_error = on_error
        self.deciding = deciding or names[0]
        self._choices = [(each.name, choice) for each in components for choice in each.choices]
        self._only_report = {component.name for component in components if not component.weight}
        self._shown: set[str] = set()
        self._cases: dict[Hashable, _Case] = {}

    @classmethod
    def of_function(cls, function: Callable[[Rollout, Prompt], float]) -> Scorer:
        """Score by one function of the rollout, called in the caller's thread."""
        return cls([replace(here("function", function), takes="rollout")])

    @property
    def outstanding(self) -> int:
        """Conversations without a result."""
        return len(self._cases)

    @property
    def quick(self) -> bool:
        """Whether every result is there at the first `poll`."""
        return all(isinstance(choice.pool.place, Here) for _, choice in self._choices)

    @property
    def judge(self) -> Any:
        """The judge whose questions the round's engine has to answer, if a component is one."""
        places = (choice.pool.place for _, choice in self._choices)
        return next((place for place in places if hasattr(place, "take_questions")), None)

    @property
    def uses_environment(self) -> bool:
        """Whether the environment's reward is a component of the sum."""
        return any(choice.takes == "environment" for _, choice in self._choices)

    def path(self, prompt: Prompt) -> tuple[str, ...]:
        """Names of the functions that score responses to this prompt."""
        return tuple(component.of(prompt).name for component in self.components)

    @property
    def scores_groups(self) -> bool:
        """Whether a component needs all samples of a prompt."""
        return any(choice.of_group for _, choice in self._choices)

    def submit(
        self,
        key: Hashable,
        rollout: Rollout,
        prompt: Prompt,
        *,
        environment_reward: float | None = None,
    ) -> None:
        """Start scoring a conversation that has ended.

        Components of groups wait for `complete_group`.

        Args:
            key: names the conversation until its result is returned.
            environment_reward: needed if `uses_environment`.
        """
        assert key not in self._cases, f"{key} is being scored already"
        self._cases[key] = _Case(rollout, prompt, time.monotonic())
        arguments = {
            "response": rollout.response,
            "rollout": rollout,
            "environment": environment_reward,
        }
        for component in (each.of(prompt) for each in self.components):
            if not component.of_group:
                messages = (_conversation(rollout, prompt),) if component.wants_messages else ()
                argument = arguments[component.takes]
                asked = _before_response(rollout, prompt) if component.judges else prompt
                component.pool.submit(key, component.function, argument, asked, *messages)

    def complete_group(self, group: int) -> None:
        """Score the submitted conversations of a group together, in order of sample.

        Conversations of the group that are not submitted get no reward from functions: their
        environment rewarded them, or failed.
        """
        cases = {key: case for key, case in self._cases.items() if case.rollout.group == group}
        keys = sorted(cases, key=lambda key: cases[key].rollout.sample_index)
        if not keys:
            return
        rollouts, prompt = [cases[key].rollout for key in keys], cases[keys[0]].prompt
        responses = [rollout.response for rollout in rollouts]
        conversations = [_conversation(rollout, prompt) for rollout in rollouts]
        for component in (each.of(prompt) for each in self.components):
            if component.of_group:
                messages = (conversations,) if component.wants_messages else ()
                component.pool.submit(tuple(keys), component.function, responses, prompt, *messages)

    def poll(self, timeout_s: float = 0.0) -> list[RewardResult]:
        """Return complete results.

        Waits at most `timeout_s` for the first, and not at all if nothing is outstanding or the
        engine has to answer a question.

        Raises:
            RewardError: a component failed, its retries included, and `reward.on_error` is "stop".
        """
        until, judge = time.monotonic() + timeout_s, self.judge
        while True:
            results = self._collect()
            remaining_s = until - time.monotonic()
            asks = judge is not None and judge.has_questions
            if results or asks or not self._cases or remaining_s <= 0:
                return results
            time.sleep(min(_POLL_INTERVAL_S, remaining_s))

    def __call__(self, rollout: Rollout, prompt: Prompt) -> float:
        """Score one conversation and wait for the result."""
        return self._awaited(rollout, prompt).reward

    def _awaited(self, rollout: Rollout, prompt: Prompt) -> RewardResult:
        assert not self._cases, f"{len(self._cases)} conversations are being scored"
        self.submit(None, rollout, prompt)
        self.complete_group(rollout.group)
        while not (results := self.poll(1.0)):
            pass
        return results[0]

    def trial(self, rollout: Rollout, prompt: Prompt) -> RewardResult | None:
        """Score one conversation before the run has started, by the functions that need no more.

        Failures are in the result, never raised; None if no function can be called.
        """
        tried = [component for component in self.components if not component.of(prompt).lacks]
        if not tried:
            return None
        scorer = Scorer(tried, on_error="zero", deciding=self.deciding)
        scorer._shown = {component.name for component in tried}  # the caller shows failures
        return scorer._awaited(rollout, prompt)

    def take_counts(self) -> Counter[str]:
        """Return calls, errors, timeouts, crashes and retries since the last call."""
        total: Counter[str] = Counter()
        for _, choice in self._choices:
            total += choice.pool.counts
            choice.pool.counts = Counter()
        return total

    def close(self) -> None:
        """End workers and threads; results still outstanding are lost."""
        for _, choice in self._choices:
            choice.pool.close()
        self._cases.clear()

    def _collect(self) -> list[RewardResult]:
        results = []
        for name, component in self._choices:
            for done in component.pool.poll(0.0):
                keys: tuple[Hashable, ...] = (done.key,)
                values = [done.value]
                if component.of_group:
                    keys = cast("tuple[Hashable, ...]", done.key)
                    values = list(done.value or [None] * len(keys))  # None: the call failed
                for key, value in zip(keys, values, strict=True):
                    case = self._cases[key]
                    failure = done.failure or case.take(name, value)
                    if failure is not None:
                        text = self._describe(component, failure, case, len(keys))
                        if name in self._only_report:
                            case.unreported.append(text)
                            note = "Its weight is 0, so rewards do not change. reward/unreported"
                        else:
                            case.failures.append(text)
                            counter = {"zero": "zeroed"}.get(self.on_error, "dropped")
                            note = f"reward.on_error is {self.on_error}. reward/{counter}"
                        self._show_once(name, f"{text}\n  {note} counts failures.")
                    if case.num_done == len(self.components):
                        del self._cases[key]
                        results.append(self._result(key, case))
        return results

    def _describe(self, component: Component, failure: Failure, case: _Case, count: int) -> str:
        together = f" on {count} samples together" if component.of_group else ""
        text = (
            f"reward {component.name} failed{together} ({failure.kind}): {failure.text}\n"
            f"  prompt {case.prompt.id}, sample {case.rollout.sample_index}, "
            f"response (first 200 characters): {case.rollout.response[:200]!r}"
        )
        if self.on_error == "stop":
            raise RewardError(
                f"{text}\n  --reward.on_error drop or zero continues without "
                f"{'these samples' if together else 'this sample'}"
            )
        return text

    def _show_once(self, name: str, text: str) -> None:
        """Print the first failure of a component that does not stop the run."""
        if name not in self._shown:
            self._shown.add(name)
            say(text, error=True)

    def _result(self, key: Hashable, case: _Case) -> RewardResult:
        # In the order of the settings: components finish in any order, and sums of floats depend
        # on it.
        scored = [each for each in self.components if each.name in case.parts]
        parts = {each.name: case.parts[each.name] for each in scored}
        reward = 0.0
        if not case.failures:
            reward = sum(each.weight * parts[each.name] for each in scored)
            for each in scored:
                if each.by_verifier:
                    parts[f"{each.name}_{each.of(case.prompt).name}"] = parts[each.name]
        return RewardResult(
            key=key,
            reward=reward,
            parts=parts,
            metrics={} if case.failures else dict(sorted(case.metrics.items())),
            failure="\n".join(case.failures),
            unreported="\n".join(case.unreported),
            seconds=time.monotonic() - case.submitted,
        )


def make_scorer(
    settings: RewardConfig,
    functions: Sequence[str] = (),
    *,
    others: Sequence[tuple[str, str]] = (),
    model: Any = None,
    renderer: Renderer | None = None,
) -> Scorer:
    """Build the scorer of `reward.*`.

    Args:
        functions: used instead of those of training, all with weight 1.
        others: names and paths of other scorers' functions, for which `reward.args` may be too.
        model: the `r3.judges.reward_model.RewardModel`, if a function is "model".
        renderer: the policy's chat template, if a function is "self_judge".

    Raises:
        ConfigError: a function cannot be loaded or used.
    """
    specs = tuple(functions) or settings.function
    rows = settings.row_functions if "row" in specs else ()
    weights = (() if functions else settings.weights) or (1.0,) * len(specs)
    named, of_rows = ([*zip(reward_names(each), each, strict=True)] for each in (specs, rows))
    own = own_functions((*named, *of_rows, *others), settings.args)

    def component(name: str, spec: str) -> Component:
        if spec == "row":
            by_verifier = {name: component(name, spec) for name, spec in of_rows}
            return replace(here(name, _no_verifier), by_verifier=by_verifier)
        if spec in ENVIRONMENT:
            plain = here(name, lambda reward, prompt: reward)
            return replace(plain, takes="environment", lacks="the environment gives it")
        if spec in REWARDS:
            return here(name, REWARDS[spec])
        if spec in JUDGES:
            return extras.judge(name, spec, settings, model=model, renderer=renderer)
        return _own_component(name, spec, settings, own[name, spec])

    components = [
        replace(component(name, spec), weight=weight)
        for (name, spec), weight in zip(named, weights, strict=True)
    ]
    decides = "" if functions else settings.deciding
    return Scorer(components, on_error=settings.on_error, deciding=decides)


def _conversation(rollout: Rollout, prompt: Prompt) -> list[Message]:
    """Return the whole conversation; a rollout of one turn has only its response."""
    return list(rollout.messages or replied(prompt.messages, rollout.response))


def _before_response(rollout: Rollout, prompt: Prompt) -> Prompt:
    """Return the prompt with the messages that the last message of the model follows."""
    roles = [message["role"] for message in rollout.messages]
    if "assistant" not in roles:
        return prompt
    last = len(roles) - 1 - roles[::-1].index("assistant")
    return replace(prompt, messages=tuple(rollout.messages[:last]))


def _own_component(name: str, spec: str, settings: RewardConfig, loaded: UserFunction) -> Component:
    """The component of a user's function: in threads, or in processes with `reward.workers`."""
    own = Own(spec if settings.workers else loaded.function, loaded.arguments, loaded.is_of_group)
    place: Place = Threads()
    if settings.workers:
        place = extras.processes(settings.workers, preload=[spec])
    is_awaited = inspect.iscoroutinefunction(loaded.function) and not settings.workers
    return Component(
        name=name,
        function=own.call_async if is_awaited else own.call,
        pool=Pool(place, timeout_s=settings.timeout_s, retries=settings.retries),
        wants_messages="messages" in loaded.parameters,
        of_group=loaded.is_of_group,
    )


def here(name: str, function: Callable[..., Any]) -> Component:
    """Return the component of a function that takes microseconds."""
    # The caller's own thread has no time limit, and a function that fails once fails again.
    pool = Pool(Here(), timeout_s=float("inf"))

    def call(argument: Any, prompt: Prompt) -> Score:
        return checked_score(function(argument, prompt))

    return Component(name=name, function=call, pool=pool)


def _no_verifier(response: str, prompt: Prompt) -> float:
    name = verifier_of(prompt.metadata)
    rule = f"the column verifier of {prompt.id} is {name!r}, which is not in reward.row_functions"
    raise CallError(rule, again=False)
