"""Experiment E10: the routes that the engine hands over are those its routers chose, whatever
happened to the request.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from r3.engine import Engine, sampling_seed
from r3.rollout.single_turn import sample_single_turn
from r3.runtime.device import Device
from r3.types import Prompt, Rollout
from tests.e2e.cases import World, signature
from tests.tiny import tiny_config

SMALL_CACHE_GIB = 0.0008  # 13 blocks of 32 tokens, where 64 conversations want to run


def captured(device: Device) -> dict[str, Any]:
    """Every way a request can go, each compared with the same request computed alone and cold."""
    world = World(device, tiny_config())
    world.sync(0)
    engine = world.engine
    requests = [
        (prompt, sampling_seed(0, 1, prompt.id, sample_index))
        for prompt in world.task.prompts.prompts[:16]
        for sample_index in range(4)
    ]

    def sample(
        requests: Sequence[tuple[Prompt, int]], engine: Engine = engine, **options: Any
    ) -> list[Rollout]:
        prompts, seeds = zip(*requests, strict=True)
        return sample_single_turn(
            engine, prompts, seeds=seeds, policy_version=0, max_tokens=24, **options
        )

    found: dict[str, Any] = {"requests": len(requests)}

    with watched_routers(engine) as chosen, watched_cache(engine) as cached:
        alone, differ, rows = [], 0, 0
        for request in requests:
            engine.reset_cache()
            chosen.clear()
            (rollout,) = sample([request])
            differ += rows_that_differ(rollout, chosen)
            rows += len(rollout.routed_experts)
            alone.append(rollout)
        found["rows"], found["rows_unlike_the_routers"] = rows, differ
        found["rows_expected"] = sum(len(rollout.tokens_T) - 1 for rollout in alone)
        found["cold_cached_tokens"] = sum(cached)
        late = replace(alone[-1], routed_experts=np.roll(alone[-1].routed_experts, 1, axis=0))
        found["late_rows_unlike_the_routers"] = rows_that_differ(late, chosen)

        cached.clear()
        (again,) = sample(requests[-1:])
        found["warm_equal"] = signature([again]) == signature(alone[-1:])
        found["warm_cached_tokens"] = sum(cached)

    together = sample(requests)
    found["together_equal"] = signature(together) == signature(alone)
    prompt = len(requests[0][0].tokens_T)
    found["members_answers"] = len({rollout.tokens_T.tobytes() for rollout in together[:4]})
    found["members_prompt_routes"] = len(
        {rollout.routed_experts[:prompt].tobytes() for rollout in together[:4]}
    )

    # An aborted request is never taken for an answer, and leaves nothing behind.
    core: Any = engine.llm.llm_engine

    def abort(index: int, _rollout: Rollout) -> None:
        core.abort_request([str(other) for other in range(len(requests)) if other != index][-3:])

    try:
        sample(requests, on_rollout=abort)
        found["abort"] = "nothing was raised"
    except AssertionError as error:
        found["abort"] = str(error)
    found["after_abort_equal"] = signature(sample(requests)) == signature(alone)

    config = replace(
        world.config, engine=replace(world.config.engine, kv_cache_gib=SMALL_CACHE_GIB)
    )
    small = Engine(
        config,
        device,
        world.task.shape,
        world.task.tokenizer,
        max_model_len=world.task.max_model_len,
        from_disk=True,
    )
    small.wake("weights")
    small.wake("kv_cache")
    small.policy_version, small._stale_cache = (
        0,
        False,
    )  # loaded from the files that the policy started from
    with watched_preemptions(small) as preempted:
        squeezed = sample(requests, small)
    found["preemptions"] = len(preempted)
    found["preempted_equal"] = signature(squeezed) == signature(alone)
    found["preempted_differ"] = [
        index
        for index, (a, b) in enumerate(zip(signature(squeezed), signature(alone), strict=True))
        if a != b
    ]
    return found


@contextmanager
def watched_routers(engine: Engine) -> Iterator[dict[int, list[torch.Tensor]]]:
    """Inside, the top k of every router's own logits, by layer, in the order of the forwards: apart
    from vLLM's capture.
    """
    chosen: dict[int, list[torch.Tensor]] = {}
    topk = engine.shape.topk

    def watch(worker: Any) -> list[Any]:
        def hook(layer: int) -> Any:
            return lambda _module, _args, out: chosen.setdefault(layer, []).append(
                out[0].topk(topk).indices
            )

        return [
            module.register_forward_hook(hook(int(name.split(".")[2])))
            for name, module in worker.model_runner.get_model().named_modules()
            if name.endswith("mlp.gate")
        ]

    (hooks,) = engine.llm.collective_rpc(watch)
    assert len(hooks) == len(engine.shape.moe_layers)
    try:
        yield chosen
    finally:
        for hook in hooks:
            hook.remove()


def rows_that_differ(rollout: Rollout, chosen: dict[int, list[torch.Tensor]]) -> int:
    """Rows of a request computed alone whose experts are not those of the routers; all rows when
    their number is not.
    """
    seen = (
        torch.stack([torch.cat(chosen[layer]) for layer in sorted(chosen)], 1)
        .sort(-1)
        .values.numpy()
    )
    routes = np.sort(rollout.routed_experts, axis=-1)
    if seen.shape != routes.shape:
        return len(routes)
    return int((seen != routes).any((1, 2)).sum())


@contextmanager
def watched_cache(engine: Engine) -> Iterator[list[int]]:
    """Inside, how many prompt tokens each finished request found in the prefix cache."""
    core: Any = engine.llm.llm_engine
    step, cached = core.step, []

    def watching() -> Any:
        outputs = step()
        cached.extend(output.num_cached_tokens or 0 for output in outputs if output.finished)
        return outputs

    core.step = watching
    try:
        yield cached
    finally:
        del core.step


@contextmanager
def watched_preemptions(engine: Engine) -> Iterator[list[str]]:
    """Inside, the requests that lost their cache to another."""
    scheduler: Any = engine.llm.llm_engine.engine_core.engine_core.scheduler
    preempt, seen = scheduler._preempt_request, []

    def watching(request: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(request.request_id)
        return preempt(request, *args, **kwargs)

    scheduler._preempt_request = watching
    try:
        yield seen
    finally:
        del scheduler._preempt_request
