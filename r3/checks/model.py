"""The checkpoint: config.json, tokenizer, weights that belong together, sizes that must fit it.

r3/runtime/mesh.py has the order of ranks.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from r3 import extras
from r3.config import Config
from r3.config.check import Findings
from r3.models.files import AbsentWeightsError, checkpoint_faults
from r3.models.hub import HubError, command, is_hub
from r3.models.shape import BYTES_OF, ModelShape, ShapeError
from r3.models.tensors import frozen_tensors
from r3.user_code.loading import path_fix

_SHOWN_TENSORS = 5  # of a checkpoint that does not fit
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_GIVE_FOLDER = "give the folder of a Hugging Face checkpoint"
SUPPORTED_FIX = (
    "use a checkpoint of a supported architecture, as its authors published it, or add the family: "
    "docs/adding-a-model-family.md"
)


def check_freeze(config: Config, found: Findings, shape: ModelShape | None) -> None:
    """`train.freeze` matches parameters of the model and leaves some to train."""
    if shape and config.train.freeze:
        try:
            frozen_tensors(shape, config.train.freeze)
        except ValueError as error:
            value, rule, fix = error.args
            found.add("train.freeze", rule, fix, value=value)


def check_model(config: Config, found: Findings) -> ModelShape | None:
    """Check `model.path`; return the shape of the model, or None if it cannot be read."""
    path = config.model.path
    if not path:
        found.add("model.path", "is empty", _GIVE_FOLDER)
        return None
    try:
        folder = local_folder(path)
    except HubError as error:
        found.add("model.path", error.rule, error.fix)
        return None
    if folder is None:
        folder = Path(path)
        fix = path_fix(path, _GIVE_FOLDER)
        if _HUB_ID.fullmatch(path) and not folder.parent.exists():
            fix = f"write hub:{path} for a model of the hub"
        found.add("model.path", "there is no such folder", fix)
        return None
    # A FIFO would block its reader forever.
    odd = [each.name for each in folder.iterdir() if not (each.is_file() or each.is_dir())]
    if odd := [name for name in odd if (folder / name).exists()]:
        rule = f"{sorted(odd)[0]} is a device or a FIFO, not a file"
        found.add("model.path", rule, "download or export the checkpoint again")
        return None
    if other := _what_instead(folder):
        found.add("model.path", *other)
        return None
    may_come = not is_hub(path)  # what the hub has is here
    if not (folder / "tokenizer.json").is_file():
        from r3.data.template import TIKTOKEN, TIKTOKEN_FIX  # it imports numpy

        fix = "save the model's fast tokenizer beside its weights"
        if (folder / TIKTOKEN).is_file():
            fix = TIKTOKEN_FIX
        found.add("model.path", "the folder has no tokenizer.json", fix, is_missing=may_come)
    if not has_chat_template(folder):
        fix = (
            "write chat_template.jinja into the folder; an instruction-tuned model of the same "
            "family has one"
        )
        found.add("model.path", "the tokenizer has no chat template", fix, is_missing=may_come)
    try:
        shape = ModelShape.read(folder)
    except OSError:
        found.add("model.path", "the folder has no config.json", _GIVE_FOLDER)
        return None
    except ShapeError as error:
        found.add("model.path", str(error), SUPPORTED_FIX)
        return None
    try:
        faults = checkpoint_faults(folder, shape)
    except ShapeError as error:
        add_fault("model.path", path, error, found)
        return shape
    if faults:
        shown = "; ".join(faults[:_SHOWN_TENSORS])
        more = f"; and {len(faults) - _SHOWN_TENSORS} more" if len(faults) > _SHOWN_TENSORS else ""
        found.add(
            "model.path",
            f"its tensors differ from what config.json implies: {shown}{more}",
            "weights and config.json must belong together: download or export them again",
        )
    return shape


def _what_instead(folder: Path) -> tuple[str, str] | None:
    """What a folder is that a run or PEFT has written, and what to give in its place."""
    if (folder / "config.json").is_file():
        return None
    if (folder / "adapter_config.json").is_file():
        return "is an adapter and has no model", "give its model, and the adapter as lora.start"
    if (folder / "r3.json").is_file() and (folder / "manifest.json").is_file():
        fix = "export it with python -m r3.export RUN --step N, and give the export"
        return "is a checkpoint of a run, and no Hugging Face model", fix
    if (folder / "run.json").is_file():
        fix = "give a model in its folder hf, or write one with python -m r3.export RUN"
        return "is the folder of a run, and no Hugging Face model", fix
    return None


def add_fault(name: str, path: str, error: ShapeError, found: Findings) -> None:
    """Add why the weights of a model cannot be read; a start downloads those of the hub."""
    rule, fix = str(error), "download or export the checkpoint again"
    absent = isinstance(error, AbsentWeightsError)
    if absent and is_hub(path):
        try:
            rule = extras.downloads().weights_note(path) or rule
            fix = f"a start downloads them; `hf download {command(path)}` does it before"
        except HubError as refused:
            rule, fix, absent = refused.rule, refused.fix, False
    found.add(name, rule, fix, value=path, is_missing=absent)


def local_folder(path: str) -> Path | None:
    """The folder of a model; None if there is none. Small files of the hub are downloaded.

    Raises:
        HubError: the hub does not give them.
    """
    if is_hub(path):
        return Path(extras.downloads().fetch_small(path))
    return Path(path) if is_folder(Path(path)) else None


def is_folder(path: Path) -> bool:
    """Whether there is such a folder; False for what cannot be a path at all."""
    try:
        return path.is_dir()
    except (OSError, ValueError):  # too long a name, a null byte
        return False


def has_chat_template(folder: Path) -> bool:
    """Whether the tokenizer of a folder has a chat template, in its own file or in its config."""
    if (folder / "chat_template.jinja").is_file():
        return True
    try:
        settings = json.loads((folder / "tokenizer_config.json").read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(settings, dict) and bool(settings.get("chat_template"))


def check_layout(
    config: Config, found: Findings, shape: ModelShape | None, world_size: int
) -> None:
    """Check the sizes of `parallel` against the ranks and, if its shape is known, the model."""
    parallel = config.parallel
    sizes = {
        name: found.values[f"parallel.{name}"] for name in ("tp", "pp", "cp", "ep", "engine_tp")
    }
    if not all(found.sound(f"parallel.{name}") for name in (*sizes, "etp", "vpp")):
        return
    tp, pp, cp, ep, engine_tp = sizes.values()
    etp = parallel.experts_tp

    def too_few(name: str, product: int, factors: str) -> None:
        rule = f"must divide the number of ranks, which is {world_size}"
        found.add(
            f"parallel.{name}",
            rule if product == sizes[name] else f"{factors} = {product} {rule}",
            f"start a multiple of {product} ranks (torchrun --nproc_per_node {product}; in a call "
            f"of r3.train, ranks={product}), or add --parallel.{name} 1",
        )

    if world_size % (tp * pp * cp):
        name = next(name for name in ("tp", "pp", "cp") if sizes[name] > 1)
        too_few(name, tp * pp * cp, "tp * pp * cp")
    elif ep > 1 and world_size % (etp * ep * pp):
        too_few("ep", etp * ep * pp, "etp * ep * pp")
    if world_size % engine_tp:
        too_few("engine_tp", engine_tp, "engine_tp")
    multiple = tp * cp * (2 if cp > 1 else 1)
    tokens = config.train.micro_batch_tokens
    if tp * cp > 1 and tokens % multiple:
        rule = f"must be a multiple of {multiple}: tp and cp shard it into equal parts"
        fix = f"set it to {tokens // multiple * multiple or multiple}"
        found.add("train.micro_batch_tokens", rule, fix)
    if pp == 1 and parallel.vpp > 1:
        rule = "interleaves the stages of a pipeline, and parallel.pp is 1"
        found.add("parallel.vpp", rule, "set it to 1, or parallel.pp to 2 or more")
    if shape is not None:
        _check_shape(config, found, shape)


def _check_shape(config: Config, found: Findings, shape: ModelShape) -> None:
    """Every size must divide the part of the model that it shards."""
    parallel = config.parallel
    etp = parallel.experts_tp

    def divides(name: str, size: int, whole: int, what: str) -> None:
        if found.sound(f"parallel.{name}") and whole % size:
            fits = [str(n) for n in range(1, min(whole, 1024) + 1) if whole % n == 0]
            fix = f"use one of {', '.join(fits)}"
            found.add(f"parallel.{name}", f"must divide the model's {what}", fix)

    tp = parallel.tp
    divides("tp", tp, shape.num_heads, f"{shape.num_heads} attention heads")
    divides("tp", tp, shape.num_kv_heads, f"{shape.num_kv_heads} key-value heads")
    divides("engine_tp", parallel.engine_tp, shape.num_heads, f"{shape.num_heads} attention heads")
    if len(shape.moe_layers) < shape.num_layers:
        divides("tp", tp, shape.ffn_size, f"dense layers' width of {shape.ffn_size}")
    if shape.shared_ffn_size:
        width = shape.shared_ffn_size
        divides("tp", tp, width, f"shared experts' width of {width}")
    for name in ("tp", "cp") if shape.delta else ():
        if found.values[f"parallel.{name}"] > 1:
            rule = "must be 1: gated delta layers are not divided over ranks"
            fix = "shard experts (ep) and layers (pp) instead"
            found.add(f"parallel.{name}", rule, fix)
    if shape.window and parallel.cp > 1:
        rule = "must be 1: windows of attention are not divided over ranks"
        found.add("parallel.cp", rule, "use smaller micro-batches, or tp")
    _check_pipeline(config, found, shape)
    if not shape.moe_layers:
        for name in ("ep", "etp"):
            if found.values[f"parallel.{name}"] > 1:
                rule = "the model is dense: it has no experts to shard"
                found.add(f"parallel.{name}", rule, "leave it out")
        return
    divides("ep", parallel.ep, shape.num_experts, f"{shape.num_experts} experts")
    divides("etp", etp, shape.moe_ffn_size, f"expert width of {shape.moe_ffn_size}")
    if shape.has_biases and etp > 1:
        rule = "experts with biases are whole on a rank"
        found.add("parallel.etp", rule, "use --parallel.etp 1", etp)
    if shape.has_biases and config.model.experts not in ("auto", "grouped"):
        rule = "only grouped experts have biases"
        found.add("model.experts", rule, "use --model.experts auto")
    if config.model.experts == "fused" and etp > 1:
        rule = "fused experts are whole on a rank, and parallel.etp divides them"
        found.add("model.experts", rule, "use --model.experts auto, or --parallel.etp 1")
    if config.model.experts == "sequential" and parallel.ep == 1 and etp != tp:
        rule = (
            "differs from tp while ep is 1: Megatron's sequential experts would never reduce their "
            "gradients"
        )
        found.add("parallel.etp", rule, "use --model.experts grouped, or leave etp out")


def _check_pipeline(config: Config, found: Findings, shape: ModelShape) -> None:
    """Every chunk of a pipeline has a layer, and together they have all layers."""
    parallel, layers = config.parallel, shape.num_layers
    count = parallel.pp * parallel.vpp
    given = parallel.pp_layers
    if given and (len(given) != count or sum(given) != layers or min(given) < 1):
        rule = (
            f"must be {count} positive numbers (pp * vpp) that add up to the model's {layers} "
            "layers"
        )
        found.add("parallel.pp_layers", rule, "leave it out for chunks of equal size")
    elif not given and count > layers:
        name = "parallel.vpp" if parallel.vpp > 1 else "parallel.pp"
        rule = f"pp * vpp = {count} chunks of a model of {layers} layers: each needs a layer"
        found.add(name, rule, f"use at most {layers} chunks")


def check_lengths(config: Config, found: Findings, shape: ModelShape | None) -> None:
    """Prompt and response must fit into the context, the engine, a micro-batch and the KV cache.

    Without data.max_prompt_tokens the longest prompt is unknown until the data set is built. One
    token stands for it here.
    """
    response, prompt = config.rollout.max_response_tokens, config.data.max_prompt_tokens
    if not found.sound("rollout.max_response_tokens", "data.max_prompt_tokens"):
        return
    if not config.uses_engine:  # rows have no response; those that are too long are named
        return
    needed = (prompt or 1) + response
    sequence = f"{prompt or 'at least 1'} prompt + {response} response tokens"
    if shape:
        context = shape.max_position_embeddings
        if response >= context:
            rule = f"does not fit the model's context of {shape.context}"
            fix = f"set it below {context}, with room for the prompts"
            found.add("rollout.max_response_tokens", rule, fix)
        elif needed > context:
            rule = f"{sequence} exceed the model's context of {shape.context}"
            fix = f"set it to at most {context - response}, or allow fewer response tokens"
            found.add("data.max_prompt_tokens", rule, fix)
        if config.engine.max_model_len > context:
            rule = f"exceeds the model's context of {shape.context}"
            fix = f"set it to at most {context}, or to 0 for what is needed"
            found.add("engine.max_model_len", rule, fix)
        conversation = shape.kv_values(needed) * BYTES_OF[config.engine.dtype]
        cache = config.engine.kv_cache_gib
        if found.sound("engine.kv_cache_gib") and cache and conversation > cache * 2**30:
            need = f"{conversation / 2**30:.3g} GiB"
            rule = f"cannot hold one conversation: {sequence} need {need}"
            fix = "set it to hold many conversations, or to 0 for what the device has free"
            found.add("engine.kv_cache_gib", rule, fix)
    if found.sound("engine.max_model_len") and 0 < config.engine.max_model_len < needed:
        fix = f"set it to at least {needed}, or to 0 for what is needed"
        found.add("engine.max_model_len", f"{sequence} do not fit", fix)
    if found.sound("train.micro_batch_tokens") and config.train.micro_batch_tokens < needed:
        rule = f"must hold the longest sequence: {sequence}"
        fix = f"set it to at least {needed}; several sequences pack better"
        found.add("train.micro_batch_tokens", rule, fix)
