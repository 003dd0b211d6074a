"""Everything that is wrong with a config, at once and before any device is touched; imports nothing heavy.

It reads the checkpoint's config.json and file headers, the data files and the reward's source, and changes nothing.
Prompts are not tokenised here: whether one is too long is found when the data set is built.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import get_args

from r3.config import SETTINGS, Config, EnvConfig, EvalSet, Problem, RewardConfig, flatten
from r3.data.sources import Columns, Row, columns_of, is_folder, is_near, read_rows
from r3.models.shape import ModelShape, ShapeError, checkpoint_tensors

# Those of r3.rewards, which imports too much to be asked here, and the ones that are more than a function.
BUILTIN_REWARDS = ("gsm8k", "exact", "gym", "row", "math", "http", "model", "env", "none")
_UNREWARDED = ("single_turn", "calculator")  # built-in environments that give no reward
BYTES_OF = {"float32": 4, "bfloat16": 2}

_CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # of vLLM 0.30's attention on CPU
_SHOWN_TENSORS = 5  # of a checkpoint that does not fit
_SOURCES = "give a JSONL or .parquet file, FOLDER[:SPLIT], hub:OWNER/NAME or gym:TASK"
_SHOWN_ROWS = 5  # of a bad data file; the rest is counted
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")

_REWARD_FIELDS = {  # that one kind of judge alone has use for
    "http": [
        "url",
        "model",
        "api_key_env",
        "prompt_file",
        "pattern",
        "max_tokens",
        "max_connections",
        "backoff_s",
    ],
    "model": [
        "model_path",
        "model_dtype",
        "model_ranks",
        "model_batch",
        "model_wait_s",
        "model_tokens",
    ],
}


@dataclass(frozen=True)
class Report:
    """What was found. `shape` is None when the model could not be read."""

    problems: tuple[Problem, ...]
    warnings: tuple[str, ...]
    shape: ModelShape | None


def problems(config: Config, world_size: int) -> list[Problem]:
    """Everything that keeps this config from running on so many ranks."""
    return list(examine(config, world_size).problems)


def warnings(config: Config, world_size: int) -> list[str]:
    """Settings that would be ignored, and results that would not mean what they seem to."""
    return list(examine(config, world_size).warnings)


def examine(
    config: Config,
    world_size: int,
    known_shape: ModelShape | None = None,
    given: Collection[str] | None = None,
) -> Report:
    """Problems and warnings in one reading of the files.

    Args:
        known_shape: what to check against when there is no folder at `model.path`: for a dry run of a model that
            was not downloaded. Its absence is a problem all the same.
        given: fields that the user named, as against those of a preset; None = all of them.
    """
    found = _Findings(config)
    shape = _check_model(config, found) or known_shape
    _check_ranges(found)
    _check_batch(config, found, world_size)
    _check_algorithm(config, found)
    _check_layout(config, found, shape, world_size)
    _check_lengths(config, found, shape)
    _check_environment(config, found)
    _check_judge(config, found, world_size)
    sets = _check_eval(config, found, shape)
    train, heldout = _check_data(config, found, sets)
    if config.log.dir and Path(config.log.dir).exists() and not Path(config.log.dir).is_dir():
        found.add("log.dir", "is not a folder", "name a folder, a new one or an earlier run's")
    notes = _ignored_settings(config, shape, given) + _overlap(train, heldout)
    return Report(tuple(found.problems), tuple(notes), shape)


def cpu_engine_problems(config: Config, shape: ModelShape) -> list[Problem]:
    """What vLLM 0.30's CPU kernels cannot run or take new weights into. `problems` does not know the device; who does asks."""
    sizes: list[tuple[str, int, bool, str]] = []
    if shape.latent:
        cached = shape.latent.kv_rank + shape.latent.rope_size
        sizes.append(("kv_lora_rank + qk_rope_head_dim", cached, cached == 576, "is 512 + 64"))
    else:
        known = ", ".join(map(str, _CPU_HEADS))
        sizes.append(
            ("head_dim", shape.head_dim, shape.head_dim in _CPU_HEADS, f"is one of {known}")
        )
    if shape.moe_layers:
        width, tp = shape.moe_ffn_size, config.parallel.engine_tp
        rule = "is a multiple of 32" + (
            f" on each of the {tp} ranks of an engine" if tp > 1 else ""
        )
        sizes.append(("the experts' width", width, width % (32 * tp) == 0, rule))
        sizes.append(
            ("hidden_size", shape.hidden_size, shape.hidden_size % 32 == 0, "is a multiple of 32")
        )
    return [
        Problem(
            "model.path",
            config.model.path,
            f"{name} is {size}, and the engine runs on CPU only where it {rule}",
            "run on a GPU, or give a model of such a size",
        )
        for name, size, fits, rule in sizes
        if not fits
    ]


