"""Experiment E10: the engine returns the routes that its routers chose, however it schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from r3.engine import Engine, sampling_seed
from r3.runtime.device import Device
from r3.tools import sample_single_turn
from r3.types import Prompt, Rollout, RouteError
from tests.engines import World, engine_from_disk, one_round, routers_of, signature
from tests.errors import message_of
from tests.tiny import tiny_config

SMALL_CACHE_GIB = 0.0008  # 13 blocks of 32 tokens, where 64 conversations want to run


def captured(device: Device) -> SimpleNamespace:
    """Send requests in every way, and compare each with the same request alone and not cached.

    Returns:
        Requests in every way, each against the same request alone and not cached.
        rows, rows_expected: captured rows of routes, and tokens - 1 summed over the requests.
        rows_differ: rows that are not what a hook on the routers saw.
        late_rows_differ: the same for one rollout whose rows are late by a token.
        faults: messages about requests whose routes were written to wrong slots, or not at all.
        cold_cached_tokens, warm_cached_tokens: prompt tokens found in the prefix cache, without
            and with an earlier request.
        warm_equal, together_equal: cached and batched requests return the same bytes.
        responses, prompt_routes: different responses, and different routes of the prompt, of four
            samples of one prompt.
        abort: message after aborted requests.
        preemptions_in_round: preemptions of a round of conversations with a small cache.
        preemptions_counted: what the round's metrics say of it.
        preempted_differ: indices of requests that return other bytes with a small cache.
        in_bfloat16: the same in bfloat16, where rounding depends on the batch.
        Preempted requests in bfloat16, each against the same request alone.
        preempted: requests that were preempted.
        rows: rows of both, up to the first token that they do not share.
        differ: rows with other experts in a layer.
        late_differ: the same against rows that are late by a token.
    """
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

    found = SimpleNamespace(rows=0, rows_differ=0)
    alone: list[Rollout] = []
    with watched_routers(engine) as chosen, watched_cache(engine) as cached:
        for request in requests:
            engine.reset_cache()
            chosen.clear()
            alone += sample([request])
            found.rows_differ += rows_that_differ(alone[-1], chosen)
            found.rows += len(alone[-1].routed_experts)
        found.cold_cached_tokens = sum(cached)
        late = replace(alone[-1], routed_experts=np.roll(alone[-1].routed_experts, 1, axis=0))
        found.late_rows_differ = rows_that_differ(late, chosen)

        cached.clear()
        found.warm_equal = signature(sample(requests[-1:])) == signature(alone[-1:])
        found.warm_cached_tokens = sum(cached)
    found.rows_expected = sum(len(rollout.tokens_T) - 1 for rollout in alone)

    found.faults = faulty_captures(engine, lambda: sample(requests[-1:]))
    together = sample(requests)
    found.together_equal = signature(together) == signature(alone)
    prompt, samples = len(requests[0][0].tokens_T), together[:4]
    found.responses = len({rollout.tokens_T.tobytes() for rollout in samples})
    found.prompt_routes = len({each.routed_experts[:prompt].tobytes() for each in samples})

    # An aborted request is never taken for a response, and leaves nothing behind.
    core: Any = engine.llm.llm_engine

    def abort(index: int, _rollout: Rollout) -> None:
        core.abort_request([str(other) for other in range(len(requests)) if other != index][-3:])

    found.abort = message_of(lambda: sample(requests, on_rollout=abort), AssertionError)
    found.after_abort_equal = signature(sample(requests)) == signature(alone)

    config = replace(
        world.config, engine=replace(world.config.engine, kv_cache_gib=SMALL_CACHE_GIB)
    )
    small = engine_from_disk(config, device, world.task)
    with watched_preemptions(small) as preempted:
        squeezed = sample(requests, small)
    found.preemptions = len(preempted)
    pairs = zip(signature(squeezed), signature(alone), strict=True)
    found.preempted_differ = [index for index, (a, b) in enumerate(pairs) if a != b]
    with watched_preemptions(small) as preempted:
        # 16 prompts of 4 samples, as above, and longer responses.
        rollout = replace(
            config.rollout, prompts_per_step=16, max_response_tokens=60, temperature=2.0
        )
        crowded = replace(config, rollout=rollout)
        collected = one_round(small, world.task, world.mesh, crowded, 0, step=1)
    found.preemptions_in_round = len(preempted)
    found.preemptions_counted = collected.metrics["engine/preemptions"].value
    halves = replace(
        config,
        engine=replace(config.engine, dtype="bfloat16", kv_cache_gib=SMALL_CACHE_GIB / 2),
        model=replace(config.model, dtype="bfloat16"),
    )
    rounding = engine_from_disk(halves, device, world.task)
    with watched_preemptions(rounding) as preempted:
        squeezed = sample(requests, rounding)
    places = {int(name.partition("-")[0]) for name in preempted}
    compared = [_rows(squeezed[i], *sample([requests[i]], rounding)) for i in places]
    found.in_bfloat16 = SimpleNamespace(
        preempted=len(places),
        rows=sum(rows for rows, _, _ in compared),
        differ=sum(differ for _, differ, _ in compared),
        late_differ=sum(late for _, _, late in compared),
    )
    return found


def _rows(one: Rollout, other: Rollout) -> tuple[int, int, int]:
    """Count the rows before two rollouts sample another token, those that differ, and those that
    differ from the row before.
    """
    length = min(len(one.tokens_T), len(other.tokens_T))
    same_T = one.tokens_T[:length] == other.tokens_T[:length]
    rows = int(same_T.cumprod().sum()) - 1
    mine, theirs = (np.sort(each.routed_experts[:rows], axis=-1) for each in (one, other))
    late = np.roll(mine, 1, axis=0)
    return rows, *(int((each != theirs).any((1, 2)).sum()) for each in (mine, late))


class _Late:
    """Slots of a pass, each the one after the token's own."""

    def __init__(self, slots: torch.Tensor) -> None:
        self._slots = slots

    def __getitem__(self, tokens: slice) -> torch.Tensor:
        return self._slots[tokens] + 1


