"""Score the rollouts of a dumped step again, with replayed and with live routes, in any layout.

    python -m r3.rescore RUN_DIR --step N [--weights DIR] [--section.field value ...]

Tokens, log-probabilities and routes come from `RUN_DIR/rollouts`, settings from its config.yaml
with flags on top. Weights come from the run if it still has those that sampled the step (the
starting model, an export, a checkpoint), or from `--weights DIR` (a Hugging Face folder or a
checkpoint of r3). Only `--save` writes a file. The metrics depend only on the dump and the policy.
If two layouts give different metrics, they compute two different policies.

`--engine [DIR]` decodes the tokens of the dump by the engine too, with the policy's weights or
those of DIR: a table shows where engine and policy part (layer, position, experts), and findings
say what that means.

Exit code 2: the dump, its weights or the settings are missing or do not fit.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from r3 import checks as validate
from r3.cli.words import split_arguments
from r3.config import Config, ConfigError, Problem, read_values, with_values
from r3.models.hub import folder_of
from r3.policy import Policy, TokenScores
from r3.routing.replay import Mode
from r3.run import checkpoint
from r3.run.folder import RunDir, replacing, step_folders
from r3.run.open import require_whole
from r3.run.prepare import refusing
from r3.run.session import init_rank
from r3.runtime.device import leave
from r3.runtime.mesh import Mesh
from r3.runtime.terminal import own_streams, say
from r3.tools.dumps import read_rollouts
from r3.tools.mismatch.forced import build_engine, by_rollout, decode, packed, sides
from r3.tools.passes import pass_figures
from r3.tools.view.runs import config_of_run, dumped_steps
from r3.types import MicroBatch, Rollout

# Settings that matter to a policy that only scores.
_MATTERS = (
    "model.",
    "parallel.",
    "train.micro_batch_tokens",
    "train.logprob_chunk_tokens",
    "rollout.temperature",
)
FIGURES = ("k3", "f2", "abs_mean", "abs_p99", "abs_max", "ess", "agreement")


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Where the weights of the dump are: a Hugging Face folder, or a checkpoint loaded over one.

    Attributes:
        settings: what differs from the run's: an export has no adapters beside its weights, and a
            checkpoint has what they became.
    """

    folder: Path
    is_checkpoint: bool
    text: str
    settings: Mapping[str, Any]

    @classmethod
    def of(cls, folder: Path, policy_version: int, text: str, *, is_checkpoint: bool) -> Weights:
        """The weights of a policy version; 0 is the starting model, with the adapters it got."""
        settings: dict[str, Any] = {} if is_checkpoint else {"model.path": str(folder)}
        if policy_version:
            settings |= {"lora.start": ""}
        if policy_version and not is_checkpoint:
            settings |= {"lora.rank": 0, "model.base": "dtype"}
        return cls(folder=folder, is_checkpoint=is_checkpoint, text=text, settings=settings)


@dataclass(frozen=True, kw_only=True)
class Order:
    """A checked command line.

    Attributes:
        engine: a Hugging Face folder for an engine; empty: one with the policy's weights; None: no
            engine.
    """

    config: Config
    step: int
    rollouts: tuple[Rollout, ...]
    weights: Weights
    save_to: Path | None
    engine: str | None


def flag_values(argv: Sequence[str], problems: list[Problem]) -> dict[str, Any]:
    """Values of flags `--section.field value`, for a command whose other flags are its own.

    Args:
        problems: gets everything that is wrong with the words.
    """
    args = split_arguments(argv, problems)
    others = [*args.own, *sorted(args.switches)]
    problems += [
        Problem(f"--{name}", "", "is a flag of train.py", "leave it out") for name in others
    ]
    rule = "is neither a flag nor a flag's value"
    problems += [Problem("WORD", word, rule, "leave it out") for word in args.bases]
    values = read_values(args.flags, problems, args.warnings)
    for warning in args.warnings:
        say(f"warning: {warning}", error=True)
    return values