def allocator_problems(environment: Mapping[str, str]) -> list[Problem]:
    """Settings of torch's CUDA allocator under which weights cannot be shared between ranks. Asked where there is a GPU.

    Memory of expandable segments has no IPC handle. vLLM's sleep mode refuses them too, but looks at the first name alone.
    """
    return [
        Problem(
            name,
            environment[name],
            "weights are handed to other ranks as memory handles, which expandable segments do not have",
            f"leave expandable_segments out of {name}",
        )
        for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
        if re.search(r"expandable_segments\s*:\s*true", environment.get(name, ""), re.IGNORECASE)
    ]


class _Findings:
    """Problems so far. A rule that reckons with several fields asks first whether each is `sound` by itself."""

    def __init__(self, config: Config) -> None:
        self.values = flatten(config)
        self.problems: list[Problem] = []

    def add(self, name: str, rule: str, fix: str, value: object = None) -> None:
        self.problems.append(
            Problem(name, self.values[name] if value is None else value, rule, fix)
        )

    def sound(self, *names: str) -> bool:
        return not any(problem.field in names for problem in self.problems)


def _check_model(config: Config, found: _Findings) -> ModelShape | None:
    path = config.model.path
    folder = Path(path)
    if not path:
        found.add("model.path", "is empty", "give the folder of a Hugging Face checkpoint")
        return None
    if not folder.is_dir():
        if _HUB_ID.fullmatch(path) and not folder.parent.exists():
            local = f"models/{folder.name}"
            fix = f"download it (hf download {path} --local-dir {local}) and give --model.path {local}"
        else:
            fix = "give the folder of a Hugging Face checkpoint"
        found.add("model.path", "there is no such folder", fix)
        return None
    if not (folder / "tokenizer.json").is_file():
        found.add(
            "model.path",
            "the folder has no tokenizer.json",
            "save the model's fast tokenizer beside its weights",
        )
    if not _has_chat_template(folder):
        found.add(
            "model.path",
            "the tokenizer has no chat template, so there is no way to put a question",
            "write chat_template.jinja into the folder (an instruction-tuned sibling of the model has one)",
        )
    try:
        shape = ModelShape.read(folder)
    except OSError:
        found.add(
            "model.path",
            "the folder has no config.json",
            "give the folder of a Hugging Face checkpoint",
        )
        return None
    except ShapeError as error:
        found.add(
            "model.path",
            str(error),
            "give a checkpoint of a known architecture, as its authors published it",
        )
        return None
    try:
        tensors = checkpoint_tensors(folder)
    except ShapeError as error:
        found.add("model.path", str(error), "download or export the checkpoint again")
        return shape
    if faults := shape.faults(tensors):
        shown = "; ".join(faults[:_SHOWN_TENSORS])
        more = f"; and {len(faults) - _SHOWN_TENSORS} more" if len(faults) > _SHOWN_TENSORS else ""
        found.add(
            "model.path",
            f"its tensors are not those that config.json implies: {shown}{more}",
            "weights and config.json must belong together: download or export them again",
        )
    return shape


