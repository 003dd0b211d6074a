"""Teachers of on-policy distillation: checkpoints that fit the policy's layout and context."""

from __future__ import annotations

from functools import partial
from typing import Any

from r3.checks.model_files import add_fault, local_folder
from r3.config import Config, Problem
from r3.config.layout import check_layout
from r3.config.rules import Findings
from r3.data.template import tokenizer_of
from r3.errors import ConfigError
from r3.models.files import AbsentWeightsError, checkpoint_faults
from r3.models.shape import ModelShape, ShapeError


def check_teacher(
    config: Config, errors: Findings, shape: ModelShape | None, world_size: int
) -> None:
    """Check `algo.teacher`. Tokenizers are compared when the run reads its data."""
    paths, objective = config.algo.teacher, config.train.objective
    if objective == "distill" and not paths:
        fix = "give --algo.teacher FOLDER, or use --train.objective rl"
        errors.add("algo.teacher", "is empty, and train.objective is distill", fix, value="")
    if not paths:
        return
    if objective == "sft":
        rule = "scores sampled responses, and train.objective sft samples none"
        errors.add("algo.teacher", rule, "leave it out, or use --train.objective distill")
    if len(paths) not in (1, len(config.data.path)):
        rule = f"has {len(paths)} values for the {len(config.data.path)} paths of data.path"
        errors.add("algo.teacher", rule, "give one per path, or one for all")
    for path in dict.fromkeys(paths):
        if rule := _fault(config, path, shape, world_size, errors):
            fix = "give the folder of a Hugging Face checkpoint that fits"
            errors.add("algo.teacher", rule, fix, value=path)


def _fault(
    config: Config, path: str, shape: ModelShape | None, world_size: int, errors: Findings
) -> str:
    """Why a checkpoint cannot be the teacher; "" if it can."""
    faults: list[str] = []
    try:
        if local_folder(path) is None:
            return "there is no such folder"
        teacher = ModelShape.read(path)
        faults = checkpoint_faults(path, teacher)
    except OSError:
        return "the folder has no config.json"
    except AbsentWeightsError as error:
        add_fault("algo.teacher", path, error, errors)
    except ShapeError as error:
        return str(error)
    if faults:
        return f"its tensors differ from what config.json implies: {faults[0]}"
    if shape is None:
        return ""
    if teacher.max_position_embeddings < (
        longest := config.longest_sequence(shape.max_position_embeddings)
    ):
        context = teacher.max_position_embeddings
        return (
            f"its context of {context} tokens is shorter than the {longest} that a sample may have "
            "(data.max_prompt_tokens and rollout.max_response_tokens)"
        )
    own = config.of_teacher(is_dense=not teacher.moe_layers)
    layout, known = Findings(own), {problem.place for problem in errors.problems}
    check_layout(own, layout, teacher, world_size)
    return "; ".join(
        f"{problem.place} = {problem.value} {problem.rule}"
        for problem in layout.problems
        if problem.place not in known
    )


def token_problems(config: Config, tokenizer: Any) -> list[Problem]:
    """Teachers whose tokens are not the policy's: they would score other texts."""
    problems = []
    own = tokenizer.get_vocab()
    for path in dict.fromkeys(config.algo.teacher):
        theirs = tokenizer_of(ModelShape.read(path), partial(ConfigError.of, "algo.teacher"))
        vocabulary = theirs.get_vocab()
        differing = [token for token, at in own.items() if vocabulary.get(token) != at]
        if differing:
            token = differing[0]
            rule = (
                f"its tokenizer differs from the policy's in {len(differing)} of {len(own)} tokens,"
                f" such as {token!r}: {own[token]} here, {vocabulary.get(token, 'none')} there"
            )
            fix = "use a teacher of the same family; a token must be the same text in both"
            problems.append(Problem("algo.teacher", path, rule, fix))
    return problems
