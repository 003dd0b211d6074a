"""The output of `--dry-run`: fit, model, ranks, batch, memory, config."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

from r3.config import Config, Problem, to_yaml
from r3.models.shape import BYTES_OF, ModelShape
from r3.tools.planning.layout_search import RANKS_PER_MACHINE
from r3.tools.planning.memory_plan import (
    GIB,
    host_memory,
    kv_cache_demand,
    memory,
    route_bytes_per_token,
    sequence_bytes,
)
from r3.tools.planning.sync import Traffic, sync_plans
from r3.tools.planning.verdict import verdict

_SHOWN_RANKS = 16


def describe(
    config: Config,
    shape: ModelShape,
    world_size: int,
    device_gib: float | None = None,
    differences: Sequence[str] = (),
) -> str:
    """The whole plan as text, for `--dry-run`.

    Args:
        device_gib: memory of the device to plan for; with it, the plan has a verdict.
        differences: lines about how the settings differ from their base.
    """
    sections = {
        "verdict": verdict(config, shape, world_size, device_gib) if device_gib else "",
        "settings": "\n".join(differences),
        "model": _model(shape),
        f"ranks ({world_size})": _layout(config, shape, world_size),
        "batch": _batch(config, shape, world_size),
        "memory per rank, GiB (estimate)": _memory(config, shape, world_size, device_gib),
        "weight sync, GiB read per rank": _sync(config, shape, world_size)
        if config.uses_engine
        else "",
        "config": to_yaml(config).rstrip(),
    }
    return "\n\n".join(section(title, text) for title, text in sections.items() if text)


def around(
    plan: str, base: str, world_size: int, notes: Sequence[str], needs: Sequence[Problem]
) -> str:
    """The plan with its title, notes, and what is to be downloaded."""
    title = f"{base}: dry run on {world_size} rank{'s' if world_size > 1 else ''}"
    parts = [title, plan, *filter(None, notes)]
    if needs:
        header = "needs (not here yet; files in configs/ say where to get what a preset names)"
        parts.append(section(header, "\n".join(f"- {need}" for need in needs)))
    return "\n\n".join(parts)


def section(title: str, text: str) -> str:
    """A part of the output: lines below their title."""
    return f"{title}\n{textwrap.indent(text, '  ')}"


def left_out(shape: ModelShape) -> str:
    """What of the checkpoint R3 does not load, train or export; empty if there is nothing."""
    layers = f"{shape.num_mtp_layers} multi-token-prediction layers"
    parts = [(layers, bool(shape.num_mtp_layers)), ("the vision model", shape.is_wrapped)]
    return " and ".join(part for part, is_there in parts if is_there)


def _model(shape: ModelShape) -> str:
    kind = "dense"
    if shape.moe_layers:
        experts = f"{shape.num_experts} experts, {shape.topk} per token"
        kind = f"{len(shape.moe_layers)} MoE layers of {experts}"
    if absent := left_out(shape):
        kind += f" ({absent} are not loaded)"
    if shape.quantised:
        kind += f", weights in {shape.quantised} that are read as bfloat16"
    return (
        f"{shape.architecture}: {_count(shape.num_params)} parameters, {shape.num_layers} layers, "
        f"{kind}, context {shape.context}"
    )


def _layout(config: Config, shape: ModelShape, world_size: int) -> str:
    """Ranks in Megatron's order (`ParallelConfig.place`)."""
    parallel = config.parallel
    per_rank = shape.num_experts // parallel.ep
    stages = parallel.stages(shape.num_layers)
    rows = []
    for rank in range(min(world_size, _SHOWN_RANKS)):
        place = parallel.place(rank, world_size)
        engine, first = place.pop("engine"), place["ep"] * per_rank
        cells = {
            "rank": rank,
            **place,
            "layers": ",".join(f"{piece[0]}..{piece[-1]}" for piece in stages[place["pp"]]),
            "experts": f"{first}..{first + per_rank - 1}" if shape.moe_layers else "-",
        }
        if config.uses_engine:
            cells["engine"] = engine
        if not config.learns_rows:
            cells["prompts"] = config.rollout.prompts_per_step // parallel.engines(world_size)
        rows.append([str(cell) for cell in cells.values()])
    return _table([list(cells), *rows, *_more(world_size)])


def _more(world_size: int) -> list[list[str]]:
    """The row of a table about the ranks that it leaves out."""
    return [[f"... and {world_size - _SHOWN_RANKS} more"]] if world_size > _SHOWN_RANKS else []


