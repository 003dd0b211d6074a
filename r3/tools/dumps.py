"""Rollouts of a step: written to the folder of the run, read back, shown (`log.*_every`)."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from torch import Tensor

from r3.algo.advantage import Reward
from r3.metrics.meter import Meter
from r3.rollout import readable
from r3.run.folder import RunDir, jsonl_line, read_jsonl, replacing
from r3.runtime.mesh import Axis
from r3.runtime.terminal import say
from r3.sync.rollouts import send_samples
from r3.tools.tensorboard import sample_markdown
from r3.tools.view.panels import conversation
from r3.tools.view.samples import sample_of
from r3.types import Prompt, Rollout, Sample, SamplingMask

if TYPE_CHECKING:
    from r3.run.session import Session


# Arrays of rollouts are concatenated: rollout i has tokens `cu_tokens[i] : cu_tokens[i + 1]`
# and routes `cu_rows[i] : cu_rows[i + 1]`, because it has one row less than tokens.
# Arrays with one value per token: name in files -> field. Routes have one row less. `kept_counts`
# has one per token too: token t of all has so many of `kept_ids`, in their order.
_PER_TOKEN = {"tokens": "tokens_T", "loss_mask": "loss_mask_T", "logprobs": "logprobs_T"}
_FACTS = tuple(
    field.name
    for field in fields(Rollout)
    if field.name not in (*_PER_TOKEN.values(), "routed_experts", "sampling_mask")
)


def rollout_facts(rollout: Rollout) -> dict[str, Any]:
    """Everything of a rollout but its arrays, as JSON can hold it."""
    return {name: getattr(rollout, name) for name in _FACTS}


def join_arrays(rollouts: Sequence[Rollout]) -> dict[str, np.ndarray]:
    """The arrays of at least one rollout, concatenated."""
    routes = [rollout.routed_experts for rollout in rollouts]
    arrays = {
        **{
            name: np.concatenate([getattr(rollout, field) for rollout in rollouts])
            for name, field in _PER_TOKEN.items()
        },
        "routed_experts": np.concatenate(routes),
        "cu_tokens": _offsets(len(rollout.tokens_T) for rollout in rollouts),
        "cu_rows": _offsets(len(rows) for rows in routes),
    }
    masks = [rollout.sampling_mask for rollout in rollouts]
    if kept := [mask.token_ids for mask in masks if mask]:
        none = [np.zeros(len(rollout.tokens_T), np.int32) for rollout in rollouts]
        counts = [mask.counts_T if mask else zeros for mask, zeros in zip(masks, none, strict=True)]
        arrays |= {"kept_counts": np.concatenate(counts), "kept_ids": np.concatenate(kept)}
    # safetensors writes the raw buffer and ignores strides: another memory order is scrambled.
    return {name: np.ascontiguousarray(array) for name, array in arrays.items()}


def split_rollouts(
    facts: Sequence[Mapping[str, Any]], arrays: Mapping[str, np.ndarray]
) -> list[Rollout]:
    """Undo `rollout_facts` and `join_arrays`; further keys of `facts` are ignored."""
    rollouts, masked = [], "kept_counts" in arrays
    cu_kept = _offsets(arrays["kept_counts"]) if masked else np.zeros(0)
    for index, fact in enumerate(facts):
        tokens = slice(*arrays["cu_tokens"][index : index + 2])
        rows = slice(*arrays["cu_rows"][index : index + 2])
        known: dict[str, Any] = {name: fact[name] for name in _FACTS}
        known["segments"] = tuple(map(tuple, fact["segments"]))
        for name in ("messages", "turn_rewards"):
            known[name] = tuple(fact[name])
        known |= {field: arrays[name][tokens] for name, field in _PER_TOKEN.items()}
        if masked and (counts_T := arrays["kept_counts"][tokens]).any():
            ids = arrays["kept_ids"][cu_kept[tokens.start] : cu_kept[tokens.stop]]
            known["sampling_mask"] = SamplingMask(counts_T=counts_T, token_ids=ids)
        rollouts.append(Rollout(**known, routed_experts=arrays["routed_experts"][rows]))
    return rollouts


def _offsets(lengths: Iterable[int]) -> np.ndarray:
    return np.cumsum([0, *lengths], dtype=np.int64)


def show_samples(meter: Meter, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
    """Give TensorBoard and the tracker the text of a few rows of a dump: the best, the worst and a
    middle one by reward.
    """
    if rows and meter.writers:
        ordered = sorted(rows, key=lambda row: row["reward"])
        middle = ordered[len(rows) // 2]
        chosen = {"worst": ordered[0], "middle": middle, "best": ordered[-1]}
        texts = {name: sample_markdown(row) for name, row in chosen.items()}
        for writer in meter.writers:
            writer.log_samples(texts, step)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedSample(Sample):
    """A sample after its step.

    Attributes:
        shaped_reward: what its advantage was made of: the reward minus the overlong penalty and,
            with algo.kl_in reward, minus the KL.
        advantage: of its reward; None in distillation, where a teacher's count.
        trains: False if it counted for its group's baseline and had no loss.
    """

    shaped_reward: float
    advantage: float | None
    trains: bool = True


def record_samples(
    run: Session,
    step: int,
    samples: Sequence[Sample],
    rewards: Sequence[Reward],
    advantages_R: Tensor,
) -> None:
    """Dump the samples of all ranks and show one of this rank's, each when due. All must call.

    Args:
        samples: this rank's.
        rewards: of all samples of the step, with their advantages.
    """
    log, prompts = run.config.log, run.task.prompts.prompts
    dumps = log.rollouts_every and (step == 1 or step % log.rollouts_every == 0)
    shows = log.show_every and step % log.show_every == 0 and samples and run.device.rank == 0
    if not dumps and not shows:
        return
    made = None if run.config.distils else advantages_R
    trained = trained_samples(samples, rewards, made, filters=run.config.algo.overlong_filter)
    if dumps:
        dumped = dump_rollouts(run.folder, step, trained, run.mesh.world, prompts)
        show_samples(run.meter, step, dumped)
    if shows:
        item = trained[step // log.show_every % len(trained)]  # each time another place
        prompt = next((prompt for prompt in prompts if prompt.id == item.rollout.prompt_id), None)
        run.meter.console.show(conversation(sample_of(0, row_of(item, prompt))))


def trained_samples(
    samples: Sequence[Sample],
    rewards: Sequence[Reward],
    advantages_R: Tensor | None,
    *,
    filters: bool,
) -> list[TrainedSample]:
    """Return samples with what they were trained on.

    Args:
        filters: truncated samples had no loss.
    """
    place_of = {reward.key: place for place, reward in enumerate(rewards)}
    return [
        TrainedSample(
            **{field.name: getattr(sample, field.name) for field in fields(Sample)},
            shaped_reward=rewards[place].shaped,
            advantage=None if advantages_R is None else float(advantages_R[place]),
            trains=not (filters and sample.rollout.is_truncated),
        )
        for sample in samples
        for place in (place_of[sample.rollout.key],)
    ]


def dump_rollouts(
    run_dir: RunDir,
    step: int,
    samples: Sequence[TrainedSample],
    world: Axis,
    prompts: Sequence[Prompt],
) -> list[dict[str, Any]]:
    """Write the rollouts of a step, of every rank, to the run's folder. All ranks must call.

    `prompts` are those of the data set: rank 0 looks up questions and answers by their ids.

    If the disk is full, rank 0 prints a message and the run continues.

    Returns:
        The dumped rows on rank 0, nothing on others or if there is no file.
    """
    keys = world.all_gather_object([sample.rollout.key for sample in samples])
    everything = send_samples(samples, {key: [0] for part in keys for key in part}, world)
    if world.rank != 0:
        return []
    items = [cast("TrainedSample", everything[key].sample) for key in sorted(everything)]
    wanted = {item.rollout.prompt_id for item in items}
    by_id = {prompt.id: prompt for prompt in prompts if prompt.id in wanted}
    try:
        return write_rollouts(run_dir, step, items, by_id)
    except (OSError, SafetensorError) as error:
        say(f"rollouts of step {step} not dumped: {error}", error=True)
        return []


def write_rollouts(
    run_dir: RunDir,
    step: int,
    samples: Sequence[TrainedSample],
    prompts: Mapping[str, Prompt] = MappingProxyType({}),
) -> list[dict[str, Any]]:
    """Dump a step: text and figures as jsonl, tokens, logprobs and routes as safetensors beside it.

    If the jsonl file exists, the dump is complete. A rollout whose prompt is not among `prompts`
    (by id) has neither question nor reference answer in it.

    Returns:
        The rows of the jsonl file.

    Raises:
        ValueError: there is no rollout.
    """
    if not samples:
        raise ValueError(f"step {step}: a dump needs at least one rollout")
    rows = [
        row_of(item, prompts.get(item.rollout.prompt_id))
        | {"checksum": _checksum(item.rollout.tokens_T)}
        for item in samples
    ]
    path = run_dir.rollouts(step)
    # Both are complete before either appears; the inner one, the arrays, appears first.
    with (
        replacing(path, private=True) as text,
        replacing(path.with_suffix(".safetensors"), private=True) as tensors,
    ):
        save_file(join_arrays([item.rollout for item in samples]), tensors)
        text.write_bytes(b"".join(map(jsonl_line, rows)))
    return rows


def row_of(item: TrainedSample, prompt: Prompt | None) -> dict[str, Any]:
    """A rollout in words and figures, as a dump holds it; arrays are left out."""
    return (
        rollout_facts(item.rollout)
        | readable(item.rollout, prompt)
        | {
            "reward": float(item.reward),
            "rewards": dict(item.parts),
            "shaped_reward": float(item.shaped_reward),
            "advantage": item.advantage,
            "trained": item.trains,
            "tokens": len(item.rollout.tokens_T),
            "response_tokens": item.rollout.num_response_tokens,
        }
    )


def read_rollouts(path: Path) -> tuple[list[Rollout], list[float], list[float | None]]:
    """Rollouts, rewards and advantages of a dump; single-turn rollouts have their messages too.

    Raises:
        ValueError: rows or arrays are damaged, or are not of one dump.
    """
    rows = read_jsonl(path)
    arrays = load_file(path.with_suffix(".safetensors"))
    if fault := arrays_fault(dict(enumerate(rows)), arrays):
        raise ValueError(f"{path.with_suffix('.safetensors')}: {fault}")
    rollouts = split_rollouts(rows, arrays)
    return rollouts, [row["reward"] for row in rows], [row["advantage"] for row in rows]


def arrays_fault(rows: Mapping[int, Mapping[str, Any]], arrays: Mapping[str, np.ndarray]) -> str:
    """Why arrays do not belong to the rows of a dump; "" if they do.

    Args:
        rows: by their places in the file.
        arrays: of the file beside it.
    """
    count = len(arrays["cu_tokens"]) - 1
    if rows and max(rows) >= count:
        return f"it has the arrays of {count} rollouts, and there are {max(rows) + 1} rows"
    for place, row in rows.items():
        tokens_T = arrays["tokens"][slice(*arrays["cu_tokens"][place : place + 2])]
        if row.get("checksum") != _checksum(tokens_T):
            return f"its tokens are not those of row {place + 1}: it is of another step or run"
    return ""


def _checksum(tokens_T: np.ndarray) -> int:
    return zlib.crc32(tokens_T.astype(np.int64).tobytes())
