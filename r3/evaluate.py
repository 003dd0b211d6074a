"""Evaluation on held-out questions with the training engine: accuracy, and pass@k where k answers are sampled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import comb
from typing import Any

from r3.config import Config
from r3.diagnostics import Mean
from r3.engine import Engine
from r3.mesh import Mesh
from r3.rollout import Judge, answer
from r3.types import Prompt


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


def evaluate(
    engine: Engine,
    prompts: Sequence[Prompt],
    judge: Judge,
    config: Config,
    mesh: Mesh,
    *,
    version: int,
    on_answer: Callable[[], None] = lambda: None,
) -> Evaluation:
    """Answer `prompts` with the engine at `version`. All ranks must call; engines share the questions out.

    An answer is right when its reward is at least 1. Greedy answers (`eval.temperature` 0) have no random stream; sampled
    ones have seeds that depend on the question, the sample and the run's seed, not on the step.
    """
    settings = config.eval
    answers = answer(
        engine,
        prompts,
        judge,
        mesh,
        members=settings.samples,
        version=version,
        run_seed=config.train.seed,
        seed_step=-1,
        max_tokens=config.rollout.max_response_tokens,
        temperature=settings.temperature,
        on_answer=on_answer,
    )
    right = [reward >= 1.0 for reward in answers.rewards]
    metrics: dict[str, Any] = {
        f"eval/{settings.name}/accuracy": Mean(total=float(sum(right)), count=float(len(right)))
    }
    if (k := settings.samples) > 1:
        chances = [pass_at_k(k, sum(right[i : i + k]), k) for i in range(0, len(right), k)]
        metrics[f"eval/{settings.name}/pass_at_{k}"] = Mean(total=sum(chances), count=float(len(chances)))
    rows = [
        {
            "place": rollout.group,
            "prompt_id": rollout.prompt_id,
            "sample": rollout.member,
            "response": rollout.response,
            "answer": prompts[rollout.group].answer,
            "reward": reward,
            "finish_reason": rollout.finish_reason,
            "response_tokens": rollout.num_response_tokens,
        }
        for rollout, reward in zip(answers.rollouts, answers.rewards, strict=True)
    ]
    gathered = mesh.world.all_gather_object(rows)
    merged = sorted((row for part in gathered for row in part), key=lambda row: (row["place"], row["sample"]))
    return Evaluation(metrics=metrics, rows=merged)
