"""Experiment E10: routes of one request, however vLLM schedules it and lays its cache out."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from r3.backends.cpu import engine as on_cpu
from r3.engine import Engine, Sampled, Sampling, Transcript, Turn
from r3.rollout import Task, read_task
from r3.runtime.device import Device
from r3.types import RouteError
from tests.e2e.capture_cases import count_other, rows_seen, watched_cache, watched_routers
from tests.engines import engine_from_disk
from tests.errors import message_of
from tests.tiny import tiny_config

GREEDY = Sampling(temperature=0.0)
"""A seeded request whose prefill is split crashes vLLM's engine on CPU; this one has no seed."""


def scheduled(device: Device) -> SimpleNamespace:
    """Send the same requests to engines that schedule otherwise.

    Returns:
        What engines that schedule otherwise return for the same requests.
        longest: tokens of the longest prompt of an engine that runs two requests at once.
        two_equal: it returns the rows of the usual engine.
        chunks: requests whose prompts were computed in chunks, one by one; see `compared`.
        chunks_equal: requests in chunks return the rows of the usual engine.
        ahead: most batches of tokens that vLLM had scheduled after the one that it read.
        ahead_equal: requests of that round return the rows of the usual engine.
        ahead_stale: message about routes that were written to the slots of an earlier batch.
        turns: conversations of two turns, see `two_turns`.
        foreign: message about a request whose prefix has a cache without routes.
        abandoned: message after requests were aborted before their first pass.
        after: the engine returns the same bytes after all that.
    """
    config = tiny_config(rollout={"max_response_tokens": 64})  # room for two turns
    task = read_task(config)
    prompts = [list(prompt.tokens_T) for prompt in task.prompts.prompts[:8]]

    def engine_of(requests_at_once: int) -> Engine:
        engine = replace(config.engine, max_num_seqs=requests_at_once)
        return engine_from_disk(replace(config, engine=engine), device, task)

    usual = engine_of(config.engine.max_num_seqs)
    expected = sample(usual, requests(prompts))

    def as_usual(engine: Engine) -> bool:
        return same(sample(engine, requests(prompts)), expected)

    found, of_two = SimpleNamespace(longest=max(map(len, prompts))), engine_of(2)
    found.two_equal = as_usual(of_two)
    found.turns = two_turns(usual, prompts)
    found.foreign = message_of(lambda: sample_without_routes(usual, prompts[0]), RouteError)
    usual.reset_cache()
    found.abandoned = message_of(lambda: abandon(of_two, prompts), AssertionError)
    found.after = as_usual(of_two)
    with engines_with(enable_chunked_prefill=True, max_num_batched_tokens=40):
        chunked = engine_of(8)
    found.chunks = compared(chunked, requests(prompts))
    found.chunks_equal = as_usual(chunked)
    chunked.reset_cache()
    with queue_of_two(chunked) as ahead:
        found.ahead_equal = as_usual(chunked)
        chunked.reset_cache()
        found.ahead_stale = message_of(
            lambda: sample_into_one_batch(chunked, prompts[0]), RouteError
        )
    found.ahead = max(ahead)
    return found


def requests(
    prompts: Sequence[Sequence[int]],
    first_row: int = 0,
    count: int = 12,
    sampling: Sampling = GREEDY,
) -> list[Turn]:
    """Turns of so many tokens, one for each prompt."""
    return [
        Turn(
            key=key,
            tokens_T=tokens,
            first_row=first_row,
            seed=0,
            max_tokens=count,
            sampling=sampling,
        )
        for key, tokens in enumerate(prompts)
    ]


def sample(engine: Engine, turns: Sequence[Turn]) -> list[Sampled]:
    """Sample turns together, in their order."""
    found: list[Sampled] = []
    with engine.sampler(policy_version=0) as sampler:
        for turn in turns:
            sampler.add(turn)
        while sampler.busy:
            found += sampler.step()
    return sorted(found, key=lambda each: each.key)