def _batch(config: Config, shape: ModelShape, world_size: int) -> str:
    rollout, train, parallel = config.rollout, config.train, config.parallel
    rollouts = rollout.samples_per_step
    if config.learns_rows:
        return (
            f"rows          {rollouts} per step, each a conversation of at most "
            f"{train.micro_batch_tokens} tokens; a micro-batch holds several\n"
            f"updates       {train.updates_per_step} per step"
        )
    data_ranks, engines = parallel.data_ranks(world_size), parallel.engines(world_size)
    per_update = math.ceil(rollouts / train.updates_per_step / data_ranks)
    longest = config.longest_sequence(shape.max_position_embeddings)
    prompt = config.longest_prompt(shape.max_position_embeddings)
    route_bytes = route_bytes_per_token(shape)
    in_flight = min(rollouts // engines, config.engine.max_num_seqs)
    # A micro-batch has whole sequences, so the longest ones waste the most of it.
    micro_batches = math.ceil(per_update / (train.micro_batch_tokens // longest))
    updates = f"{train.updates_per_step} per step of {rollouts // train.updates_per_step} rollouts"
    if train.epochs_per_step > 1:
        updates += f", in each of {train.epochs_per_step} epochs"
    lines = [
        f"prompts       {rollout.prompts_per_step} per step, {rollout.group_size} samples each: "
        f"{rollouts} rollouts",
        f"rollouts      {rollouts // engines} per engine, {in_flight} in flight",
        f"sequence      at most {prompt} prompt + {longest - prompt} response = {longest} tokens",
        f"tokens        at most {rollouts * longest:,} per step, "
        f"{rollouts // data_ranks * longest:,} per data-parallel rank",
        f"updates       {updates}; {train.total_updates} in {train.steps} steps",
        f"micro-batches at most {micro_batches} per update and rank, of {train.micro_batch_tokens} "
        "tokens",
    ]
    if config.replays and route_bytes:
        total = rollouts // data_ranks * longest * route_bytes
        lines.append(
            f"routes        {route_bytes} bytes per token, at most {total / 2**20:,.1f} MiB on the "
            "host of each rank"
        )
    return "\n".join(lines)


def _memory(config: Config, shape: ModelShape, world_size: int, device_gib: float | None) -> str:
    phases = memory(config, shape, world_size, device_gib)
    parts = list(dict.fromkeys(part for of_phase in phases.values() for part in of_phase))
    rows: list[Sequence[str]] = [("", *phases)]
    rows += [(part, *(_gib(each.get(part, 0.0)) for each in phases.values())) for part in parts]
    rows.append(("sum", *(_gib(sum(each.values())) for each in phases.values())))
    host = host_memory(config, shape, world_size)
    cells = ", ".join(f"{part} {_gib(size)}" for part, size in host.items())
    cache = "no engine: nothing is sampled"
    if config.uses_engine:
        cache = _kv_cache(config, shape, world_size, phases["GENERATE"]["KV cache"])
    return f"{_table(rows)}\n{cache}\nhost memory per rank: {_gib(sum(host.values()))} ({cells})"


def _kv_cache(config: Config, shape: ModelShape, world_size: int, size: float) -> str:
    """Where the size of the KV cache comes from, and what it holds."""
    part = f"{config.engine.memory_fraction:.0%} of the device"
    source = f"what {part} leaves beside the engine's weights and buffers (GPU)"
    if config.engine.kv_cache_gib:
        source = "set by engine.kv_cache_gib"
    demand = kv_cache_demand(config, shape, world_size)
    one = sequence_bytes(config, shape)
    holds = f"; holds {size / one:,.0f} sequences of maximum length" if size else ""
    which = "up to" if config.learns_rows else "all"  # of evaluations
    return (
        f"KV cache: {source}{holds}; {which} {demand / one:,.0f} conversations in flight at "
        f"maximum length need {_gib(demand)}"
    )


def _sync(config: Config, shape: ModelShape, world_size: int) -> str:
    """What the first ranks read in a weight sync, by the code that plans it."""
    # Ranks cannot read each other's quantised base: each sends what it makes of it.
    per_host = 1 if config.quantises_base else RANKS_PER_MACHINE
    hosts = [str(rank // per_host) for rank in range(world_size)]
    readers = range(min(world_size, _SHOWN_RANKS))
    size = BYTES_OF[config.model.dtype]
    rows: list[Sequence[str]] = [("rank", "own memory", "same machine", "broadcast")]
    for plan in sync_plans(shape, config.parallel, hosts, readers, size):
        traffic = Traffic.of(plan)
        parts = (traffic.local, traffic.peer, traffic.network)
        rows.append((str(plan.reader), *(_gib(read) for _, read in parts)))
    rows += _more(world_size)
    if world_size > RANKS_PER_MACHINE:
        rows.append([f"machines of {RANKS_PER_MACHINE} ranks"])
    return _table(rows)


def _gib(size: float) -> str:
    return f"{size / GIB:.3f}" if 0 < size < GIB else f"{size / GIB:.1f}" if size else "-"


def _count(number: int) -> str:
    for unit, scale in (("B", 10**9), ("M", 10**6)):
        if number >= scale:
            return f"{number / scale:.2f} {unit}"
    return str(number)


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in rows if len(row) > 1) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip()
        for row in rows
    )