def faulty_captures(engine: Engine, sample: Callable[[], list[Rollout]]) -> dict[str, str]:
    """Messages about a request whose routes are written late by a slot, or not in one layer.

    Its blocks held right routes of the same tokens before.
    """
    routes = engine._routes
    assert routes is not None
    table = routes._table
    router = routers_of(engine)[table.layers[1]]
    slots, hook = table._slots_N, router.capture_fn
    engine.reset_cache()
    table._slots_N = _Late(slots)  # type: ignore[assignment]
    late = message_of(sample, RouteError)
    table._slots_N = slots
    engine.reset_cache()
    router.set_capture_fn(None)
    lost = message_of(sample, RouteError)
    router.set_capture_fn(hook)
    engine.reset_cache()
    return {"late": late, "lost": lost}


@contextmanager
def watched_routers(engine: Engine) -> Iterator[dict[int, list[torch.Tensor]]]:
    """Yield layer -> top k of the router's own logits per forward, without vLLM's capture."""
    chosen: dict[int, list[torch.Tensor]] = {}
    topk = engine.shape.topk

    def watch(worker: Any) -> list[Any]:
        def hook(layer: int) -> Any:
            return lambda _module, _args, out: chosen.setdefault(layer, []).append(
                (out[0] if isinstance(out, tuple) else out).topk(topk).indices
            )

        return [
            module.register_forward_hook(hook(int(name.split(".")[2])))
            for name, module in worker.model_runner.get_model().named_modules()
            if name.endswith(("mlp.gate", "mlp.router"))
        ]

    (hooks,) = engine.llm.collective_rpc(watch)
    assert len(hooks) == len(engine.shape.moe_layers)
    try:
        yield chosen
    finally:
        for hook in hooks:
            hook.remove()


def rows_seen(chosen: dict[int, list[torch.Tensor]]) -> np.ndarray:
    """Rows of one request alone as a hook on the routers saw them, over all passes."""
    rows = torch.stack([torch.cat(chosen[layer]) for layer in sorted(chosen)], 1)
    return rows.sort(-1).values.numpy()


def count_other(one: np.ndarray, other: np.ndarray) -> int:
    """Count rows with other experts in a layer; all of them if the numbers of rows differ."""
    return int((one != other).any((1, 2)).sum()) if one.shape == other.shape else len(one)


def rows_that_differ(rollout: Rollout, chosen: dict[int, list[torch.Tensor]]) -> int:
    """Count rows of a request computed alone that are not the routers'."""
    return count_other(np.sort(rollout.routed_experts, axis=-1), rows_seen(chosen))


@contextmanager
def watched_cache(engine: Engine) -> Iterator[list[int]]:
    """Yield the prompt tokens that each finished request found in the prefix cache."""
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
    """Yield the requests that lost their cache to another."""
    scheduler: Any = engine.llm.llm_engine.engine_core.engine_core.scheduler
    preempt, seen = scheduler._preempt_request, []

    def watching(request: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(request.request_id)
        return preempt(request, *args, **kwargs)

    scheduler._preempt_request = watching
    try:
        yield seen
    finally:
        scheduler._preempt_request = preempt
