"""Rules about the layout of the ranks and the lengths of sequences, given the shape of the model.

r3/runtime/mesh.py has the order of ranks.
"""

from __future__ import annotations

from r3.config.rules import Findings
from r3.config.settings import Config
from r3.models.shape import BYTES_OF, ModelShape


def check_layout(
    config: Config, errors: Findings, shape: ModelShape | None, world_size: int
) -> None:
    """Check the sizes of `parallel` against the ranks and, if its shape is known, the model."""
    parallel = config.parallel
    sizes = {
        name: errors.values[f"parallel.{name}"] for name in ("tp", "pp", "cp", "ep", "engine_tp")
    }
    if not all(errors.sound(f"parallel.{name}") for name in (*sizes, "etp", "vpp")):
        return
    tp, pp, cp, ep, engine_tp = sizes.values()
    etp = parallel.experts_tp

    def too_few(name: str, product: int, factors: str) -> None:
        rule = f"must divide the number of ranks, which is {world_size}"
        errors.add(
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
        errors.add("train.micro_batch_tokens", rule, fix)
    if pp == 1 and parallel.vpp > 1:
        rule = "interleaves the stages of a pipeline, and parallel.pp is 1"
        errors.add("parallel.vpp", rule, "set it to 1, or parallel.pp to 2 or more")
    if shape is not None:
        _check_shape(config, errors, shape)


def _check_shape(config: Config, errors: Findings, shape: ModelShape) -> None:
    """Every size must divide the part of the model that it shards."""
    parallel = config.parallel
    etp = parallel.experts_tp

    def divides(name: str, size: int, whole: int, what: str) -> None:
        if errors.sound(f"parallel.{name}") and whole % size:
            fits = [str(n) for n in range(1, min(whole, 1024) + 1) if whole % n == 0]
            fix = f"use one of {', '.join(fits)}"
            errors.add(f"parallel.{name}", f"must divide the model's {what}", fix)

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
        if errors.values[f"parallel.{name}"] > 1:
            rule = "must be 1: gated delta layers are not divided over ranks"
            fix = "shard experts (ep) and layers (pp) instead"
            errors.add(f"parallel.{name}", rule, fix)
    if shape.window and parallel.cp > 1:
        rule = "must be 1: windows of attention are not divided over ranks"
        errors.add("parallel.cp", rule, "use smaller micro-batches, or tp")
    _check_pipeline(config, errors, shape)
    if not shape.moe_layers:
        for name in ("ep", "etp"):
            if errors.values[f"parallel.{name}"] > 1:
                rule = "the model is dense: it has no experts to shard"
                errors.add(f"parallel.{name}", rule, "leave it out")
        return
    divides("ep", parallel.ep, shape.num_experts, f"{shape.num_experts} experts")
    divides("etp", etp, shape.moe_ffn_size, f"expert width of {shape.moe_ffn_size}")
    if shape.has_biases and etp > 1:
        rule = "experts with biases are whole on a rank"
        errors.add("parallel.etp", rule, "use --parallel.etp 1", etp)
    if shape.has_biases and config.model.experts not in ("auto", "grouped"):
        rule = "only grouped experts have biases"
        errors.add("model.experts", rule, "use --model.experts auto")
    if config.model.experts == "fused" and etp > 1:
        rule = "fused experts are whole on a rank, and parallel.etp divides them"
        errors.add("model.experts", rule, "use --model.experts auto, or --parallel.etp 1")
    if config.model.experts == "sequential" and parallel.ep == 1 and etp != tp:
        rule = (
            "differs from tp while ep is 1: Megatron's sequential experts would never reduce their "
            "gradients"
        )
        errors.add("parallel.etp", rule, "use --model.experts grouped, or leave etp out")


def _check_pipeline(config: Config, errors: Findings, shape: ModelShape) -> None:
    """Every chunk of a pipeline has a layer, and together they have all layers."""
    parallel, layers = config.parallel, shape.num_layers
    count = parallel.pp * parallel.vpp
    sizes = parallel.pp_layers
    if sizes and (len(sizes) != count or sum(sizes) != layers or min(sizes) < 1):
        rule = (
            f"must be {count} positive numbers (pp * vpp) that add up to the model's {layers} "
            "layers"
        )
        errors.add("parallel.pp_layers", rule, "leave it out for chunks of equal size")
    elif not sizes and count > layers:
        name = "parallel.vpp" if parallel.vpp > 1 else "parallel.pp"
        rule = f"pp * vpp = {count} chunks of a model of {layers} layers: each needs a layer"
        errors.add(name, rule, f"use at most {layers} chunks")


def check_lengths(config: Config, errors: Findings, shape: ModelShape | None) -> None:
    """Prompt and response must fit into the context, the engine, a micro-batch and the KV cache.

    Without data.max_prompt_tokens the longest prompt is unknown until the data set is built. One
    token stands for it here.
    """
    response, prompt = config.rollout.max_response_tokens, config.data.max_prompt_tokens
    if not errors.sound("rollout.max_response_tokens", "data.max_prompt_tokens"):
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
            errors.add("rollout.max_response_tokens", rule, fix)
        elif needed > context:
            rule = f"{sequence} exceed the model's context of {shape.context}"
            fix = f"set it to at most {context - response}, or allow fewer response tokens"
            errors.add("data.max_prompt_tokens", rule, fix)
        if config.engine.max_model_len > context:
            rule = f"exceeds the model's context of {shape.context}"
            fix = f"set it to at most {context}, or to 0 for what is needed"
            errors.add("engine.max_model_len", rule, fix)
        conversation = shape.kv_values(needed) * BYTES_OF[config.engine.dtype]
        cache = config.engine.kv_cache_gib
        if errors.sound("engine.kv_cache_gib") and cache and conversation > cache * 2**30:
            need = f"{conversation / 2**30:.3g} GiB"
            rule = f"cannot hold one conversation: {sequence} need {need}"
            fix = "set it to hold many conversations, or to 0 for what the device has free"
            errors.add("engine.kv_cache_gib", rule, fix)
    if errors.sound("engine.max_model_len") and 0 < config.engine.max_model_len < needed:
        fix = f"set it to at least {needed}, or to 0 for what is needed"
        errors.add("engine.max_model_len", f"{sequence} do not fit", fix)
    if errors.sound("train.micro_batch_tokens") and config.train.micro_batch_tokens < needed:
        rule = f"must hold the longest sequence: {sequence}"
        fix = f"set it to at least {needed}; several sequences pack better"
        errors.add("train.micro_batch_tokens", rule, fix)
