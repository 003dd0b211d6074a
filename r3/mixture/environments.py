"""Several environments in one run: the rows of each source have their own (`data.env`).

The conversations of a round are rounds of their own, one per environment, that share the engine and
the reward functions.
"""

from __future__ import annotations

import itertools
import operator
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any, cast

from r3.config import Config, EnvConfig
from r3.data.prompts import source_labels
from r3.data.rows import Columns, columns_of
from r3.engine import Sampled, Turn
from r3.rewards.scorer import RewardResult, Scorer
from r3.rollout.conversation_setup import ConversationRules, ConversationSetup
from r3.rollout.round import Round, RoundResult
from r3.types import Prompt, Rollout

_POLL_INTERVAL_S = 0.01  # the ranks of an engine synchronise after it

OfSources = tuple[ConversationSetup, dict[str, tuple[Columns, Sequence[Any]]]]


def of_sources(
    config: Config,
    paths: Sequence[str],
    plain: ConversationSetup,
    template_kwargs: Mapping[str, Any],
) -> OfSources:
    """Return the environments of the sources, and how each reads and shows its rows.

    Args:
        paths: the sources.
        plain: what conversations of held-out sets are made of.

    Raises:
        ConfigError: an environment, the chat template or a parser cannot be used.
    """
    model = config.model.shape().source
    made: dict[EnvConfig, ConversationSetup] = {}
    parts, own = {}, {}
    for label, env in zip(source_labels(paths), config.environments, strict=True):
        if env not in made:
            made[env] = ConversationSetup.of(env, plain.tokenizer, model, template_kwargs)
        parts[label] = made[env]
        own[label] = (columns_of(replace(config, env=env)), made[env].environments.tools)
    setup = MixedSetup(
        environments=MixedEnvironments(config.env, list(made.values())),
        tokenizer=plain.tokenizer,
        renderer=plain.renderer,
        rounds=MixedRound,
        parts=parts,
    )
    return setup, own


class MixedEnvironments:
    """The environments of all sources, as far as all of them are meant.

    Attributes:
        settings: `env.*`.
        stop: strings that end a turn in any of them.
    """

    tools: Sequence[Any] = ()
    one_turn = is_workflow = has_failed = False

    def __init__(self, settings: EnvConfig, parts: Sequence[ConversationSetup]) -> None:
        self.settings = settings
        self._parts = [setup.environments for setup in parts]
        self.stop = tuple(dict.fromkeys(text for part in self._parts for text in part.stop))

    def close_all(self) -> None:
        """Close the environments of a round that failed."""
        for environments in self._parts:
            environments.close_all()

    def close(self) -> None:
        """Close environments that are still open, then end what runs them."""
        for environments in self._parts:
            environments.close()


@dataclass(frozen=True, kw_only=True)
class MixedSetup(ConversationSetup):
    """What conversations are made of, if sources differ.

    Attributes:
        parts: by the label of a source; equal environments are one part.
    """

    parts: Mapping[str, ConversationSetup] = field(default_factory=dict)

    def split(self, prompts: Sequence[Prompt]) -> list[tuple[ConversationSetup, list[Prompt]]]:
        """Return prompts by what their conversations are made of, in the order of the sources."""
        by_part: dict[int, tuple[ConversationSetup, list[Prompt]]] = {
            id(part): (part, []) for part in self.parts.values()
        }
        for prompt in prompts:
            by_part[id(self.parts[prompt.id.rpartition(":")[0]])][1].append(prompt)
        return [part for part in by_part.values() if part[1]]


