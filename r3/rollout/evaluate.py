"""Evaluation on held-out questions with the training engine: accuracy; avg@k and pass@k where several answers are sampled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import comb
from typing import Any

from r3.config import Config, EvalSet
from r3.engine import Engine
from r3.metrics.reduce import Mean
from r3.rewards.scorer import Scorer
from r3.rollout.collect import answer
from r3.rollout.conversation import ConversationSetup
from r3.rollout.readable import readable
from r3.runtime.mesh import Mesh
from r3.types import Prompt


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """A held-out set as it is used: its settings, its questions, what judges their answers, what a conversation is."""

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
    """What one evaluation found: metric partials of this rank, and one row per answer of all ranks."""

    metrics: dict[str, Any]
    rows: list[dict[str, Any]]


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased chance that at least one of k answers is right, from n answers with c right (arXiv 2107.03374, eq. 1).

    1 - C(n-c, k) / C(n, k)
    """
    return 1.0 - comb(num_samples - num_correct, k) / comb(num_samples, k)


def accuracy_metrics(
    name: str, rewards: Sequence[float], samples: int, pass_at: Sequence[int] = ()
) -> dict[str, Any]:
    """Partials of eval/NAME/*. `rewards` are whole groups of `samples` answers to a question, one after the other.

    With several samples: avg@k is the mean reward over them, pass@k is reported for every k of `pass_at` that they allow
    (empty: for all of them together).
    """
    count = float(len(rewards))
    right = [reward >= 1.0 for reward in rewards]
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


def evaluate(
    engine: Engine,
    heldout: HeldOut,
    config: Config,
    mesh: Mesh,
    *,
    policy_version: int,
    on_answer: Callable[[], None] = lambda: None,
) -> Evaluation:
    """Answer a held-out set with the engine at `version`. All ranks must call; engines share the questions out.

    An answer is right when its reward is at least 1. Greedy answers (temperature 0) have no random stream; sampled ones have
    seeds that depend on the question, the sample and the run's seed, not on the step.
    """
    settings, prompts = heldout.settings, heldout.prompts
    answers = answer(
        engine,
        prompts,
        heldout.scorer,
        mesh,
        members=settings.samples,
        policy_version=policy_version,
        run_seed=config.train.seed,
        seed_step=-1,
        max_tokens=settings.max_tokens or config.rollout.max_response_tokens,
        temperature=settings.temperature,
        top_p=settings.top_p,
        conversation_setup=heldout.conversation_setup,
        keep_all=True,  # a question left out would flatter
        on_answer=on_answer,
    )
    metrics = accuracy_metrics(
        settings.name, answers.rewards, settings.samples, config.eval.pass_at
    )
    if "reward/zeroed" in answers.facts:  # a judge that may fail
        metrics[f"eval/{settings.name}/unjudged"] = answers.facts["reward/zeroed"]
    rows = [
        {
            "place": rollout.group,
            "prompt_id": rollout.prompt_id,
            "sample": rollout.sample_index,
            "response": rollout.response,
            **readable(rollout, prompts[rollout.group]),
            "reward": reward,
            "rewards": dict(answers.parts.get((rollout.group, rollout.sample_index), {})),
            "finish_reason": rollout.finish_reason,
            "response_tokens": rollout.num_response_tokens,
        }
        for rollout, reward in zip(answers.rollouts, answers.rewards, strict=True)
    ]
    gathered = mesh.world.all_gather_object(rows)
    merged = sorted(
        (row for part in gathered for row in part), key=lambda row: (row["place"], row["sample"])
    )
    return Evaluation(metrics=metrics, rows=merged)
