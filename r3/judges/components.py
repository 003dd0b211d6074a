"""Judges as components of a reward."""

from __future__ import annotations

from functools import partial
from typing import Any

from r3 import extras
from r3.config import RewardConfig
from r3.data.template import Renderer
from r3.errors import ConfigError
from r3.rewards.scorer import Component, here
from r3.user_code.workers import Pool, Threads


def component(
    name: str, spec: str, settings: RewardConfig, *, model: Any, renderer: Renderer | None
) -> Component:
    """Return the component of `reward.function` self_judge, http, model, math or gym.

    Args:
        name: in metrics and dumps.
        spec: which of them.
        settings: of the reward.
        model: the reward model, which is loaded before.
        renderer: the policy's chat template, for self_judge.
    """
    new_pool = partial(Pool, timeout_s=settings.timeout_s, retries=settings.retries)
    if spec == "self_judge":
        from r3.judges.self_judge import SelfJudge

        assert renderer is not None, "a policy that judges itself needs its chat template"
        judge = SelfJudge(settings, renderer)
        pool = Pool(judge, timeout_s=float("inf"))
        lacks = "the engine is asked, which only a run has"
        return Component(name=name, function=judge.tokens, pool=pool, judges=True, lacks=lacks)
    if spec == "http":
        from r3.judges.chat import ChatJudge

        pool = new_pool(Threads(), backoff_s=settings.backoff_s, limit=settings.max_connections)
        return Component(name=name, function=ChatJudge(settings).score, pool=pool, judges=True)
    if spec == "model":
        assert model is not None, "the reward model is loaded before its scorers"
        pool = new_pool(model.batches())
        lacks = "a reward model is loaded on a device only"
        return Component(name=name, function=model.score, pool=pool, judges=True, lacks=lacks)
    from r3.judges import verifier

    if spec == "gym":
        return here(name, verifier.gym)
    assert spec == "math", spec
    try:
        import math_verify  # noqa: F401
    except ImportError as error:
        fix = "pip install 'math-verify==0.9.0' (the extra math of pyproject.toml)"
        rule = f"math-verify cannot be imported: {error}"
        raise ConfigError.of("reward.function", spec, rule, fix) from None
    workers = extras.processes(max(1, settings.workers), preload=[f"{verifier.__file__}:equal"])
    return Component(name=name, function=verifier.equal, pool=new_pool(workers))