class MixedRound:
    """One round of conversations with several environments; has what a `Round` has."""

    def __init__(
        self,
        rules: ConversationRules,
        scorer: Scorer,
        prompts: Mapping[int, Prompt],
        *,
        seed_step: int,
        samples_per_prompt: int,
        resumed: Sequence[Any] = (),
    ) -> None:
        """Begin all episodes; see `Round`. Nothing is resumed."""
        assert not resumed and not rules.token_budget, "data.env knows no partial rollouts"
        assert isinstance(rules.setup, MixedSetup), rules.setup
        parts = rules.setup.split(list(prompts.values()))
        results: list[list[RewardResult]] = [[] for _ in parts]
        self._owner: dict[int, Round] = {}
        self._rounds = []
        keys = itertools.count()
        for index, (setup, own) in enumerate(parts):
            rows = {prompt.id for prompt in own}
            sampling = replace(rules.sampling, stop=setup.environments.stop)
            self._rounds.append(
                Round(
                    replace(rules, setup=setup, sampling=sampling),
                    _Share(scorer, index, results),  # type: ignore[arg-type]
                    {group: prompt for group, prompt in prompts.items() if prompt.id in rows},
                    seed_step=seed_step,
                    samples_per_prompt=samples_per_prompt,
                )
            )
            self._rounds[-1].keys = keys

    @property
    def size(self) -> int:
        """Number of its episodes."""
        return sum(own_round.size for own_round in self._rounds)

    def advance(self, engine_busy: bool) -> tuple[list[Turn], int]:
        """Take what environments, workflows and reward functions returned; see `Round.advance`."""
        turns: list[Turn] = []
        finished = 0
        for own_round in self._rounds:
            new, over = own_round.advance(engine_busy=True)  # none waits while another has work
            self._owner |= {turn.key: own_round for turn in new}
            turns += new
            finished += over
        if not turns and not finished and not engine_busy:
            time.sleep(_POLL_INTERVAL_S)
        return turns, finished

    def take_abandoned(self) -> list[int]:
        """Return the turns in flight that nobody awaits any more; they are not received."""
        keys = [key for own_round in self._rounds for key in own_round.take_abandoned()]
        for key in keys:
            del self._owner[key]
        return keys

    def receive_sample(self, sampled: Sampled) -> None:
        """Pass a finished turn to its episode."""
        self._owner.pop(sampled.key).receive_sample(sampled)

    def result(self) -> RoundResult:
        """Return all samples, and the metrics of all environments together."""
        results = [own_round.result() for own_round in self._rounds]
        metrics: dict[str, Any] = {}
        # A round of conversations of one turn says nothing of who rewarded them.
        for own_round, result in zip(self._rounds, results, strict=True):
            for name, part in (own_round.shares() | result.metrics).items():
                metrics[name] = _added(metrics[name], part) if name in metrics else part
        samples = [sample for result in results for sample in result.samples]
        return RoundResult(
            samples=sorted(samples, key=lambda sample: sample.rollout.key),
            metrics=metrics,
            dropped=tuple(text for result in results for text in result.dropped),
        )


def _added(one: Any, other: Any) -> Any:
    """Add two partials of a metric: means and sums."""
    assert type(one) is type(other), (one, other)
    return type(one)(*map(operator.add, astuple(one), astuple(other)))


class _Share:
    """The scorer, as one of several rounds uses it: names of its episodes are its own."""

    def __init__(self, scorer: Scorer, index: int, results: list[list[RewardResult]]) -> None:
        self._scorer, self._index, self._results = scorer, index, results
        self.outstanding = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scorer, name)

    def submit(self, key: int, rollout: Rollout, prompt: Prompt, **more: Any) -> None:
        """Start scoring a conversation that has ended."""
        self.outstanding += 1
        self._scorer.submit((self._index, key), rollout, prompt, **more)

    def poll(self, timeout_s: float = 0.0) -> list[RewardResult]:
        """Return complete results of this round; keep those of the others for them."""
        for result in self._scorer.poll(timeout_s):
            index, key = cast("tuple[int, int]", result.key)
            self._results[index].append(replace(result, key=key))
        own, self._results[self._index] = self._results[self._index], []
        self.outstanding -= len(own)
        return own