def ids_of(sampled: Sampled) -> np.ndarray:
    assert sampled.routed_experts is not None
    return np.sort(sampled.routed_experts, axis=-1)


def compared(engine: Engine, turns: Sequence[Turn]) -> SimpleNamespace:
    """Sample turns one by one and not cached.

    Returns:
        rows, differ: captured rows, and those that are not the routers'.
        late: rows that are not the routers' of the row before.
        passes: most forward passes over a prompt.
    """
    found = SimpleNamespace(rows=0, differ=0, late=0, passes=0)
    with watched_routers(engine) as chosen:
        for turn in turns:
            engine.reset_cache()
            chosen.clear()
            (sampled,) = sample(engine, [turn])
            ids, seen = ids_of(sampled), rows_seen(chosen)
            found.rows += len(ids)
            found.differ += count_other(ids, seen)
            found.late += count_other(np.roll(ids, 1, axis=0), seen)
            passes = len(next(iter(chosen.values()))) - len(sampled.tokens_T) + 1
            found.passes = max(found.passes, passes)
    engine.reset_cache()
    return found


def same(one: Sequence[Sampled], other: Sequence[Sampled]) -> bool:
    """Whether both have the same tokens and experts.

    Log-probabilities of other batches may differ in the last digit, which moves no expert here.
    """
    pairs = zip(one, other, strict=True)
    return all(a.tokens_T == b.tokens_T and not count_other(ids_of(a), ids_of(b)) for a, b in pairs)


@contextmanager
def engines_with(**more: Any) -> Iterator[None]:
    """Inside, engines are built with other arguments of vLLM."""
    arguments = on_cpu.arguments
    on_cpu.arguments = lambda *given: arguments(*given) | more
    try:
        yield
    finally:
        on_cpu.arguments = arguments


@contextmanager
def queue_of_two(engine: Engine) -> Iterator[list[int]]:
    """Inside, vLLM schedules a batch ahead; yields how many were left each time that it read one.

    It does so on GPUs only: the queue is switched on as `EngineCore.__init__` does.
    """
    client: Any = engine.llm.llm_engine.engine_core
    core, counts = client.engine_core, []
    kept = core.batch_queue_size, core.batch_queue, core.step_fn

    def step() -> Any:
        outputs = core.step_with_batch_queue()
        if outputs[0] is not None:
            left = [each[1].total_num_scheduled_tokens for each in core.batch_queue]
            counts.append(sum(tokens > 0 for tokens in left))
        return outputs

    core.batch_queue_size, core.batch_queue, core.step_fn = 2, deque(maxlen=2), step
    try:
        yield counts
    finally:
        assert not any(each[1].total_num_scheduled_tokens for each in core.batch_queue)
        core.batch_queue_size, core.batch_queue, core.step_fn = kept


def two_turns(engine: Engine, prompts: Sequence[list[int]]) -> SimpleNamespace:
    """Sample two turns of each conversation; compare their rows with those of the whole.

    Returns:
        cached: tokens that second turns found in the prefix cache.
        rows, differ: rows, and those that are not what the routers choose for the whole.
        late, few: messages about a second turn whose rows are late by a token, or one too few.
    """
    engine.reset_cache()
    talks = [Transcript(engine.capture_spec, tokens, who="a talk") for tokens in prompts]
    for talk, first in zip(talks, sample(engine, requests(prompts)), strict=True):
        talk.append_sample(first)
        talk.observe(range(40, 52))
    with watched_cache(engine) as cached:
        turns = [
            replace(turn, first_row=talk.first_row)
            for talk, turn in zip(talks, requests([talk.tokens for talk in talks]), strict=True)
        ]
        seconds = sample(engine, turns)

    def refused(rows: np.ndarray) -> str:
        wrong = replace(seconds[0], routed_experts=rows)
        return message_of(lambda: copy.deepcopy(talks[0]).append_sample(wrong), RouteError)

    ids = ids_of(seconds[0])
    found = SimpleNamespace(cached=sum(cached), rows=0, differ=0)
    found.late, found.few = refused(np.roll(ids, 1, axis=0)), refused(ids[:-1])
    for talk, second in zip(talks, seconds, strict=True):
        talk.append_sample(second)
        engine.reset_cache()
        (whole,) = sample(engine, requests([talk.tokens], count=1))
        routes = np.sort(talk.rows(), axis=-1)
        found.rows += len(routes)
        found.differ += count_other(routes, ids_of(whole)[: len(routes)])
    engine.reset_cache()
    return found


