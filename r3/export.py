"""Write a checkpoint of a run as a Hugging Face model folder, also of an interrupted run.

    python -m r3.export RUN_DIR                    the newest checkpoint, to RUN_DIR/hf/step_N
    python -m r3.export RUN_DIR --step 20 --to my-model
    python -m r3.export RUN_DIR --adapter          the adapter alone, to RUN_DIR/adapter/step_N

With `lora.rank`, the folder has the merged weights, or the adapter as PEFT and vLLM read it. One
process loads the weights, without optimizer and without an engine. Config, tokenizer and chat
template are those of the starting model, which must be as the run had it. Exit code 2: the run,
the checkpoint or the starting model is missing, damaged or has changed.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from r3.config import Config, ConfigError, ParallelConfig, Problem, flatten
from r3.config.arguments import keyword_arguments
from r3.data.template import Renderer, load_tokenizer
from r3.lora.adapters import attach, factors
from r3.lora.peft import adapter_config, adapter_notes, joined_in, write_adapter
from r3.lora.plan import ranks_of
from r3.models.hf_checkpoint import (
    CheckpointReader,
    joined,
    kept,
    read_small_files,
    with_end_tokens,
    write_checkpoint,
)
from r3.models.shape import ModelShape, ShapeError
from r3.policy.build import build_chunks, in_precision, transformer_config
from r3.policy.weight_slots import load, named, slots
from r3.run import checkpoint
from r3.run.folder import RunDir, read_metrics, step_folders
from r3.run.goal import Goal, best_step
from r3.run.manifest import DamageError, read_manifest
from r3.run.open import require_whole
from r3.run.prepare import refusing
from r3.run.session import init_rank
from r3.runtime.device import Device, leave
from r3.runtime.mesh import Mesh
from r3.runtime.terminal import own_streams, say
from r3.tools.beside.digests import changed_since, of_model, read_digests
from r3.tools.view.runs import config_of_run


@dataclass(frozen=True, kw_only=True)
class Order:
    """A checked command line."""

    config: Config
    shape: ModelShape
    small_files: dict[str, bytes]
    checkpoint: Path
    step: int
    to: Path
    adapter: bool


def parse(argv: Sequence[str] | None) -> Order:
    """Parse a command line.

    Raises:
        ConfigError: with all mistakes.
    """
    parser = argparse.ArgumentParser(
        prog="r3.export", description=(__doc__ or "").partition("\n")[0], allow_abbrev=False
    )
    parser.add_argument("run_dir", type=Path, help="folder of the run")
    parser.add_argument("--step", help="step of the checkpoint, or best; if not given, the newest")
    parser.add_argument("--to", type=Path, help="folder to write; RUN_DIR/hf/step_N if not given")
    parser.add_argument("--adapter", action="store_true", help="write the PEFT adapter alone")
    args = parser.parse_args(argv)
    run_dir = RunDir(args.run_dir)
    saved = dict(step_folders(run_dir.checkpoints))
    if not (run_dir.config.exists() and saved):
        what = "checkpoint" if run_dir.config.exists() else "config.yaml"
        fix = "give the folder of a run that has saved a checkpoint"
        raise ConfigError.of("RUN_DIR", str(run_dir.path), f"it has no {what}", fix)
    config = config_of_run(run_dir.path)
    best = run_dir.checkpoints / "best"
    names = {None: max(saved)} | {str(step): step for step in saved}
    if best.is_symlink() and best.exists():
        names["best"] = int(best.resolve().name.removeprefix("step_"))
    elif best.is_dir():  # as tools that follow links copy it
        with suppress(DamageError):
            names["best"] = read_manifest(best).step
    step = names.get(args.step, -1)
    kept = run_dir.path / "adapter" / f"step_{step:06d}" if args.adapter else run_dir.hf(step)
    to = args.to or kept
    problems: list[Problem] = []
    if step not in saved:
        rule = "is not kept"
        if args.step == "best" and not config.checkpoint.keep_best:
            rule = "there is none: the run was made without checkpoint.keep_best"
        rule += f"; the run has checkpoints of steps {', '.join(map(str, saved))}"
        problems.append(Problem("--step", args.step, rule, "choose one of them"))
    if args.adapter and not config.uses_lora:
        fix = "leave it out: all parameters were trained"
        problems.append(Problem("--adapter", True, "the run has no adapters (lora.rank 0)", fix))
    if to.exists():
        problems.append(Problem("--to", str(to), "exists already", "give another folder"))
    try:
        shape = config.model.shape()
        small_files = read_small_files(shape.source)
        tokenizer = load_tokenizer(shape.source)
        problems += _changed(run_dir, config, shape.source, small_files, tokenizer)
        ranks = ranks_of(config, shape)
        if args.adapter and (joined_name := joined_in(shape, ranks)):
            rule = f"has no modules for adapters inside {joined_name}, which joins matrices"
            fix = "leave --adapter out: the merged model has everything"
            problems.append(config.model.problem(rule, fix))
    except (OSError, ShapeError) as error:
        fix = "restore the folder: config, tokenizer and chat template come from it"
        if config.model.is_relative:
            fix += ". The path is relative: run this command where the run was started"
        problems.append(config.model.problem(f"cannot be read: {error}", fix))
    if problems:
        raise ConfigError(problems)
    if args.step == "best":
        with suppress(OSError, ValueError):  # rows that are lost say nothing
            values = Goal.of(flatten(config)).values(read_metrics(run_dir.metrics, notes=[]))
            if (first := best_step(values)) not in (None, step):
                say(f"note: the best evaluation was after step {first}, which has no checkpoint")
    variables = keyword_arguments(config.data.template_kwargs)
    return Order(
        config=config,
        shape=shape,
        small_files=with_end_tokens(small_files, Renderer(tokenizer, variables).ends),
        checkpoint=saved[step],
        step=step,
        to=to,
        adapter=args.adapter,
    )


def _changed(
    run_dir: RunDir, config: Config, source: str, small_files: dict[str, bytes], tokenizer: Any
) -> list[Problem]:
    """Parts of the starting model that are not those the run was trained with."""
    earlier = read_digests(run_dir)
    if earlier is None:
        say(
            f"note: {run_dir.path / 'run.json'} is lost or of another user: config, tokenizer and "
            f"chat template of {source} were not compared with those that the run was started with"
        )
        return []
    now = of_model(small_files, tokenizer.chat_template, weights=source if config.uses_lora else "")
    changed = changed_since(earlier, now)
    fix = "restore it: the export would not be what was trained"
    return [
        config.model.problem(f"its {group} changed since the run was trained", fix)
        for group in changed
    ]


def write(order: Order, device: Device, mesh: Mesh) -> None:
    """Load the weights of the checkpoint and write the folder."""
    alone = replace(order.config, parallel=ParallelConfig())
    megatron = transformer_config(alone, order.shape)
    chunks = build_chunks(alone, order.shape, megatron, mesh, device)
    in_precision(megatron, chunks)
    if alone.uses_lora:
        # The checkpoint has what the adapters became.
        alone = replace(alone, lora=replace(alone.lora, start=""))
        adapters = attach(alone, chunks[0], order.shape, mesh)
        with CheckpointReader(order.shape.source) as reader:
            reader.require(order.shape)
            load(slots(chunks, order.shape, mesh), reader.read, order.shape)
        adapters.start(keep=True)
    checkpoint.load_weights(order.checkpoint, chunks, mesh)
    if order.adapter:
        ranks = ranks_of(alone, order.shape)
        config = adapter_config(order.shape, alone.lora, ranks, order.shape.source)
        write_adapter(order.to, factors(adapters), config, alone.lora)
        for note in adapter_notes(order.shape, ranks):
            say(f"note: {note}")
        if alone.quantises_base:
            say(f"note: trained with model.base {alone.model.base}. The merged model has that base")
        return
    write_checkpoint(
        order.to,
        chain(joined(_tensors(chunks, order.shape, mesh), order.shape), kept(order.shape)),
        small_files=order.small_files,
        dtype=megatron.params_dtype,
        metadata={"step": order.step, "from": order.shape.source},
    )


def _tensors(
    chunks: list[object], shape: ModelShape, mesh: Mesh
) -> Iterator[tuple[str, torch.Tensor]]:
    for slot in slots(chunks, shape, mesh):
        yield from named(slot, slot.tensor, shape)


def main(argv: Sequence[str] | None = None) -> None:
    """Export, say where, end the process."""
    with refusing():
        order = parse(argv)
    device, mesh = init_rank(replace(order.config, parallel=ParallelConfig()))
    with refusing():
        require_whole(order.checkpoint, order.step, mesh.world)
        try:
            write(order, device, mesh)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(order.to.with_name(f".{order.to.name}.partial"), ignore_errors=True)
            rule, fix = f"was not written: {error}", "make room, or name another folder"
            raise ConfigError.of("--to", str(order.to), rule, fix) from error
    say(f"{order.to}: the weights after step {order.step}")
    leave(0)


if __name__ == "__main__":
    own_streams()
    main()
