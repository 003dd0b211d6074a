"""Rounds of real conversations with scorers of every kind, and when each result arrived."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from r3.config import RewardConfig
from r3.data import Renderer
from r3.judges import RewardModel, SelfJudge, parsed
from r3.rewards.scorer import RewardResult, Scorer, make_scorer
from r3.rollout import RoundResult, rollout_metrics
from r3.runtime.device import Device
from r3.tools import sample_single_turn
from r3.types import Prompt, Rollout
from r3.user_code import CallError
from tests.talkers import Talker, values
from tests.tiny import parts_of, rewards_of, tiny_config


class Watched(Scorer):
    """Records when conversations ended and when they had their reward.

    Whoever asks for results waits for the first one, however slow the machine is: it comes before
    the round has ended only if conversations are submitted and asked for as they end.
    """

    def __init__(self, scorer: Scorer) -> None:
        super().__init__(scorer.components, on_error=scorer.on_error)
        self.began = time.monotonic()
        self.ended: dict[Any, float] = {}
        self.judged: dict[Any, float] = {}

    def submit(
        self, key: Any, rollout: Rollout, prompt: Prompt, *, environment_reward: float | None = None
    ) -> None:
        self.ended[key] = time.monotonic()
        super().submit(key, rollout, prompt, environment_reward=environment_reward)

    def poll(self, timeout_s: float = 0.0) -> list[RewardResult]:
        reward_results = super().poll(timeout_s if self.judged else 60.0)
        self.judged |= {reward_result.key: time.monotonic() for reward_result in reward_results}
        return reward_results

    def overlap(self) -> int:
        """Count the conversations that had their reward while others were still sampled."""
        return sum(when < max(self.ended.values()) for when in self.judged.values())


def talker(device: Device) -> Talker:
    """The shipped model's engine, with room for all conversations at once."""
    return Talker(device, tiny_config(engine={"max_model_len": 320, "kv_cache_gib": 0.0625}))


def round_of(
    talker: Talker,
    scorer: Scorer,
    *,
    prompts: int = 8,
    max_tokens: int = 200,
    keep_failed: bool = False,
) -> tuple[RoundResult, Watched, float]:
    """Sample one round of four responses per prompt; also return when each ended, and seconds."""
    watched = Watched(scorer)
    began = time.monotonic()
    collected = talker.collector(
        talker.task.conversation_setup,
        watched,
        samples_per_prompt=4,
        max_response_tokens=max_tokens,
        temperature=1.5,  # responses of many lengths
        keep_failed=keep_failed,
    ).collect(talker.task.prompts.prompts[:prompts], policy_version=0, seed_step=0)
    seconds = time.monotonic() - began
    watched.close()
    return collected, watched, seconds


def told(collected: RoundResult, watched: Watched, seconds: float) -> SimpleNamespace:
    """Return what the tests compare of a round, by "GROUP/SAMPLE".

    Returns:
        parts: rewards of each component.
        overlap: conversations that had their reward while others were still sampled.
        judged: conversations that had a reward.
    """
    names = [f"{rollout.group}/{rollout.sample_index}" for rollout in collected.rollouts]
    rollouts = collected.rollouts
    return SimpleNamespace(
        tokens=dict(zip(names, (each.tokens_T.tolist() for each in rollouts), strict=True)),
        responses=dict(zip(names, (each.response for each in rollouts), strict=True)),
        rewards=dict(zip(names, rewards_of(collected), strict=True)),
        parts={
            f"{group}/{sample_index}": dict(parts)
            for (group, sample_index), parts in parts_of(collected).items()
        },
        metrics=values(collected.metrics | rollout_metrics(collected.samples)),
        overlap=watched.overlap(),
        judged=len(watched.judged),
        seconds=seconds,
    )


def asked_alone(
    talker: Talker, settings: RewardConfig, responses: dict[str, str]
) -> dict[str, float]:
    """Put each response to the policy by itself; return the scores that it gives."""
    judge = SelfJudge(settings, Renderer(talker.task.tokenizer, {}))
    scores = {}
    for name, response in responses.items():
        prompt = talker.task.prompts.prompts[int(name.partition("/")[0])]
        question = replace(prompt, tokens_T=judge.tokens(response, prompt))
        (reply,) = sample_single_turn(
            talker.engine,
            [question],
            seeds=[0],
            policy_version=0,
            max_tokens=settings.max_tokens,
            temperature=0.0,
        )
        try:
            scores[name] = parsed(reply.response, settings.pattern)
        except CallError:
            scores[name] = settings.no_verdict
        if reply.finish_reason == "length":
            scores[name] = settings.no_verdict
    return scores


def kinds(
    device: Device, *, file: str, reward_model: str, prompt_file: str, url: str = ""
) -> dict[str, SimpleNamespace]:
    """Sample the same round with scorers of every kind; with `url` by the judge behind it only.

    `single` are rewards of the policy as a judge, asked alone.
    """
    engine = talker(device)
    found: dict[str, SimpleNamespace] = {}
    judge = RewardConfig(
        function=("http",),
        url=url,
        model="grader",
        prompt_file=prompt_file,
        pattern=r"####\s*(-?\d+)",
        max_tokens=40,
        max_connections=8,
        retries=0,
        on_error="drop",
    )

    def run(
        name: str, settings: RewardConfig, *, keep_failed: bool = False, model: Any = None
    ) -> None:
        renderer = Renderer(engine.task.tokenizer, {})
        scorer = make_scorer(settings, model=model, renderer=renderer)
        found[name] = told(*round_of(engine, scorer, keep_failed=keep_failed))

    if url:
        run("http", judge)
        return found
    run("quick", RewardConfig(function=("exact",)))
    run("slow", RewardConfig(function=(f"{file}:slow", "exact"), weights=(0.5, 1.0)))
    settings = RewardConfig(
        function=("model",),
        model_path=reward_model,
        model_dtype="float32",
        model_batch=4,
        model_wait_s=0.01,
    )
    model = RewardModel(settings)
    model.wake(device)
    run("model", settings, model=model)
    own = replace(judge, function=("self_judge",), no_verdict=-1.0)
    run("self", own)
    found["self"].single = asked_alone(engine, own, found["self"].responses)
    picky = RewardConfig(function=(f"{file}:picky",), on_error="drop", retries=1)
    run("drop", picky)
    run("kept", picky, keep_failed=True)
    return found
