"""Reward functions, and the servers and models that they need."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import regex

from r3.checks.findings import Findings
from r3.checks.model import add_fault, has_chat_template, local_folder
from r3.checks.sources import FunctionNode, find_function, signature_of
from r3.config import Config, EnvConfig, RewardConfig
from r3.config.arguments import Taker, assigned
from r3.config.names import names_of
from r3.models.hub import HubError
from r3.models.shape import ShapeError, checkpoint_tensors
from r3.user_code.loading import file_fault, path_fix

BUILTIN_REWARDS = (
    *("gsm8k", "exact", "gym", "row", "math", "http", "model", "self_judge", "env", "none"),
)
"""Those of r3.rewards, which imports too much to be asked here, and those with a class."""


def check_rewards(config: Config, found: Findings, world_size: int) -> None:
    """Check every function of `reward.function` and what http and model need."""
    reward = config.reward
    if not reward.function:
        found.add("reward.function", "is empty", "use gsm8k, or path/to/my_reward.py:function")
    if len(set(reward.function)) < len(reward.function):
        fix = "name it once, with a larger weight"
        found.add("reward.function", "names a function twice", fix)
    if reward.weights and len(reward.weights) != len(reward.function):
        rule = (
            f"has {len(reward.weights)} values for the {len(reward.function)} functions of "
            "reward.function"
        )
        found.add("reward.weights", rule, "give one per function, or none for equal weights")
    if reward.weights and not any(reward.weights):
        found.add("reward.weights", "are all 0, so every reward is 0", "give a weight other than 0")
    if "none" in reward.function and len(reward.function) > 1:
        fix = "use env for the environment's reward in a sum"
        found.add("reward.function", "has none beside other functions", fix)
    if reward.correct and reward.correct not in (names := names_of(reward.function)):
        rule = "is no function of reward.function by its name in metrics"
        found.add("reward.correct", rule, f"use one of {', '.join(names)}")
    if not config.eval.only:
        check_environment_rewards(reward.function, config.env, found, "reward.function")
    for function in dict.fromkeys(reward.function):
        node = check_reward_function(function, found, "reward.function")
        if node and config.rollout.step_token_budget and is_of_group(node):
            rule = (
                "scores all samples of a prompt at once, and rollout.step_token_budget = "
                f"{config.rollout.step_token_budget} suspends some of them"
            )
            fix = "score one response, def f(response, prompt), or set the budget to 0"
            found.add("reward.function", rule, fix, value=function)
    if found.sound("reward.args"):
        _check_arguments(config, found)
    used = config.reward_functions
    if "row" in used:
        _check_row_functions(reward, found)
    if "http" in used:
        _check_server(config.reward, found)
    if {"http", "self_judge"}.intersection(used):
        _check_judge(config, found)
    if "model" in used:
        _check_reward_model(config, found, world_size)


def _check_arguments(config: Config, found: Findings) -> None:
    """Each of `reward.args` fits a function of the user's files."""
    takers = []
    for name, spec in config.named_rewards:
        if ":" in spec:
            node = find_function(spec, "reward.function", Findings(config))  # reported already
            signature = signature_of(node) if node else None
            takers.append(Taker(name=name, signature=signature, passed=2, optional=("messages",)))
    for item, rule, fix in assigned(config.reward.args, takers)[1]:
        found.add("reward.args", rule, fix, value=item)


def _check_row_functions(reward: RewardConfig, found: Findings) -> None:
    """Functions that rows name, each by a name of its own."""
    names = [spec.rpartition(":")[2] for spec in reward.row_functions]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        rule = f"rows cannot tell two functions named {twice[0]} apart"
        found.add("reward.row_functions", rule, "rename one of them")
    if "self_judge" in reward.row_functions and "self_judge" in reward.function:
        rule = "names self_judge, and so does reward.function: a response would be judged twice"
        found.add("reward.row_functions", rule, "name it in one of them")
    for spec in reward.row_functions:
        if spec in ("row", "env", "none"):
            rule = "is no function that scores a response"
            found.add("reward.row_functions", rule, "leave it out", value=spec)
        else:
            check_reward_function(spec, found, "reward.row_functions")


def check_environment_rewards(
    functions: Sequence[str], env: EnvConfig, found: Findings, field: str
) -> None:
    """`env` and `none` need an environment that gives rewards."""
    if {"env", "none"}.intersection(functions) and not env.may_reward:
        fix = "use a reward function, or an environment that gives rewards"
        found.add(field, f"the environment {env.name} gives no reward", fix, value=functions)


