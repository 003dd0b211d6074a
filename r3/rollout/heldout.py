"""Evaluation on held-out prompts with the training engine: accuracy, avg@k and pass@k."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import comb
from typing import Any

from r3.algo.sums import are_equal, reaches
from r3.config import Config, EvalSet
from r3.data.conversation import replied
from r3.engine import Engine, Sampling
from r3.metrics.glossary import REFUSED
from r3.metrics.reduce import Mean, means
from r3.rewards.scorer import Scorer
from r3.rollout.collect import Collector, is_cut, without_end
from r3.rollout.conversation_setup import ConversationSetup
from r3.runtime.mesh import Mesh
from r3.types import Prompt, Rollout, Sample


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """A held-out set.

    Attributes:
        settings: the set's own settings.
        prompts: its prompts, tokenised.
        scorer: rewards its conversations.
        conversation_setup: the training's, or that of an environment of its own.
    """

    settings: EvalSet
    prompts: tuple[Prompt, ...]
    scorer: Scorer
    conversation_setup: ConversationSetup

    @property
    def name(self) -> str:
        """Name of the set in metrics and files."""
        return self.settings.name

    @property
    def num_samples(self) -> int:
        """Samples of one evaluation, over all engines."""
        return len(self.prompts) * self.settings.samples


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The result of one evaluation.

    Attributes:
        metrics: partials of this rank.
        rows: one per sample, of all ranks.
        note: why the accuracy may not be what was intended; empty if it is.
    """

    metrics: dict[str, Any]
    rows: list[dict[str, Any]]
    note: str = ""


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Estimate the chance that at least one of k samples is right, without bias.

    1 - C(n-c, k) / C(n, k) for n samples of which c are right (arXiv 2107.03374, equation 1).
    """
    return 1.0 - comb(num_samples - num_correct, k) / comb(num_samples, k)


def accuracy_metrics(
    name: str,
    rewards: Sequence[float],
    samples: int,
    pass_at: Sequence[int] = (),
    *,
    deciding: Sequence[float] | None = None,
) -> dict[str, Any]:
    """Return the partials of eval/NAME/*.

    Args:
        rewards: complete groups of `samples` rewards, one group after the other.
        samples: samples per prompt. With several, avg@k is their mean reward.
        pass_at: the k of pass@k; those above `samples` are left out. Empty is `samples` alone.
        deciding: values in the order of the rewards; a sample is right if its value is at least 1.
            None: the rewards themselves.
    """
    count = float(len(rewards))
    right = [reaches(value) for value in (rewards if deciding is None else deciding)]
    metrics: dict[str, Any] = {f"eval/{name}/accuracy": Mean(total=float(sum(right)), count=count)}
    if samples > 1:
        metrics[f"eval/{name}/avg_at_{samples}"] = Mean(total=float(sum(rewards)), count=count)
        correct = [sum(right[i : i + samples]) for i in range(0, len(right), samples)]
        for k in pass_at or (samples,):
            if k <= samples:
                chances = [pass_at_k(samples, c, k) for c in correct]
                metrics[f"eval/{name}/pass_at_{k}"] = Mean(
                    total=sum(chances), count=float(len(chances))
                )
    return metrics


def is_graded(values: Sequence[float]) -> bool:
    """Whether the function that decides gives more than right (1) and wrong (0)."""
    return not all(are_equal((value, 0.0)) or are_equal((value, 1.0)) for value in values)


def none_right(name: str, values: Sequence[float], decides: str) -> str:
    """What to say of graded values of which none is that of a right response; "" if one is."""
    if any(map(reaches, values)):
        return ""
    return (
        f"{name}: no response is right: {decides} gave at most {max(values):.4g}, and a right "
        "response has at least 1. The figure of the evaluation is the mean reward. "
        "--reward.correct names the function that decides"
    )


def evaluate(
    engine: Engine,
    heldout: HeldOut,
    config: Config,
    mesh: Mesh,
    *,
    policy_version: int,
    on_rollout: Callable[[], None] = lambda: None,
) -> Evaluation:
    """Sample and reward a held-out set with the engine at `policy_version`.

    All ranks must call; engines share the prompts. Seeds depend on prompt, sample and the run's
    seed, not on the step. Failed conversations count as reward 0: leaving them out would raise
    the accuracy.

    Raises:
        EnvironmentFailed, RewardError: see `Collector.collect`.
    """
    settings, prompts = heldout.settings, heldout.prompts
    collector = Collector(
        engine=engine,
        mesh=mesh,
        setup=heldout.conversation_setup,
        scorer=heldout.scorer,
        sampling=Sampling(temperature=settings.temperature, top_p=settings.top_p),
        run_seed=config.train.seed,
        samples_per_prompt=settings.samples,
        max_response_tokens=config.response_tokens(settings),
        keep_failed=True,
    )
    collected = collector.collect(
        prompts, policy_version=policy_version, seed_step=-1, on_rollout=on_rollout
    )
    # The last sequence of a workflow's episode represents it.
    episodes: dict[tuple[int, int], list[Sample]] = {}
    for sample in collected.samples:
        episodes.setdefault(sample.rollout.key[:2], []).append(sample)
    samples = [
        replace(sequences[-1], reward=sum(one.reward for one in sequences))
        if sequences[0].rollout.own_reward
        else sequences[-1]
        for sequences in episodes.values()
    ]
    rewards, last = [sample.reward for sample in samples], [sample.rollout for sample in samples]
    decides = heldout.scorer.deciding
    deciding = [sample.parts.get(decides, sample.reward) for sample in samples]
    metrics = accuracy_metrics(
        settings.name, rewards, settings.samples, config.eval.pass_at, deciding=deciding
    )
    if "reward/zeroed" in collected.metrics:  # a reward function that may fail
        metrics[f"eval/{settings.name}/unjudged"] = collected.metrics["reward/zeroed"]
    reported = (rollout.metrics for rollout in collected.rollouts)
    for key, part in means(reported, without=REFUSED.values()).items():
        metrics[f"eval/{settings.name}/{key}"] = part
    rows = [
        {
            "place": rollout.group,
            "prompt_id": rollout.prompt_id,
            "sample": rollout.sample_index,
            "response": rollout.response,
            **readable(rollout, prompts[rollout.group]),
            "reward": sample.reward,
            "right": reaches(value),
            "rewards": dict(sample.parts),
            "metrics": dict(rollout.metrics),
            "finish_reason": rollout.finish_reason,
            "response_tokens": rollout.num_response_tokens,
        }
        for sample, rollout, value in zip(samples, last, deciding, strict=True)
    ]
    cut = [is_cut(rollout, heldout.conversation_setup) for rollout in last]
    gathered = mesh.world.all_gather_object((rows, deciding, cut))
    merged = sorted(
        (row for part, _, _ in gathered for row in part),
        key=lambda row: (row["place"], row["sample"]),
    )
    values = [value for _, part, _ in gathered for value in part]
    note = ""
    if is_graded(values):
        metrics[f"eval/{settings.name}/reward"] = Mean(math.fsum(rewards), float(len(rewards)))
        note = none_right(settings.name, values, decides)
    if merged and all(each for _, _, part in gathered for each in part):
        limit = f"{collector.max_response_tokens} tokens"
        setup = heldout.conversation_setup
        note = f"{settings.name}: {without_end(len(merged), limit, setup, last)}"
    return Evaluation(metrics=metrics, rows=merged, note=note)


def readable(rollout: Rollout, prompt: Prompt | None) -> dict[str, Any]:
    """Question, reference answer, whole conversation and rewards per turn, as JSON can hold them.

    Args:
        prompt: the prompt of the rollout; None if it is not known, and then only the messages are.
    """
    opening = prompt.messages if prompt else ()
    messages = rollout.messages or replied(opening, rollout.response)
    facts: dict[str, Any] = {
        "messages": [dict(message) for message in messages],
        "turn_rewards": list(rollout.turn_rewards),
    }
    if prompt is not None:
        asked = [message["content"] for message in opening if message["role"] == "user"]
        facts |= {"question": asked[-1] if asked else "", "reference": " or ".join(prompt.accepted)}
    return facts