def parse(argv: Sequence[str] | None) -> Order:
    """Parse a command line.

    Raises:
        ConfigError: with all mistakes.
    """
    parser = argparse.ArgumentParser(
        prog="r3.rescore",
        description=(__doc__ or "").partition("\n")[0],
        epilog="Flags of train.py that scores depend on may follow: --parallel.*, --model.*, "
        "--train.micro_batch_tokens, --train.logprob_chunk_tokens, --rollout.temperature.",
        allow_abbrev=False,
    )
    parser.add_argument("run_dir", type=Path, help="folder of the run")
    parser.add_argument("--step", type=int, required=True, help="step whose rollouts were dumped")
    parser.add_argument(
        "--weights",
        type=Path,
        help="Hugging Face folder, or checkpoint of r3, of the dump's version",
    )
    parser.add_argument(
        "--save",
        action="store_true",
        help="write log-probabilities and live routes per token beside the dump, for r3.report",
    )
    parser.add_argument(
        "--engine",
        nargs="?",
        const="",
        metavar="DIR",
        help="decode the dump's tokens by the engine too, with the policy's weights or those of a "
        "Hugging Face folder, and show where engine and policy part",
    )
    args, flags = parser.parse_known_args(argv)
    run_dir = RunDir(args.run_dir)
    try:
        config = config_of_run(run_dir.path)
    except OSError:
        rule, fix = "there is no config.yaml to read", "give the folder of a run"
        raise ConfigError.of("RUN_DIR", str(args.run_dir), rule, fix) from None
    problems: list[Problem] = []
    # no reference policy and no teacher is scored
    unused = {"algo.kl_coef": 0.0, "algo.teacher": ()}
    values = flag_values(flags, problems)
    matters = _MATTERS if args.engine is None else (*_MATTERS, "engine.")
    problems += [
        Problem(name, value, "has no effect on scores", "leave it out")
        for name, value in values.items()
        if not name.startswith(matters)
    ]
    config = with_values(config, values | unused)
    if not run_dir.rollouts(args.step).exists():
        dumped = dumped_steps(args.run_dir, "train")
        others = f"; the run dumped steps {dumped}" if dumped else ", nor any other step"
        fix = "choose one of them, or run with --log.rollouts_every 1"
        problems.append(Problem("--step", args.step, f"is not dumped{others}", fix))
        raise ConfigError(problems)
    try:
        rollouts, _, _ = read_rollouts(run_dir.rollouts(args.step))
    except (OSError, LookupError, ValueError, SafetensorError) as error:
        rule = f"its dump cannot be read: {error}"
        problems.append(Problem("--step", args.step, rule, "choose another step"))
        raise ConfigError(problems) from None
    if config.rollout.restricts:
        if any(one.sampling_mask is None and one.loss_mask_T.any() for one in rollouts):
            rule = "was sampled with rollout.top_p or top_k and has no sampling masks"
            fix = "choose a step that was dumped by R3 of 2026-12 or later"
            problems.append(Problem("--step", args.step, rule, fix))
        if args.engine is not None:
            rule = "decodes over the whole vocabulary, and rollout.top_p or top_k sampled this dump"
            problems.append(Problem("--engine", args.engine or "true", rule, "leave it out"))
    weights = _weights(run_dir, config, args.step, rollouts, args.weights, problems)
    if weights:
        rule, of_weights = f"is not that of the weights in {weights.text}", weights.settings
        problems += [
            Problem(name, value, rule, "leave it out")
            for name, value in values.items()
            if value != weights.text and of_weights.get(name, value) != value
        ]
        config = with_values(config, of_weights)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    read = (*matters, "lora.")
    problems += [p for p in validate.problems(config, world_size) if p.place.startswith(read)]
    parallel = config.parallel
    whole = {"--save": args.save, "--engine": args.engine is not None}
    for flag in (flag for flag, is_given in whole.items() if is_given):
        if max(parallel.tp, parallel.pp, parallel.cp) > 1:
            rule = (
                f"needs whole sequences and all layers on a rank, and parallel.tp is {parallel.tp},"
                f" pp {parallel.pp}, cp {parallel.cp}"
            )
            fix = "give --parallel.tp 1 --parallel.pp 1 --parallel.cp 1"
            problems.append(Problem(flag, "true", rule, fix))
    if args.engine and not any(Path(args.engine).glob("*.safetensors")):
        rule = "is no folder with *.safetensors"
        problems.append(Problem("--engine", args.engine, rule, "such as RUN_DIR/hf/step_000010"))
    if problems or weights is None:
        raise ConfigError(problems)
    return Order(
        config=config,
        step=args.step,
        rollouts=tuple(rollouts),
        weights=weights,
        save_to=run_dir.scores(args.step) if args.save else None,
        engine=args.engine,
    )


def _weights(
    run_dir: RunDir,
    config: Config,
    step: int,
    rollouts: Sequence[Rollout],
    chosen: Path | None,
    problems: list[Problem],
) -> Weights | None:
    """The weights that sampled the dump; None, and a problem, if they do not exist any more."""
    policy_versions = sorted({each for rollout in rollouts for each in rollout.policy_versions})
    if len(policy_versions) > 1:
        rule = f"was sampled by several versions of the policy, {policy_versions}"
        problems.append(Problem("--step", step, rule, "choose a step of one version"))
        return None
    (policy_version,) = policy_versions
    if chosen is not None:
        return _chosen_weights(chosen, policy_version, problems)
    if policy_version == 0:
        folder, text = Path(folder_of(config.model.path)), config.model.path
        return Weights.of(folder, policy_version, text, is_checkpoint=False)
    exported, saved = run_dir.hf(policy_version), run_dir.checkpoint(policy_version)
    for folder, is_checkpoint in ((exported, False), (saved, True)):
        if folder.exists():
            return Weights.of(folder, policy_version, str(folder), is_checkpoint=is_checkpoint)
    kept = sorted(
        {0, *dict(step_folders(run_dir.checkpoints)), *dict(step_folders(run_dir.exports))}
    )
    dumped = [number + 1 for number in kept if run_dir.rollouts(number + 1).exists()]
    has = f"the run keeps the weights of versions {kept} only"
    rule = f"was sampled by version {policy_version}, and {has}"
    fix = "give them with --weights DIR"
    fix += f", or --step {' or '.join(map(str, dumped))}" if dumped else ""
    problems.append(Problem("--step", step, rule, fix))
    return None