def sample_without_routes(engine: Engine, tokens: list[int]) -> None:
    """Sample twice; between, the cached prefix loses its routes and keeps its keys and values.

    As if another engine had computed it.
    """
    engine.reset_cache()
    first, routes = sample(engine, requests([tokens])), engine._routes
    assert routes is not None
    for again in (False, True):
        if again:
            routes._table.empty(range(len(routes._table._by_block)))
            first = sample(engine, requests([tokens]))
        Transcript(engine.capture_spec, tokens, who=f"again {again}").append_sample(first[0])


def sample_into_one_batch(engine: Engine, tokens: list[int]) -> None:
    """Sample while the hooks have a copy of the slots, which vLLM does not write to."""
    table: Any = engine._routes._table if engine._routes else None
    slots, table._slots_N = table._slots_N, table._slots_N.clone()
    try:
        complete(engine, tokens)
    finally:
        table._slots_N = slots


def abandon(engine: Engine, prompts: Sequence[list[int]]) -> None:
    """Abort the requests that wait for their first pass, whose earlier routes are known."""
    core: Any = engine.llm.llm_engine
    with engine.sampler(policy_version=0) as sampler:
        for turn in requests(prompts, first_row=30):
            sampler.add(turn)
        sampler.step()
        waiting = [each.request_id for each in core.engine_core.engine_core.scheduler.waiting]
        assert len(waiting) == len(prompts) - 2, "two of them run"
        core.abort_request(waiting, internal=True)
        while sampler.busy:
            sampler.step()


def groups(device: Device, *, model: str) -> SimpleNamespace:
    """Capture by the slots of the group that keeps all tokens, and by those of the others.

    Returns:
        A model whose layers have several groups in the KV cache.
        kinds: kind of each group; the first is not the one whose slots the table has, or it is.
        chosen: kind of the group whose slots the table has.
        found: requests one by one, see `compared`.
        others: kind of each other group -> message about routes in its slots.
    """
    half = {"dtype": "bfloat16"}
    config = tiny_config(model, model=half, engine=half, rollout={"max_response_tokens": 64})
    task: Task = read_task(config)
    engine = engine_from_disk(config, device, task)
    prompts = [list(prompt.tokens_T) for prompt in task.prompts.prompts[:4]]
    routes = engine._routes
    assert routes is not None
    table: Any = routes._table
    runner = table._runner
    kinds = [type(each.kv_cache_spec).__name__ for each in runner.kv_cache_config.kv_cache_groups]
    found = compared(engine, requests(prompts, count=40))
    full, slots, others = table.group, table._slots_N, {}
    for index, kind in enumerate(kinds):
        if index != full:
            engine.reset_cache()
            table.group = index
            table._slots_N = runner.input_batch.block_table[index].slot_mapping.gpu
            others[kind] = message_of(lambda: complete(engine, prompts[0]), RouteError)
    table.group, table._slots_N = full, slots
    return SimpleNamespace(kinds=kinds, chosen=kinds[full], found=found, others=others)


def complete(engine: Engine, tokens: list[int]) -> None:
    """Sample one response; its routes must all be there."""
    (found,) = sample(engine, requests([tokens], count=40))
    Transcript(engine.capture_spec, tokens, who="a request").append_sample(found)
