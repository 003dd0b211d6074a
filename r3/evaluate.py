"""Evaluation on held-out questions with the training engine: accuracy, and pass@k where k answers are sampled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import comb
from typing import Any

from r3.config import Config
from r3.diagnostics import Mean
from r3.engine import Engine, Request, sampling_seed
from r3.mesh import Mesh
from r3.types import Prompt, Rollout


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What one evaluation found: metric partials of this rank, and on rank 0 one row per answer."""

    metrics: dict[str, Any]
    rows: list[dict[str, Any]]


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased chance that at least one of k answers is right, from n answers with c right (arXiv 2107.03374, eq. 1).

    1 - C(n-c, k) / C(n, k)
    """
    return 1.0 - comb(num_samples - num_correct, k) / comb(num_samples, k)


def is_due(step: int, total_steps: int, every: int) -> bool:
    """Before the first step, after the last, and every so many in between."""
    return step in (0, total_steps) or (every > 0 and step % every == 0)


def evaluate(
    engine: Engine,
    prompts: Sequence[Prompt],
    judge: Callable[[Rollout, Prompt], float],
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
    mine = list(range(mesh.engine_dp.rank, len(prompts), mesh.engine_dp.size))
    requests = [
        Request(
            prompt=prompts[index],
            group=index,
            member=member,
            seed=sampling_seed(config.train.seed, -1, prompts[index].id, member),
            max_tokens=config.rollout.max_response_tokens,
            temperature=settings.temperature,
        )
        for index in mine
        for member in range(settings.samples)
    ]
    rewards = [0.0] * len(requests)

    def finished(number: int, rollout: Rollout) -> None:
        rewards[number] = judge(rollout, requests[number].prompt)
        on_answer()

    rollouts = engine.generate(requests, version=version, on_finished=finished)
    right = [reward >= 1.0 for reward in rewards]
    counts = [sum(right[i : i + settings.samples]) for i in range(0, len(right), settings.samples)]
    speaks = mesh.engine_tp.rank == 0  # ranks of one engine have the same answers
    metrics: dict[str, Any] = {}
    if speaks:
        metrics[f"eval/{settings.name}/accuracy"] = Mean(total=float(sum(right)), count=float(len(right)))
        if settings.samples > 1:
            k = settings.samples
            chances = [pass_at_k(k, count, k) for count in counts]
            metrics[f"eval/{settings.name}/pass_at_{k}"] = Mean(total=sum(chances), count=float(len(chances)))
    rows = [
        {
            "prompt_id": rollout.prompt_id,
            "sample": rollout.member,
            "response": rollout.response,
            "answer": request.prompt.answer,
            "reward": reward,
            "finish_reason": rollout.finish_reason,
            "response_tokens": rollout.num_response_tokens,
            "order": rollout.group,
        }
        for request, rollout, reward in zip(requests, rollouts, rewards, strict=True)
    ]
    gathered = mesh.world.all_gather_object(rows if speaks else [])
    merged = sorted((row for part in gathered for row in part), key=lambda row: (row["order"], row["sample"]))
    for row in merged:
        del row["order"]
    return Evaluation(metrics=metrics, rows=merged)
