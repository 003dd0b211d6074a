"""`lora` and `model.base` fit the model and the layout."""

from __future__ import annotations

from pathlib import Path

from r3.config import Config
from r3.config.rules import Findings
from r3.lora.plan import adapted_tensors, adapter_fault, other_base, ranks_of, untrained_chunk
from r3.models.shape import ModelShape


def check_lora(config: Config, errors: Findings, shape: ModelShape | None) -> list[str]:
    """`lora` finds matrices of the model, in every chunk of the pipeline, and its layout works.

    Returns:
        Warnings: `lora.start` names another base, or `train.freeze` names no matrix of an adapter.
    """
    lora, parallel = config.lora, config.parallel
    if shape is None or not errors.sound("lora.rank", "train.freeze", "parallel.pp_layers"):
        return []
    try:
        adapted = ranks_of(config, shape)
    except ValueError as error:
        errors.add("lora.targets", *error.args)
        return []
    if not adapted:
        if config.quantises_base:
            rule = "needs frozen weights, and without lora.rank all are trained"
            errors.add("model.base", rule, "set lora.rank, or leave it out")
        return []
    if lora.start and not (Path(lora.start) / "adapter_config.json").is_file():
        fix = "give a folder that PEFT or `python -m r3.export RUN --adapter` wrote"
        errors.add("lora.start", "is no folder of a PEFT adapter: no adapter_config.json", fix)
    elif lora.start and (fault := adapter_fault(lora.start, shape, adapted)):
        fix = "use the settings that the adapter has, or merge it and give the merged model"
        errors.add("lora.start", fault, fix)
    if "experts" in lora.targets and config.model.experts == "sequential":
        rule = "experts have adapters, which run with all experts of a rank as one tensor"
        errors.add("model.experts", rule, "use --model.experts auto")
    etp = parallel.experts_tp
    if "experts" in lora.targets and etp not in (1, parallel.tp):
        rule = "experts have adapters, and it is neither 1 nor parallel.tp"
        errors.add("parallel.etp", rule, f"use 1 or {parallel.tp}")
    if errors.sound("parallel.pp", "parallel.vpp"):
        number = untrained_chunk(shape, parallel, adapted)
        if number is not None:
            rule = f"give chunk {number} of the pipeline nothing to train"
            errors.add("lora.targets", rule, "add attention, or use fewer stages")
    notes, freeze = list[str](), config.train.freeze
    if freeze and adapted == adapted_tensors(shape, lora):
        notes.append(
            f"train.freeze = {freeze!r} has no effect: with lora.rank, only matrices of "
            "lora.targets are trained, and it names none of them"
        )
    if lora.start and errors.sound("lora.start") and (base := other_base(lora.start, shape.source)):
        notes.append(
            f"lora.start = {lora.start!r} was trained on {base!r}, and model.path is "
            f"{config.model.path!r}. On other weights, the adapter is another model"
        )
    return notes
