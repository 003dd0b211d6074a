"""What judges need: a server, a prompt and a pattern, the checkpoint of a reward model."""

from __future__ import annotations

import json
import re
from pathlib import Path

import regex

from r3.checks.model_files import add_fault, has_chat_template, local_folder
from r3.config import Config, RewardConfig
from r3.config.rules import Findings
from r3.models.files import checkpoint_tensors
from r3.models.shape import ShapeError
from r3.user_code.loading import file_fault, path_fix


def check_judges(config: Config, errors: Findings, world_size: int) -> None:
    """Check the settings of the judges that are used."""
    used = config.reward_functions
    if "http" in used:
        _check_server(config.reward, errors)
    if {"http", "self_judge"}.intersection(used):
        _check_judge(config, errors)
    if "model" in used:
        _check_reward_model(config, errors, world_size)


def _check_server(reward: RewardConfig, errors: Findings) -> None:
    if not re.match(r"https?://[^/]", reward.url):
        rule = "must be the address of a server, which the reward http asks"
        errors.add("reward.url", rule, "write it as http://host:8000/v1")
    if not reward.model:
        fix = "give the model's name on the server; GET URL/models lists them"
        errors.add("reward.model", "is empty", fix)


def _check_judge(config: Config, errors: Findings) -> None:
    """The prompt of an LLM judge, and what finds the score in its reply."""
    reward, template = config.reward, "{response} {answer}"  # as the built-in one
    if reward.prompt_file and (fault := file_fault(reward.prompt_file)):
        errors.add("reward.prompt_file", fault, path_fix(reward.prompt_file))
    elif reward.prompt_file:
        try:
            template = Path(reward.prompt_file).read_text(encoding="utf-8")
        except OSError as error:
            rule = f"cannot be read ({error.strerror})"
            errors.add("reward.prompt_file", rule, "give a text file")
        except UnicodeDecodeError as error:
            errors.add("reward.prompt_file", f"is not UTF-8 ({error})", "give a text file")
    if "{response}" not in template:
        fix = "put it where the response belongs"
        errors.add("reward.prompt_file", "has no {response} in it", fix)
    known = "question", "answer", "response"
    for name in dict.fromkeys(re.findall(r"\{\{ *(\w+) *\}\}", template)):
        if name in known:
            rule = f"has {name} in two pairs of braces, and the judge would be shown one of them"
            errors.add(
                "reward.prompt_file", rule, f"write {{{name}}}; other braces stay as they are"
            )
    # Not behind a letter, a brace or ^, as in LaTeX.
    for name in dict.fromkeys(re.findall(r"(?<![\w{}^])\{([A-Za-z_]\w*)\}(?!\})", template)):
        if name not in known:
            rule = f"has {{{name}}}, which the judge would be shown as it is"
            fix = f"use {', '.join(f'{{{name}}}' for name in known)}, or another form of brackets"
            errors.add("reward.prompt_file", rule, fix)
    if "{answer}" in template and not config.data.answer_key and config.trains:
        which = "it" if reward.prompt_file else "the built-in prompt of a judge"
        rule = f"{which} shows the reference answer, and data.answer_key = '' leaves it out"
        fix = "give a prompt without {answer}, or name the column with --data.answer_key"
        errors.add("reward.prompt_file", rule, fix)
    if reward.pattern:
        example = r"write it as Score: *([\d.]+)"
        try:
            if regex.compile(reward.pattern).groups != 1:
                errors.add("reward.pattern", "must have one group, around the score", example)
        except regex.error as error:
            errors.add("reward.pattern", f"is not a regular expression ({error})", example)


def _check_reward_model(config: Config, errors: Findings, world_size: int) -> None:
    """A sequence classifier with one label, a tokenizer and a chat template."""
    name, tp = config.reward.model_path, config.parallel.engine_tp
    if errors.sound("parallel.engine_tp"):
        scoring = tuple(range(0, world_size, tp))
        if config.reward.model_ranks and tuple(sorted(config.reward.model_ranks)) != scoring:
            rule = (
                "the first rank of each engine scores the responses of its engine, which are "
                f"ranks {scoring}"
            )
            errors.add("reward.model_ranks", rule, "leave it empty")

    def refuse(
        rule: str, fix: str = "give a sequence-classification checkpoint with one label"
    ) -> None:
        errors.add("reward.model_path", rule, fix)

    try:
        path = local_folder(name) if name else None
    except ShapeError as error:
        refuse(error.rule, error.fix)
        return
    if path is None:
        refuse("is not a folder, and the reward model needs one")
        return
    try:
        facts = json.loads((path / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        refuse(f"its config.json cannot be read ({error})")
        return
    kinds = facts.get("architectures") or ["nothing"]
    labels = len(facts["id2label"]) if facts.get("id2label") else facts.get("num_labels", 2)
    if not kinds[0].endswith("ForSequenceClassification"):
        refuse(
            f"is a checkpoint of {kinds[0]}, not of a sequence classifier: its head would be random"
        )
    elif labels != 1:
        refuse(f"has {labels} labels, and a reward is one number")
    try:
        checkpoint_tensors(path, only_weights=False)
    except ShapeError as error:
        add_fault("reward.model_path", name, error, errors)
    if not (path / "tokenizer.json").is_file() or not has_chat_template(path):
        refuse(
            "has no tokenizer.json with a chat template",
            "save its fast tokenizer beside it, and write chat_template.jinja",
        )