def _has_chat_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file():
        return True
    try:
        settings = json.loads((folder / "tokenizer_config.json").read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(settings, dict) and bool(settings.get("chat_template"))


def _check_ranges(found: _Findings) -> None:
    for name, setting in SETTINGS.items():
        if found.sound(name) and (problem := setting.problem(found.values[name])):
            found.problems.append(problem)


def _check_batch(config: Config, found: _Findings, world_size: int) -> None:
    rollout, train = config.rollout, config.train
    if rollout.group_size == 1 and config.algo.advantage != "reinforce_pp":
        found.add(
            "rollout.group_size",
            f"algo.advantage {config.algo.advantage} compares answers of a group: alone, an answer's advantage is 0",
            "at least 2; 8 and 16 are common; or --algo.advantage reinforce_pp",
        )
    engines = (
        max(1, world_size // config.parallel.engine_tp) if found.sound("parallel.engine_tp") else 1
    )
    what = f"the {world_size} ranks" if engines == world_size else f"the {engines} engines"
    divisors = {what: engines}
    if found.sound("train.updates_per_step"):
        divisors[f"train.updates_per_step = {train.updates_per_step}"] = train.updates_per_step
    if found.sound("rollout.prompts_per_step"):
        for what, divisor in divisors.items():
            if rollout.prompts_per_step % divisor:
                above = math.ceil(rollout.prompts_per_step / divisor) * divisor
                fix = " or ".join(str(count) for count in (above - divisor, above) if count)
                found.add(
                    "rollout.prompts_per_step", f"must be a multiple of {what}", f"{fix} would do"
                )
    if found.sound("train.lr", "train.min_lr") and train.min_lr > train.lr:
        found.add(
            "train.min_lr", f"must not exceed train.lr = {train.lr}", "0, or a tenth of train.lr"
        )


def _check_algorithm(config: Config, found: _Findings) -> None:
    """Combinations that would count a correction twice, or run one algorithm under the name of another."""
    algo = config.algo
    if algo.loss == "minirl" and algo.correction != "none":
        found.add(
            "algo.correction",
            "counts the mismatch twice: minirl's own weight is pi / mu",
            "none; algo.minirl_cap bounds that weight",
        )
    if algo.loss == "pg" and algo.correction == "bypass":
        found.add(
            "algo.correction", "has no ratio to change: pg has none", "none, or a loss with a ratio"
        )
    if algo.loss == "cispo" and found.sound("algo.clip_low") and algo.clip_low < 1:
        found.add(
            "algo.clip_low",
            "is PPO's: cispo bounds a weight, and from above only",
            "--algo.clip_low 1, and choose algo.clip_high; 3 to 5 are common",
        )
    if algo.dynamic_sampling > 0 and algo.advantage == "reinforce_pp":
        found.add(
            "algo.dynamic_sampling",
            "leaves out groups whose rewards are all equal, and reinforce_pp learns from those too: it has no groups",
            "0, or another algo.advantage",
        )
    if (
        algo.dynamic_sampling > 0
        and config.rollout.step_token_budget
        and config.rollout.max_staleness > 0
    ):
        found.add(
            "rollout.max_staleness",
            "keeps groups for later steps, and algo.dynamic_sampling leaves out groups of this one by their rewards",
            "0, which drops interrupted conversations, or --algo.dynamic_sampling 0",
        )
    length = config.rollout.max_response_tokens
    if (
        found.sound("algo.overlong_buffer", "rollout.max_response_tokens")
        and algo.overlong_buffer > length
    ):
        found.add(
            "algo.overlong_buffer",
            f"exceeds rollout.max_response_tokens = {length}",
            "a fifth of it is DAPO's, 0 = off",
        )


def _check_layout(
    config: Config, found: _Findings, shape: ModelShape | None, world_size: int
) -> None:
    """Sizes must divide the ranks, and what they cut; see r3/runtime/mesh.py for the order of ranks."""
    parallel = config.parallel
    sizes = {
        name: found.values[f"parallel.{name}"] for name in ("tp", "pp", "cp", "ep", "engine_tp")
    }
    if not all(found.sound(f"parallel.{name}") for name in (*sizes, "etp", "vpp")):
        return
    tp, pp, cp, ep, engine_tp = sizes.values()
    etp = parallel.etp or tp

    def divides(name: str, whole: int, what: str, size: int | None = None) -> None:
        if found.sound(f"parallel.{name}") and whole % (size or sizes[name]):
            fits = [str(n) for n in range(1, min(whole, 1024) + 1) if whole % n == 0]
            found.add(f"parallel.{name}", f"must divide {what}", f"one of {', '.join(fits)}")

    def too_few(name: str, product: int, factors: str) -> None:
        rule = f"must divide the number of ranks, which is {world_size}"
        found.add(
            f"parallel.{name}",
            rule if product == sizes[name] else f"{factors} = {product} {rule}",
            f"start a multiple of {product} ranks (torchrun --nproc_per_node {product}), or give --parallel.{name} 1",
        )

    if world_size % (tp * pp * cp):
        too_few(
            next(name for name in ("tp", "pp", "cp") if sizes[name] > 1),
            tp * pp * cp,
            "tp * pp * cp",
        )
    elif ep > 1 and world_size % (etp * ep * pp):
        too_few("ep", etp * ep * pp, "etp * ep * pp")
    if world_size % engine_tp:
        too_few("engine_tp", engine_tp, "engine_tp")
    if tp * cp > 1 and config.train.micro_batch_tokens % (tp * cp * (2 if cp > 1 else 1)):
        multiple = tp * cp * (2 if cp > 1 else 1)
        found.add(
            "train.micro_batch_tokens",
            f"must be a multiple of {multiple}: tp and cp cut it into equal parts",
            "round it",
        )
    if pp == 1 and parallel.vpp > 1:
        found.add(
            "parallel.vpp",
            "interleaves the stages of a pipeline, and parallel.pp is 1",
            "1, or a pipeline",
        )
    if shape is None:
        return
    divides("tp", shape.num_heads, f"the model's {shape.num_heads} attention heads")
    divides("tp", shape.num_kv_heads, f"the model's {shape.num_kv_heads} key-value heads")
    divides("engine_tp", shape.num_heads, f"the model's {shape.num_heads} attention heads")
    if len(shape.moe_layers) < shape.num_layers:
        divides("tp", shape.ffn_size, f"the dense layers' width of {shape.ffn_size}")
    if shape.shared_ffn_size:
        divides(
            "tp", shape.shared_ffn_size, f"the shared experts' width of {shape.shared_ffn_size}"
        )
    _check_pieces(config, found, shape)
    if not shape.moe_layers:
        for name in ("ep", "etp"):
            if found.values[f"parallel.{name}"] > 1:
                found.add(
                    f"parallel.{name}",
                    "the model is dense: it has no experts to lay out",
                    "leave it out",
                )
        return
    divides("ep", shape.num_experts, f"the model's {shape.num_experts} experts")
    divides("etp", shape.moe_ffn_size, f"the experts' width of {shape.moe_ffn_size}", etp)
    if config.model.experts == "sequential" and ep == 1 and etp != tp:
        found.add(
            "parallel.etp",
            "differs from tp with ep 1: Megatron's sequential experts would never reduce their gradients",
            "give --model.experts grouped, or leave etp out",
        )


def _check_pieces(config: Config, found: _Findings, shape: ModelShape) -> None:
    """Every piece of a pipeline has a layer, and together they have them all."""
    parallel, layers = config.parallel, shape.num_layers
    count = parallel.pp * parallel.vpp
    given = parallel.pp_layers
    if given and (len(given) != count or sum(given) != layers or min(given) < 1):
        found.add(
            "parallel.pp_layers",
            f"must be {count} positive numbers (pp * vpp) that add up to the model's {layers} layers",
            "leave it out for pieces as equal as can be",
        )
    elif not given and count > layers:
        found.add(
            "parallel.vpp" if parallel.vpp > 1 else "parallel.pp",
            f"pp * vpp = {count} pieces of a model of {layers} layers: each needs one",
            f"at most {layers} pieces",
        )


def _check_lengths(config: Config, found: _Findings, shape: ModelShape | None) -> None:
    """Prompt and response must fit into the context, the engine, a micro-batch and the KV cache.

    Without data.max_prompt_tokens the longest prompt is not known before the data set is built: one token stands
    for it.
    """
    response, prompt = config.rollout.max_response_tokens, config.data.max_prompt_tokens
    if not found.sound("rollout.max_response_tokens", "data.max_prompt_tokens"):
        return
    needed = (prompt or 1) + response
    sequence = f"{prompt or 'at least 1'} prompt + {response} response tokens"
    if shape:
        context = shape.max_position_embeddings
        if response >= context:
            fix = f"below {context}, with room for the prompts"
            found.add(
                "rollout.max_response_tokens",
                f"does not fit the model's context of {context} tokens",
                fix,
            )
        elif needed > context:
            rule = f"{sequence} exceed the model's context of {context}"
            found.add(
                "data.max_prompt_tokens",
                rule,
                f"at most {context - response}, or a shorter response",
            )
        if config.engine.max_model_len > context:
            fix = f"at most {context}, or 0 for what is needed"
            found.add(
                "engine.max_model_len", f"exceeds the model's context of {context} tokens", fix
            )
        token_bytes = shape.kv_values_per_token * BYTES_OF[config.engine.dtype]
        cache = config.engine.kv_cache_gib
        if found.sound("engine.kv_cache_gib") and cache and needed * token_bytes > cache * 2**30:
            found.add(
                "engine.kv_cache_gib",
                f"cannot hold one conversation: {sequence} need {needed * token_bytes / 2**30:.3g} GiB",
                "enough for many conversations at once, or 0 for what the device leaves",
            )
    if found.sound("engine.max_model_len") and 0 < config.engine.max_model_len < needed:
        found.add(
            "engine.max_model_len",
            f"{sequence} do not fit",
            f"at least {needed}, or 0 for what is needed",
        )
    if found.sound("train.micro_batch_tokens") and config.train.micro_batch_tokens < needed:
        rule = f"must hold the longest sequence: {sequence}"
        found.add(
            "train.micro_batch_tokens", rule, f"at least {needed}; several sequences pack better"
        )


def _check_environment(config: Config, found: _Findings) -> None:
    """A user's file is read, not run; `r3.envs.find` loads it before the first step and checks what it really defines."""
    env = config.env
    if env.max_turn_tokens > config.rollout.max_response_tokens and found.sound(
        "env.max_turn_tokens"
    ):
        found.add(
            "env.max_turn_tokens",
            f"exceeds rollout.max_response_tokens = {config.rollout.max_response_tokens}, which bounds all turns together",
            "0 for whatever is left, or a larger rollout.max_response_tokens",
        )
    if env.path and env.name != EnvConfig().name:
        found.add(
            "env.name",
            "is set beside env.path: a conversation has one environment",
            "give one of the two",
        )
    if env.path:
        _check_environment_file(env.path, "env.path", found)


def _check_environment_file(spec: str, field: str, found: _Findings) -> None:
    path, colon, name = spec.rpartition(":")
    if not colon or not path.endswith(".py") or not name.isidentifier():
        found.add(field, "is not file.py:Class", "path/to/my_env.py:MyEnv", spec)
        return
    if (tree := _parse(path, field, found)) is None:
        return
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    if name not in classes:
        fix = f"it defines {', '.join(classes) or 'none'}; write the class at the top level of the file"
        found.add(field, f"{path} defines no class {name!r}", fix, spec)
        return
    methods = {
        node.name: node
        for node in classes[name].body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    for method, argument in (("reset", "prompt"), ("step", "message")):
        fix = f"write `def {method}(self, {argument})` in it"
        if method in methods:
            arguments = methods[method].args
            positional = [*arguments.posonlyargs, *arguments.args]
            needed = len(positional) - len(arguments.defaults)
            if needed > 2 or (len(positional) < 2 and arguments.vararg is None):
                found.add(
                    field,
                    f"{name}.{method} does not take self and one argument, the {argument}",
                    fix,
                    spec,
                )
        elif not classes[name].bases:
            found.add(field, f"class {name} has no method {method}", fix, spec)


def _parse(path: str, field: str, found: _Findings) -> ast.Module | None:
    try:
        return ast.parse(Path(path).read_bytes(), filename=path)
    except OSError as error:
        found.add(
            field, f"{path} cannot be read ({error.strerror})", "give the path of a Python file"
        )
    except (SyntaxError, ValueError) as error:
        found.add(field, f"{path} is not valid Python ({error})", "mend the file")
    return None


def _check_judge(config: Config, found: _Findings, world_size: int) -> None:
    """The functions of the reward, and what the servers and models that they name need."""
    reward = config.reward
    if not reward.function:
        found.add("reward.function", "is empty", "gsm8k, or path/to/my_reward.py:function")
    if len(set(reward.function)) < len(reward.function):
        found.add("reward.function", "names a function twice", "once, with a larger weight")
    if reward.weights and len(reward.weights) != len(reward.function):
        rule = f"has {len(reward.weights)} values for the {len(reward.function)} functions of reward.function"
        found.add("reward.weights", rule, "one a function, or none: all count alike")
    if reward.weights and not any(reward.weights):
        found.add("reward.weights", "are all 0, so every reward is 0", "a weight other than 0")
    if "none" in reward.function and len(reward.function) > 1:
        rule = "has none beside other functions"
        found.add("reward.function", rule, "use env for the environment's reward in a sum")
    if not config.eval.only:
        _check_environment_rewards(reward.function, config.env, found, "reward.function")
    for function in dict.fromkeys(reward.function):
        _check_reward(function, found, "reward.function")
    used = {*reward.function, *config.eval.function}
    if "http" in used:
        _check_server(config.reward, found)
    if "model" in used:
        _check_reward_model(config, found, world_size)


def _check_environment_rewards(
    functions: Sequence[str], env: EnvConfig, found: _Findings, field: str
) -> None:
    """`env` and `none` need an environment that gives rewards."""
    if {"env", "none"}.intersection(functions) and not env.path and env.name in _UNREWARDED:
        fix = "use a reward function, or an environment that gives rewards"
        found.add(field, f"the environment {env.name} gives no reward", fix, value=functions)


def _check_server(reward: RewardConfig, found: _Findings) -> None:
    if not re.match(r"https?://[^/]", reward.url):
        found.add(
            "reward.url",
            "must be the address of a server for the judge http",
            "http://host:8000/v1 or the like",
        )
    if not reward.model:
        found.add(
            "reward.model", "is empty", "the model's name on the server (GET URL/models lists them)"
        )
    if reward.prompt_file:
        try:
            if "{response}" not in Path(reward.prompt_file).read_text(encoding="utf-8"):
                found.add(
                    "reward.prompt_file",
                    "has no {response} in it",
                    "put it where the answer belongs",
                )
        except OSError as error:
            found.add(
                "reward.prompt_file", f"cannot be read ({error.strerror})", "give a text file"
            )
        except UnicodeDecodeError as error:
            found.add("reward.prompt_file", f"is not UTF-8 ({error})", "give a text file")
    if reward.pattern:
        try:
            if re.compile(reward.pattern).groups != 1:
                found.add(
                    "reward.pattern", "must have one group, around the score", r"Score: *([\d.]+)"
                )
        except re.error as error:
            found.add("reward.pattern", f"is no regular expression ({error})", r"Score: *([\d.]+)")


def _check_reward_model(config: Config, found: _Findings, world_size: int) -> None:
    """A folder with a classifier of one label, its weights, tokenizer and chat template; a copy on every rank that judges."""
    path, tp = Path(config.reward.model_path), config.parallel.engine_tp
    if found.sound("parallel.engine_tp"):
        judging = tuple(range(0, world_size, tp))
        if config.reward.model_ranks and tuple(sorted(config.reward.model_ranks)) != judging:
            found.add(
                "reward.model_ranks",
                f"each engine's first rank scores the answers of its engine, and those are ranks {judging}",
                "leave it empty",
            )

    def refuse(
        rule: str, fix: str = "give a sequence-classification checkpoint with one label"
    ) -> None:
        found.add("reward.model_path", rule, fix)

    if not config.reward.model_path or not path.is_dir():
        refuse("is no folder, and the judge model needs one")
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
        checkpoint_tensors(path)
    except ShapeError as error:
        refuse(str(error), "download or export the checkpoint again")
    if not (path / "tokenizer.json").is_file() or not _has_chat_template(path):
        refuse(
            "has no tokenizer.json with a chat template, so there is no way to put a conversation",
            "save its fast tokenizer beside it, and write chat_template.jinja",
        )


def _check_reward(reward: str, found: _Findings, name: str) -> None:
    if reward in BUILTIN_REWARDS:
        return
    path, colon, function = reward.rpartition(":")
    if not colon or not path.endswith(".py"):
        fix = f"one of {', '.join(BUILTIN_REWARDS)}, or path/to/file.py:function"
        found.add(name, "is neither a built-in reward nor file.py:function", fix, value=reward)
        return
    if (tree := _parse(path, name, found)) is None:
        return
    defined = [
        node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    if function not in defined:
        fix = f"it defines {', '.join(defined) or 'none'}; write the function at the top level of the file"
        found.add(name, f"{path} defines no function {function!r}", fix, value=reward)


def _check_eval(config: Config, found: _Findings, shape: ModelShape | None) -> tuple[EvalSet, ...]:
    """The held-out sets, when their lists fit together: one value a set, or one for all."""
    settings = config.eval
    count = len(settings.path)
    if not count:
        if settings.only:
            found.add(
                "eval.only",
                "eval.path is empty, so there is nothing to evaluate",
                "give --eval.path",
            )
        return ()
    for entry in fields(EvalSet):
        values = found.values[f"eval.{entry.name}"]
        may_be = {1, count} | ({0} if entry.name in ("env", "function") else set())
        if len(values) not in may_be:
            rule = f"has {len(values)} values for the {count} paths of eval.path"
            found.add(f"eval.{entry.name}", rule, "one a set, or one for all")
    if found.sound("eval.name") and len(set(settings.name)) != count:
        rule = f"must name each of the {count} sets differently"
        found.add("eval.name", rule, f"--eval.name {' '.join(f'set{i + 1}' for i in range(count))}")
    if not found.sound(*(f"eval.{entry.name}" for entry in fields(EvalSet))):
        return ()
    if any(each.samples > 1 and each.temperature == 0 for each in settings.sets):
        fix = "1, or give --eval.temperature 1.0"
        found.add("eval.samples", "several answers at eval.temperature 0 are all the same one", fix)
    most = max(each.samples for each in settings.sets)
    if found.sound("eval.pass_at") and (beyond := [k for k in settings.pass_at if k > most]):
        found.add(
            "eval.pass_at",
            f"pass@{beyond[0]} needs as many samples, and eval.samples is {most}",
            f"at most {most}",
        )
    longest = max(each.max_tokens for each in settings.sets)
    if shape and longest >= shape.max_position_embeddings:
        rule = f"does not fit the model's context of {shape.max_position_embeddings} tokens"
        found.add("eval.max_tokens", rule, "smaller, with room for the questions")
    for env in filter(None, dict.fromkeys(settings.env)):
        if ":" in env:
            _check_environment_file(env, "eval.env", found)
        elif env not in (names := get_args(SETTINGS["env.name"].kind)):
            fix = f"one of {', '.join(names)}, or path/to/my_env.py:MyEnv"
            found.add("eval.env", "names no environment", fix, value=env)
    if not found.sound("eval.env"):
        return ()
    for function in filter(None, dict.fromkeys(settings.function)):
        _check_reward(function, found, "eval.function")
    for each in settings.sets:
        if not each.function and not each.env:
            continue
        functions = (each.function,) if each.function else config.reward.function
        _check_environment_rewards(functions, each.environment(config.env), found, "eval.function")
    return settings.sets


def _check_data(
    config: Config, found: _Findings, sets: Sequence[EvalSet]
) -> tuple[list[Row], list[Row]]:
    """Rows of training and of evaluation. What must be downloaded or made first is read when the run starts."""
    data, columns = config.data, columns_of(config)
    training = () if config.eval.only else data.path
    if not data.path and not config.eval.only:
        found.add("data.path", "is empty", _SOURCES, value="")
    if data.weights and len(data.weights) != len(data.path):
        rule = f"has {len(data.weights)} values for the {len(data.path)} paths of data.path"
        found.add("data.weights", rule, "one a path, or none: rows of all paths are then one pool")
    train = [
        row
        for path in dict.fromkeys(training)
        for row in _check_rows(path, columns, found, "data.path")
    ]
    # Sets may differ in sampling alone: a path is read once for each way of judging it.
    held_out = dict.fromkeys((each.path, columns_of(config, each)) for each in sets)
    if not sets:  # their lists do not fit together, and what the paths hold is said all the same
        held_out = dict.fromkeys((path, columns) for path in config.eval.path)
    heldout = [row for path, how in held_out for row in _check_rows(path, how, found, "eval.path")]
    if (
        training
        and found.sound("data.path", "rollout.prompts_per_step")
        and all(map(is_near, training))
    ):
        if len(train) < config.rollout.prompts_per_step:
            found.add(
                "data.path",
                f"has {len(train)} rows, and a step takes {config.rollout.prompts_per_step} different prompts",
                "more rows, or a smaller --rollout.prompts_per_step",
            )
    everything = config.reward.function
    judged = [("reward.function", everything, training)]
    judged += [
        ("eval.function", (each.function,) if each.function else everything, (each.path,))
        for each in sets
    ]
    for name, functions, paths in judged:
        others = [path for path in paths if not path.startswith("gym:")]
        if "gym" in functions and others:
            rule = f"gym scores the tasks of reasoning-gym alone, and {others[0]} is none"
            found.add(name, rule, "another function, or paths like gym:chain_sum", value="gym")
    return train, heldout


def _check_rows(path: str, columns: Columns, found: _Findings, name: str) -> list[Row]:
    if not is_near(path):
        return []
    if not Path(path).exists() and not is_folder(path):
        found.add(name, "there is no such file", _SOURCES, value=path)
        return []
    rows, bad = read_rows(path, columns)
    for problem in bad[:_SHOWN_ROWS]:
        found.add(name, problem.rule, problem.fix, value=problem.where)
    if len(bad) > _SHOWN_ROWS:
        rest = f"{len(bad) - _SHOWN_ROWS} more faults, {len(bad)} in all"
        found.add(name, rest, "mend those as well", value=path)
    if not rows and not bad:
        found.add(
            name,
            "has no rows",
            "give one that has, or for eval.path '' for no evaluation",
            value=path,
        )
    return rows


def _ignored_settings(
    config: Config, shape: ModelShape | None, given: Collection[str] | None
) -> list[str]:
    values, defaults = flatten(config), flatten(Config())
    notes: list[str] = []

    def ignored(because: str, *names: str) -> None:
        notes.extend(
            f"{name} = {values[name]!r} has no effect: {because}"
            for name in names
            if values[name] != defaults[name]
        )

    algo, train, rollout = config.algo, config.train, config.rollout
    if shape and not shape.moe_layers:
        if config.replay.mode != "off":
            notes.append(
                f"replay.mode = {config.replay.mode!r} has no effect: the model is dense, it routes nothing"
            )
        ignored("the model is dense", "model.experts", "model.router_logits")
        if config.model.recompute == "moe":
            notes.append(
                "model.recompute = 'moe' has no effect: the model is dense; full recomputes every layer"
            )
    if config.engine.dtype == "float32":
        ignored("the engine's router logits are float32", "model.router_logits")
    if config.model.dtype == config.engine.dtype == "float32":
        ignored("policy and engine are float32 throughout", "model.fp32_head")
    if config.env.name == "single_turn" and not config.env.path and not any(config.eval.env):
        turns = (
            "env.max_turns",
            "env.max_turn_tokens",
            "env.workers",
            "env.timeout_s",
            "env.retries",
        )
        ignored("env.name is single_turn", *turns, "env.on_error", "env.unfinished_reward")
    elif (
        not any(":" in spec for spec in (config.env.path, *config.eval.env))
        and not config.env.workers
    ):
        ignored("the environment is a built-in one, which runs at once", "env.timeout_s")
    notes += _ignored_rewards(config, ignored)
    if config.replay.mode == "off":
        ignored(
            "replay.mode is off", "replay.on_missing", "replay.reference", "replay.plausibility"
        )
    if config.replay.mode == "r2":
        ignored("replay.mode r2 captures nothing in the engine", "replay.on_missing")
    if config.replay.mode != "r3" or config.replay.on_missing == "error":
        ignored(
            "it is asked with replay.mode r3 and replay.on_missing live only", "replay.min_coverage"
        )
    if config.replay.mode != "r3":
        ignored(f"replay.mode is {config.replay.mode}", "replay.shadow_every")
    if config.model.dtype == "float32" and config.engine.dtype == "bfloat16":
        notes.append(
            "model.dtype is float32 and engine.dtype bfloat16: the engine rounds every weight, which dominates the mismatch "
            "and which replay cannot remove; take one dtype for both"
        )
    if algo.kl_coef == 0:
        ignored("algo.kl_coef is 0", "algo.kl_estimator", "algo.kl_in", "replay.reference")
    notes += _algorithm_notes(config)
    if algo.loss == "pg":
        ignored("algo.loss is pg, which has no ratio", "algo.clip_low", "algo.clip_high")
    if algo.loss != "ppo_clip":
        ignored(f"algo.loss is {algo.loss}, and the bound ppo_clip's", "algo.clip_dual")
    if algo.loss != "minirl":
        ignored(f"algo.loss is {algo.loss}", "algo.minirl_cap")
    if algo.correction in ("none", "bypass", "token_tis", "sequence_tis"):
        ignored(f"algo.correction {algo.correction} has no lower bound", "algo.correction_low")
    if algo.correction in ("none", "bypass"):
        ignored(f"algo.correction is {algo.correction}", "algo.correction_high")
    if algo.overlong_buffer == 0:
        ignored("algo.overlong_buffer is 0", "algo.overlong_penalty")
    if train.lr_schedule == "constant":
        ignored("train.lr_schedule is constant", "train.min_lr")
    if train.warmup_updates >= train.steps * train.updates_per_step:
        total = train.steps * train.updates_per_step
        notes.append(
            f"train.lr is never reached: train.warmup_updates = {train.warmup_updates} of {total} updates"
        )
    if config.engine.kv_cache_gib:
        ignored("engine.kv_cache_gib sets the size", "engine.memory_fraction")
    if (
        not config.eval.path
    ):  # a preset's own settings are of no concern when the user switches evaluation off
        names = [
            name for name in values if name.startswith("eval.") and (given is None or name in given)
        ]
        ignored("eval.path is empty, nothing is evaluated", *names)
    if not rollout.step_token_budget:
        ignored("rollout.step_token_budget is 0", "rollout.max_staleness")
    elif rollout.max_staleness and algo.correction == "none" and algo.loss != "minirl":
        notes.append(
            "rollout.max_staleness lets older policies sample, and nothing weighs their tokens by pi_old / mu: give "
            "--algo.correction token_tis, another one, or --algo.loss minirl"
        )
    if rollout.top_p < 1 or rollout.top_k > 0:
        notes.append(
            "rollout.top_p and top_k cut the engine's distribution but not the policy's: mismatch metrics and "
            "importance weights include that difference"
        )
    return list(dict.fromkeys(notes))


def _ignored_rewards(config: Config, ignored: Callable[..., None]) -> list[str]:
    reward = config.reward
    used = {*reward.function, *filter(None, config.eval.function)}
    for kind, fields_of in _REWARD_FIELDS.items():
        if kind not in used:
            names = [f"reward.{name}" for name in fields_of]
            ignored(f"no reward function is {kind}", *names)
    if used <= {"gsm8k", "exact", "gym", "row", "env", "none"}:
        quick = "built-in functions run at once"
        ignored(quick, "reward.timeout_s", "reward.workers", "reward.retries")
    if len(reward.function) > 1 and any(not each.function for each in config.eval.sets):
        return [
            "eval.function is not set: evaluation takes the weighted sum of reward.function, and an answer is right when that "
            "is at least 1"
        ]
    return []


def _algorithm_notes(config: Config) -> list[str]:
    """Settings that work and are seldom meant."""
    algo, notes = config.algo, []
    if algo.loss == "gspo" and max(algo.clip_low, algo.clip_high) > 0.05:
        notes.append(
            f"algo.clip_low = {algo.clip_low} and clip_high = {algo.clip_high} never clip gspo: ratios of whole answers stay "
            "near 1; the paper has 3e-4 and 4e-4"
        )
    if algo.loss == "gspo" and algo.aggregation != "sequence":
        notes.append(
            f"algo.aggregation = {algo.aggregation!r} weighs gspo's answers by length; the paper has sequence"
        )
    if algo.loss == "cispo" and algo.clip_high < 1:
        notes.append(
            f"algo.clip_high = {algo.clip_high} is PPO's: it would bound the weights of cispo at {1 + algo.clip_high}; 3 to 5 "
            "are common"
        )
    if algo.loss == "pg" and config.train.updates_per_step > 1:
        notes.append(
            "algo.loss = 'pg' has no ratio: all updates of a step but the first are biased"
        )
    if algo.kl_coef and algo.kl_in == "loss" and algo.kl_estimator == "k1":
        notes.append(
            "algo.kl_estimator = 'k1' in the loss has no gradient on average: k2 or k3 pull back, k1 only reports"
        )
    if algo.kl_coef and algo.kl_in == "reward" and algo.kl_estimator != "k1":
        notes.append(
            f"algo.kl_estimator = {algo.kl_estimator!r} in the reward is a biased penalty: k1 is the unbiased one"
        )
    return notes


def _overlap(train: list[Row], heldout: list[Row]) -> list[str]:
    row_of = {json.dumps(row.messages, default=str): row for row in train}
    shared = [
        (row, row_of[text])
        for row in heldout
        if (text := json.dumps(row.messages, default=str)) in row_of
    ]
    if not shared:
        return []
    here, there = shared[0]
    count = f"{len(shared)} of {len(heldout)} questions of eval.path are trained on as well"
    same = f"{here.source}:{here.number} is {there.source}:{there.number}"
    return [f"{count}, so eval accuracy flatters: {same}"]
