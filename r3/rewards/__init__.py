"""Reward functions: built-in ones by name, or your own, `--reward.function my_reward.py:short`.

    def short(response, prompt):             # or `async def`
        return float(len(response) < 200)    # prompt.answer, prompt.messages, prompt.metadata

A parameter `messages` gets the whole conversation; `reward.args` sets any other parameter. A
function whose first parameter is `responses` gets all samples of a prompt at once and returns a
list with one number each.
`return reward, {"cites": 2}` reports metrics too: numbers that become `reward/cites`, averaged over
rollouts.

`reward.function` may name several; the reward is their weighted sum. `r3/rewards/scorer.py` calls
them beside the engine. A function that fails or returns no number never becomes a silent 0: the
policy would be trained on it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from r3.data.numbers import final_number
from r3.errors import ConfigError
from r3.metrics.glossary import checked_metrics
from r3.types import Prompt
from r3.user_code.calls import CallError, awaited, number, own_copy
from r3.user_code.loading import UserFunction, Wanted, load, load_functions

Reward = Callable[[str, Prompt], Any]


def gsm8k(response: str, prompt: Prompt) -> float:
    """Return 1 if the last `#### number` of the response equals that of an answer, else 0.

    Numbers are compared by value: `#### 1,234.50`, `#### $1234.5` and `#### 1.2345e3` are the same.

    Raises:
        ValueError: a reference answer has no such number.
    """
    number = final_number(response)
    expected = [final_number(answer) for answer in prompt.accepted]
    if None in expected:
        answer = prompt.accepted[expected.index(None)]
        raise ValueError(f"the reference answer has no '#### number': {answer[-200:]!r}")
    return float(number in expected)


def exact(response: str, prompt: Prompt) -> float:
    """Return 1 if the response equals an answer, except for white space at both ends, else 0."""
    return float(response.strip() in [answer.strip() for answer in prompt.accepted])


REWARDS: dict[str, Reward] = {"gsm8k": gsm8k, "exact": exact}

# Names that the two parameters have where the order is another one, as in TRL.
_PROMPTS, _RESPONSES = ("prompt", "prompts"), ("response", "completion", "completions")


def own_functions(
    named: Sequence[tuple[str, str]], items: Sequence[str]
) -> dict[tuple[str, str], UserFunction]:
    """Load reward functions of users' files, by name and path.

    Args:
        named: names in metrics, and what settings name; built-in functions are left out.
        items: `reward.args`.

    Raises:
        ConfigError: everything that keeps them from being called with a response and a prompt.
    """
    own = [(name, spec) for name, spec in dict.fromkeys(named) if ":" in spec]
    wanted = [
        Wanted(
            field="reward.function",
            name=name,
            spec=spec,
            passed=("response", "prompt"),
            optional=("messages",),
            also=" or, for all samples of a prompt, "
            f"`def {spec.rpartition(':')[2]}(responses, prompt)`",
        )
        for name, spec in own
    ]
    loaded = dict(zip(own, load_functions(wanted, "reward.args", items), strict=True))
    for (_, spec), function in loaded.items():
        first, second = (*function.parameters, "")[:2]
        if first in _PROMPTS or second in _RESPONSES:
            rule = f"its first parameters are {first} and {second}, and R3 passes "
            fix = "write `def f(response, prompt)`, or `def f(responses, prompt)` for a whole group"
            raise ConfigError.of(
                "reward.function", spec, f"{rule}a response first, then its prompt", fix
            )
    return loaded


def checked(value: Any) -> float:
    """Return the result of a reward function, a number of any library, as a finite float.

    Raises:
        CallError: it is not a finite number.
    """
    try:
        return number(value)
    except ValueError as error:
        raise CallError(f"it returned {error}", again=False) from None


@dataclass(frozen=True, slots=True)
class Score:
    """What a reward function returned, checked; `metrics` by their full names, `reward/NAME`."""

    value: float
    metrics: Mapping[str, float] = field(default_factory=dict)


def checked_score(value: Any) -> Score:
    """Return the result of a function: a number, a number and its metrics, or what is checked.

    Raises:
        CallError: it is none of them.
    """
    if isinstance(value, Score):
        return value
    if not (isinstance(value, tuple) and len(value) == 2):
        return Score(checked(value))
    try:
        return Score(checked(value[0]), checked_metrics(value[1], "reward"))
    except ValueError as error:
        raise CallError(str(error), again=False) from error


def checked_group(values: Any, count: int) -> tuple[Score, ...]:
    """Return the result of a user's function that scores `count` samples of a prompt at once.

    Raises:
        CallError: it is not a list of as many numbers, or of numbers with their metrics.
    """
    if hasattr(values, "tolist"):  # numpy's and torch's arrays
        values = values.tolist()
    if isinstance(values, str) or not isinstance(values, Sequence) or len(values) != count:
        raise CallError(
            f"it returned {values!r}. Return a list of {count} numbers, one per response",
            again=False,
        )
    return tuple(checked_score(value) for value in values)


@dataclass(frozen=True, slots=True)
class Own:
    """Calls a user's function and checks what it returns.

    In worker processes, which have loaded its file already and import no settings, `function` is
    its path.
    """

    function: Callable[..., Any] | str
    arguments: dict[str, Any]
    of_group: bool

    def call(self, response: Any, prompt: Prompt, *messages: Any) -> Any:
        value = self._started(response, prompt, messages)
        return self._checked(awaited(value), response)

    async def call_async(self, response: Any, prompt: Prompt, *messages: Any) -> Any:
        return self._checked(await self._started(response, prompt, messages), response)

    def _started(self, response: Any, prompt: Prompt, messages: tuple[Any, ...]) -> Any:
        """Call the function with copies: it may change what it gets."""
        function = load(self.function) if isinstance(self.function, str) else self.function
        named = {"messages": messages[0]} if messages else {}
        return function(own_copy(response), own_copy(prompt), **own_copy(self.arguments | named))

    def _checked(self, value: Any, response: Any) -> Score | tuple[Score, ...]:
        """Check the value of one response, or those of a group's list of responses."""
        return checked_group(value, len(response)) if self.of_group else checked_score(value)