def _chosen_weights(folder: Path, policy_version: int, problems: list[Problem]) -> Weights | None:
    is_export = any(folder.glob("*.safetensors"))
    facts = json.loads((folder / "r3.json").read_text()) if (folder / "r3.json").exists() else {}
    if not is_export and "optimizer_step" not in facts:
        rule = "is neither a folder of *.safetensors nor a checkpoint of r3"
        problems.append(Problem("--weights", str(folder), rule, "such as RUN_DIR/hf/step_000010"))
        return None
    if facts.get("step", policy_version) != policy_version:
        dump = f"the dump was sampled by version {policy_version}"
        rule = f"holds version {facts['step']}, and {dump}"
        fix = f"give weights after {policy_version} steps"
        problems.append(Problem("--weights", str(folder), rule, fix))
        return None
    trust = "" if "step" in facts else " (its version is unknown)"
    return Weights.of(folder, policy_version, f"{folder}{trust}", is_checkpoint=not is_export)


def save_scores(
    path: Path,
    rollouts: Sequence[Rollout],
    micro_batches: Sequence[MicroBatch],
    passes: Mapping[str, TokenScores],
    mesh: Mesh,
) -> None:
    """Write the scores of every token, laid out like the arrays of the dump. Collective; rank 0
    writes.

    The file has `logprobs_replay` and `logprobs_live` [tokens], 0 where nothing was sampled, and
    `routes_live` [rows, L, K], the experts that the routers choose without replay. Arguments as of
    `by_rollout`, with the passes "replay" and "live".
    """
    scores = by_rollout(rollouts, micro_batches, passes, mesh)
    if mesh.world.rank == 0:
        arrays = {name: np.concatenate([each[name] for each in scores]) for name in scores[0]}
        with replacing(path) as temporary:
            save_file(
                {name: np.ascontiguousarray(array) for name, array in arrays.items()}, temporary
            )


def table(rows: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Aligned lines, one per metric."""
    lines = [f"{'':10s}" + "".join(f"{label:>14s}" for label in rows)]
    for name in FIGURES:
        cells = [f"{row[name]:14.6e}" if name in row else f"{'-':>14s}" for row in rows.values()]
        lines.append(f"{name:10s}" + "".join(cells))
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    """Score, print the table, end the process."""
    with refusing():
        order = parse(argv)
    config, rollouts = order.config, order.rollouts
    device, mesh = init_rank(config)
    shape = config.model.shape()
    engine = None
    if order.engine is not None:
        engine = build_engine(config, device, shape, rollouts, order.engine)
    policy = Policy(config, device, mesh, shape)
    policy_version = rollouts[0].policy_version
    if order.weights.is_checkpoint:
        with refusing():
            require_whole(order.weights.folder, policy_version, mesh.world)
        checkpoint.load_checkpoint(order.weights.folder, policy, device, mesh, weights_only=True)
    captured = bool(shape.moe_layers) and rollouts[0].routed_experts.shape[1] > 0
    if engine:
        forced, different = decode(
            engine, policy, rollouts, device, mesh, from_disk=bool(order.engine)
        )
    tokens = config.train.micro_batch_tokens
    batch = packed(rollouts, policy, mesh, tokens=tokens, captured=captured)
    modes: dict[str, Mode] = {"replay": "replay", "live": "live"} if captured else {"live": "live"}
    if order.save_to and captured:
        modes["live"] = "record"  # routers choose as in "live", and what they choose is kept
    passes = {label: policy.score(batch, mode=mode) for label, mode in modes.items()}
    rows = {label: pass_figures(policy, scores) for label, scores in passes.items()}
    if order.save_to:
        save_scores(order.save_to, rollouts, batch, passes, mesh)
    parting: list[str] = []
    if engine:
        compared = sides(policy, rollouts, forced, mesh, tokens=tokens, different=different)
        exact = config.model.dtype == config.engine.dtype == "float32"
        findings = compared.findings(exact=exact) or ["engine and policy differ by rounding alone"]
        parting = ["", *compared.table(), *(f"finding     {each}" for each in findings)]
    if device.rank == 0:
        whole = config.rollout.samples_per_step
        part = f" of the step's {whole}" if len(rollouts) < whole else ""
        lines = [
            f"r3.rescore  step {order.step}: {len(rollouts)} rollouts{part}, "
            f"{batch[0].num_loss_tokens} sampled tokens, by version {policy_version}",
            f"weights     {order.weights.text}",
            f"layout      {device.world_size} rank(s): {config.parallel.in_words}; "
            f"policy {config.model.dtype}, engine was {config.engine.dtype}",
            *([] if captured else ["routes      none in the dump: scored live only"]),
            *table(rows),
            *([f"saved       {order.save_to}"] if order.save_to else []),
            *parting,
        ]
        say("\n".join(lines))
    leave(0)


if __name__ == "__main__":
    own_streams()
    main()