def is_of_group(node: FunctionNode) -> bool:
    """Whether a reward function's first parameter says that it scores a whole group."""
    arguments = [*node.args.posonlyargs, *node.args.args]
    return bool(arguments) and arguments[0].arg == "responses"


def check_reward_function(reward: str, found: Findings, name: str) -> FunctionNode | None:
    """A built-in function, or `file.py:function` of a file that defines it; its definition."""
    if reward in BUILTIN_REWARDS:
        return None
    path, colon, _ = reward.rpartition(":")
    if not colon or not path.endswith(".py"):
        fix = f"use one of {', '.join(BUILTIN_REWARDS)}, or path/to/file.py:function"
        rule = "is neither a built-in reward nor file.py:function"
        found.add(name, rule, fix, value=reward)
        return None
    return find_function(reward, name, found)


def _check_server(reward: RewardConfig, found: Findings) -> None:
    if not re.match(r"https?://[^/]", reward.url):
        rule = "must be the address of a server, which the reward http asks"
        found.add("reward.url", rule, "write it as http://host:8000/v1")
    if not reward.model:
        fix = "give the model's name on the server; GET URL/models lists them"
        found.add("reward.model", "is empty", fix)


def _check_judge(config: Config, found: Findings) -> None:
    """The prompt of an LLM judge, and what finds the score in its reply."""
    reward, template = config.reward, "{response} {answer}"  # as the built-in one
    if reward.prompt_file and (fault := file_fault(reward.prompt_file)):
        found.add("reward.prompt_file", fault, path_fix(reward.prompt_file))
    elif reward.prompt_file:
        try:
            template = Path(reward.prompt_file).read_text(encoding="utf-8")
        except OSError as error:
            rule = f"cannot be read ({error.strerror})"
            found.add("reward.prompt_file", rule, "give a text file")
        except UnicodeDecodeError as error:
            found.add("reward.prompt_file", f"is not UTF-8 ({error})", "give a text file")
    if "{response}" not in template:
        fix = "put it where the response belongs"
        found.add("reward.prompt_file", "has no {response} in it", fix)
    known = "question", "answer", "response"
    for name in dict.fromkeys(re.findall(r"\{\{ *(\w+) *\}\}", template)):
        if name in known:
            rule = f"has {name} in two pairs of braces, and the judge would be shown one of them"
            found.add(
                "reward.prompt_file", rule, f"write {{{name}}}; other braces stay as they are"
            )
    # Not behind a letter, a brace or ^, as in LaTeX.
    for name in dict.fromkeys(re.findall(r"(?<![\w{}^])\{([A-Za-z_]\w*)\}(?!\})", template)):
        if name not in known:
            rule = f"has {{{name}}}, which the judge would be shown as it is"
            fix = f"use {', '.join(f'{{{each}}}' for each in known)}, or another form of brackets"
            found.add("reward.prompt_file", rule, fix)
    if "{answer}" in template and not config.data.answer_key and not config.eval.only:
        which = "it" if reward.prompt_file else "the built-in prompt of a judge"
        rule = f"{which} shows the reference answer, and data.answer_key = '' leaves it out"
        fix = "give a prompt without {answer}, or name the column with --data.answer_key"
        found.add("reward.prompt_file", rule, fix)
    if reward.pattern:
        example = r"write it as Score: *([\d.]+)"
        try:
            if regex.compile(reward.pattern).groups != 1:
                found.add("reward.pattern", "must have one group, around the score", example)
        except regex.error as error:
            found.add("reward.pattern", f"is not a regular expression ({error})", example)


def _check_reward_model(config: Config, found: Findings, world_size: int) -> None:
    """A sequence classifier with one label, a tokenizer and a chat template."""
    name, tp = config.reward.model_path, config.parallel.engine_tp
    if found.sound("parallel.engine_tp"):
        scoring = tuple(range(0, world_size, tp))
        if config.reward.model_ranks and tuple(sorted(config.reward.model_ranks)) != scoring:
            rule = (
                "the first rank of each engine scores the responses of its engine, which are "
                f"ranks {scoring}"
            )
            found.add("reward.model_ranks", rule, "leave it empty")

    def refuse(
        rule: str, fix: str = "give a sequence-classification checkpoint with one label"
    ) -> None:
        found.add("reward.model_path", rule, fix)

    try:
        path = local_folder(name) if name else None
    except HubError as error:
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
        add_fault("reward.model_path", name, error, found)
    if not (path / "tokenizer.json").is_file() or not has_chat_template(path):
        refuse(
            "has no tokenizer.json with a chat template",
            "save its fast tokenizer beside it, and write chat_template.jinja",
        )
