"""Build Megatron's GPTModel, its data-parallel wrapper and its optimizer from a `ModelShape`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import Router

from r3 import extras
from r3.config import Config
from r3.layers.attention import CausalAttention
from r3.layers.decoder import decoder_spec
from r3.layers.grouped_experts import GroupedExperts
from r3.layers.kernels import use_product
from r3.layers.norms import AllHeadsNorm, inverse_frequencies
from r3.models.hf_config import yarn_mscale
from r3.models.shape import ModelShape
from r3.models.tensors import conversion_rules
from r3.policy.logprobs import Head, ScoringGPT
from r3.policy.memory import chained
from r3.runtime.device import Device
from r3.runtime.mesh import Mesh, cuda_type_names, install_megatron

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {
        "recompute_granularity": "selective",
        "recompute_modules": ["core_attn", "layernorm"],
    },
    "moe": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}


def transformer_config(config: Config, shape: ModelShape) -> TransformerConfig:
    """Return Megatron's config of this model and layout."""
    kind = MLATransformerConfig if shape.latent else TransformerConfig
    return kind(**megatron_settings(config, shape))


def megatron_settings(config: Config, shape: ModelShape) -> dict[str, Any]:
    """Return the keyword arguments of Megatron's TransformerConfig.

    Fixed on purpose: no dropout; router scores, softmax and combine in float32; dropless all-to-all
    dispatch; no load-balancing loss (it would use the router's own top-k, not the replayed one); no
    fused router (it returns before it asks for replayed routes). `calculate_per_token_loss` leaves
    normalisation to R3: data-parallel ranks sum, and the loss already has the global denominator.
    """
    return _layout_settings(config, shape) | _model_settings(shape)


def _layout_settings(config: Config, shape: ModelShape) -> dict[str, Any]:
    """Precision, parallelism and kernels: what does not depend on the family."""
    parallel, dtype = config.parallel, DTYPES[config.model.dtype]
    sizes = parallel.megatron
    has_stages = sizes["pipeline_model_parallel_size"] > 1
    settings: dict[str, Any] = dict(
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        pipeline_dtype=dtype,
        # Packed micro-batches differ in length; `KnownShapes` has the shapes.
        variable_seq_lengths=has_stages,
        # For dense models too: Megatron's default, allgather, refuses variable lengths.
        moe_token_dispatcher_type="alltoall",
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        calculate_per_token_loss=True,
        use_cpu_initialization=True,
        # Every tensor is loaded from the checkpoint.
        perform_initialization=False,
        **sizes,
        sequence_parallel=sizes["tensor_model_parallel_size"] > 1,
        **_RECOMPUTE[config.model.recompute],
    )
    if has_stages:
        pieces = [["decoder"] * len(layers) for layers in parallel.pieces(shape.num_layers)]
        pieces[0].insert(0, "embedding")
        pieces[-1].append("loss")
        settings["pipeline_model_parallel_layout"] = pieces
        # By default Megatron synchronises the device after every exchange, against a race in the
        # batched sends of old torch versions. The exchange is waited for in either case.
        settings["batch_p2p_sync"] = False
    if parallel.vpp > 1:
        # With two stages, next and previous are one rank: batched sends to it pass each other and
        # give wrong results without an error. Megatron-LM's command line sets this; the library
        # does not.
        settings |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    return settings


def _model_settings(shape: ModelShape) -> dict[str, Any]:
    """Sizes and architecture of the model."""
    settings: dict[str, Any] = dict(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        layernorm_epsilon=shape.norm_eps,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=shape.has_biases,
        add_qkv_bias=shape.qkv_bias,
        softmax_type="learnable" if shape.sinks else "vanilla",
        qk_layernorm=shape.qk_norm != "none",
        attention_output_gate=shape.output_gate,
    )
    first, *others = conversion_rules(shape).layers
    if any(layer != first for layer in others):
        # A checkpoint keeps the tensors of each layer apart. By default it stacks those of all.
        settings["hetereogenous_dist_checkpoint"] = True
    if gate := shape.clamped_gate:
        settings |= dict(
            activation_func=partial(_scaled_silu, slope=gate.slope),
            activation_func_clamp_value=gate.limit,
            glu_linear_offset=gate.offset,
        )
    if latent := shape.latent:
        settings |= dict(
            multi_latent_attention=True,
            qk_layernorm=True,
            q_lora_rank=latent.query_rank or None,
            kv_lora_rank=latent.kv_rank,
            qk_head_dim=latent.nope_size,
            qk_pos_emb_head_dim=latent.rope_size,
            v_head_dim=latent.value_size,
            kv_channels=latent.value_size,
            rope_type="rope",
            rotary_base=shape.rope_theta,
            rotary_percent=1.0,
        )
    if not shape.moe_layers:
        return settings
    settings |= dict(
        num_moe_experts=shape.num_experts,
        moe_router_topk=shape.topk,
        moe_ffn_hidden_size=shape.moe_ffn_size,
        moe_router_score_function=shape.router_score,
        # Renormalising the top k after a softmax over all experts is a softmax over the k logits.
        moe_router_pre_softmax=shape.router_score == "softmax" and not shape.norm_topk_prob,
        moe_router_topk_scaling_factor=None if shape.router_scale == 1 else shape.router_scale,
        moe_aux_loss_coeff=0.0,
        moe_router_load_balancing_type="none",
        moe_router_dtype="fp32",
        # Routers ask for their routes; r3.routing.replay decides who answers.
        moe_enable_routing_replay=True,
    )
    if len(shape.moe_layers) < shape.num_layers:
        is_moe = [int(layer in shape.moe_layers) for layer in range(shape.num_layers)]
        settings["moe_layer_freq"] = is_moe
    if shape.shared_ffn_size:
        settings["moe_shared_expert_intermediate_size"] = shape.shared_ffn_size
        settings["moe_shared_expert_gate"] = bool(shape.moe_names.shared_gate)
    if shape.moe_names.router_bias and shape.router_score == "sigmoid":
        # Megatron would shift the biases after every update to balance the load, away from those
        # that the engine routes with.
        settings |= {"moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": 0.0}
    if shape.topk_groups < shape.expert_groups:
        settings["moe_router_num_groups"] = shape.expert_groups
        settings["moe_router_group_topk"] = shape.topk_groups
    return settings


def _scaled_silu(x: torch.Tensor, slope: float) -> torch.Tensor:
    return x * torch.sigmoid(x * slope)


def build_chunks(
    config: Config, shape: ModelShape, megatron: TransformerConfig, mesh: Mesh, device: Device
) -> list[Any]:
    """Build this rank's model chunks with uninitialised weights. All ranks must call.

    Returns:
        One chunk, or `parallel.vpp` chunks in an interleaved pipeline.
    """
    install_megatron()  # the imports above may have brought modules that are not repaired yet
    stages = [None] if config.parallel.vpp == 1 else range(config.parallel.vpp)
    return [_build_chunk(config, shape, megatron, mesh, device, stage) for stage in stages]


def experts_kind(config: Config, shape: ModelShape) -> str:
    """How experts run in training, `auto` resolved.

    Fused, if experts are whole on a rank and have no biases.
    """
    parallel, kind = config.parallel, config.model.experts
    if kind != "auto":
        return kind
    is_plain = parallel.experts_tp == 1 and not shape.has_biases
    return "fused" if is_plain else "grouped"


def _build_chunk(
    config: Config,
    shape: ModelShape,
    megatron: TransformerConfig,
    mesh: Mesh,
    device: Device,
    vp_stage: int | None,
) -> Any:
    piece = (vp_stage or 0) * mesh.pp.size + mesh.pp.rank
    kind = experts_kind(config, shape)
    experts: dict[str, type[MegatronModule] | None] = {
        "fused": extras.experts(is_cuda=device.is_cuda),
        "grouped": GroupedExperts,
        "sequential": None,
    }
    model = ScoringGPT(
        megatron,
        decoder_spec(
            megatron,
            shape,
            experts=experts[kind],
            layers=config.parallel.pieces(shape.num_layers)[piece],
            vp_stage=vp_stage,
        ),
        # Every tp rank has equally many rows. Padding is masked out of the softmax
        # (r3.policy.logprobs).
        vocab_size=-(-shape.vocab_size // mesh.tp.size) * mesh.tp.size,
        max_sequence_length=shape.max_position_embeddings,
        # Core attention rotates queries and keys (`_set_rope`).
        position_embedding_type="none",
        share_embeddings_and_output_weights=shape.tied,
        parallel_output=True,
        pre_process=piece == 0,
        post_process=piece == mesh.pp.size * config.parallel.vpp - 1,
        pg_collection=mesh.megatron,
        vp_stage=vp_stage,
    )
    if model.pre_process and shape.embedding_multiplier != 1:
        factor = shape.embedding_multiplier
        model.embedding.register_forward_hook(lambda _module, _inputs, output: output * factor)
    model.logits_scaling = shape.logits_scaling
    model.head = Head(
        axis=mesh.tp,
        vocab_size=shape.vocab_size,
        temperature=config.rollout.temperature * shape.logits_scaling,
        chunk_tokens=config.train.logprob_chunk_tokens,
        fp32=config.model.fp32_head,
        entropy_gradient=config.algo.entropy_coef > 0,
        adds_to_main_grad=device.is_cuda,  # on CPU it would need a float32 copy of the operands
        is_embedding=shape.tied,
    )
    for module in model.modules():
        if isinstance(module, AllHeadsNorm):
            module.tp = mesh.tp
        elif isinstance(module, GroupedExperts):
            module.recomputes_activation = config.model.recompute == "selective"
        elif isinstance(module, MoELayer) and kind == "fused":
            module.token_dispatcher = extras.dispatch().TokenDispatcher(
                module, mesh.megatron, mesh.ep
            )
        elif isinstance(module, Router):
            # The engine's router rounds its logits.
            if config.model.router_logits == "engine" and not shape.engine_router_fp32:
                module.gating = rounded_gating(module.gating, DTYPES[config.engine.dtype])
            # Megatron has biases of sigmoid scores only. `RouterTap` adds them to others.
            if shape.moe_names.router_bias and shape.router_score == "softmax":
                del module.expert_bias  # None
                module.register_buffer("expert_bias", torch.zeros(shape.num_experts))
    _mark_shards(model)
    _set_rope(model, shape)
    model.to(device.torch)
    use_product(model)
    return model


def rounded_gating(
    gating: Callable[..., torch.Tensor], dtype: torch.dtype
) -> Callable[..., torch.Tensor]:
    """Round the router's float32 logits to `dtype`, as vLLM's gate (a linear layer) rounds them.

    Scores, softmax and gradient stay float32 on both sides.
    """

    def rounded(*args: Any, **kwargs: Any) -> torch.Tensor:
        logits = gating(*args, **kwargs)
        # The rounded value with the gradient of the exact one.
        return logits.detach().to(dtype).to(logits.dtype) + (logits - logits.detach())

    return rounded


def _set_rope(model: Any, shape: ModelShape) -> None:
    """Set rotary frequencies, and apply the rope scaling of config.json to attention scores.

    YaRN multiplies cosine and sine by a factor, which is squared in every attention score. Here the
    scale of the scores has that square.
    """
    scaling, factor = shape.rope_scaling, 1.0
    if scaling and shape.latent:
        factor = yarn_mscale(scaling.factor, scaling.mscale_all_dim)
    elif scaling:
        factor = scaling.attention_factor
    frequencies = inverse_frequencies(shape.rotary_size, shape.rope_theta, scaling)
    for module in model.modules():
        if isinstance(module, RotaryEmbedding):  # of latent attention
            module.inv_freq = frequencies
        elif isinstance(module, CausalAttention):
            module.scale = (shape.attention_multiplier or module.scale) * factor**2
            if not shape.latent:
                module.inverse_frequencies = frequencies
                module.interleaved_rope = shape.interleaved_rope
    for layer in model.decoder.layers if shape.window else ():
        if layer.layer_number - 1 in shape.window_layers:
            layer.self_attention.core_attention.window = shape.window


def _mark_shards(model: Any) -> None:
    """Mark every weight that tensor parallelism shards, which Megatron does only in initialisation.

    Without the mark the gradient norm takes a shard for a copy and ignores it on all ranks but one.
    """
    for module in model.modules():
        if isinstance(module, (ColumnParallelLinear, VocabParallelEmbedding)):
            dim = 0
        elif isinstance(module, RowParallelLinear):
            dim = 1
        else:
            continue
        for parameter in (module.weight, getattr(module, "bias", None)):
            # The bias of a row-parallel layer is not sharded.
            if parameter is not None and not (parameter.dim() == 1 and dim == 1):
                parameter.tensor_model_parallel = True
                parameter.partition_dim, parameter.partition_stride = dim, 1


def wrap(
    config: Config, megatron: TransformerConfig, chunks: list[Any], shape: ModelShape, mesh: Mesh
) -> tuple[list[Any], Any, list[torch.Tensor]]:
    """Add data parallelism and the distributed optimizer. All ranks must call.

    Gradients are reduced in float32 and summed over data-parallel ranks, not averaged.

    Args:
        config: the sections `train` and `lora` are read.
        megatron: the chunks' config; the schedule's functions are set on it.
        chunks: this rank's model chunks.
        shape: the model's.
        mesh: the layout of the ranks.

    Returns:
        What Megatron's schedules run; Megatron's (chained) optimizer; and flat tensors of what is
        part of the model and that no optimizer has.
    """
    half = megatron.params_dtype != torch.float32
    modules, frozen = in_precision(megatron, chunks)
    if config.uses_lora:
        for chunk in chunks:
            frozen += [parameter.data.view(-1) for parameter in chunk.parameters()]
            extras.adapters().attach(config, chunk, shape, mesh)
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=True, average_in_collective=False
    )
    wrapped = [
        DistributedDataParallel(megatron, ddp, module, disable_bucketing=i > 0)
        for i, module in enumerate(modules)
    ]
    train = config.train
    with cuda_type_names():
        optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=train.lr,
                min_lr=train.min_lr,
                weight_decay=train.weight_decay,
                adam_beta1=train.beta1,
                adam_beta2=train.beta2,
                adam_eps=1e-8,
                clip_grad=train.clip_grad,
                use_distributed_optimizer=True,
                bf16=half,
                params_dtype=megatron.params_dtype,
            ),
            wrapped,
            use_gloo_process_groups=False,
        )

    # Fused AdamW makes one pass over memory. The default one makes seven, and needs a temporary
    # tensor as large as a moment of all parameters. Megatron has no argument for it.
    for member in chained(optimizer):
        for group in member.optimizer.param_groups:
            group["fused"] = True
    extras.dispatch().exchange_without_copies(wrapped)

    def finalize(model: list[Any], _num_tokens: Any = None, **_kwargs: Any) -> None:
        # Without a token count: the loss is normalised already.
        finalize_model_grads(model, None)

    megatron.finalize_model_grads_func = finalize
    megatron.no_sync_func = (
        wrapped[0].no_sync if len(wrapped) == 1 else [chunk.no_sync for chunk in wrapped]
    )
    megatron.grad_scale_func = optimizer.scale_loss
    return wrapped, optimizer, frozen


def let_go(wrapped: list[Any]) -> None:
    """Take the hooks of data parallelism away, so that Python can free the model and its groups.

    Megatron hangs a hook that knows the wrapped model on the node of each parameter in autograd,
    and keeps the node in the wrapped model. Python's garbage collection does not see the way
    through the node: parameters, optimizer, process groups and their threads would stay for good.

    Source: megatron/core/distributed/distributed_data_parallel.py (`grad_accs`).
    """
    for chunk in wrapped:
        for node in chunk.grad_accs:
            # The handle of a further hook leads to the table of all hooks of the node.
            node.register_hook(lambda *_: None).hooks_dict_ref().clear()
        chunk.grad_accs.clear()


def in_precision(
    megatron: TransformerConfig, chunks: list[Any]
) -> tuple[list[Any], list[torch.Tensor]]:
    """Return the chunks, wrapped if they are of half precision, and `flat_expert_biases`."""
    half = megatron.params_dtype != torch.float32
    modules = [Float16Module(megatron, chunk) for chunk in chunks] if half else chunks
    return modules, flat_expert_biases(chunks)


def flat_expert_biases(chunks: list[Any]) -> list[torch.Tensor]:
    """Move the routers' expert biases, if any, into one float32 tensor that can be shared.

    Biases are buffers, so no parameter buffer has them. The half-precision wrapper has converted
    them to its type, which routers undo only in their first forward.

    Returns:
        That tensor in a list; an empty list if the model has no expert biases.
    """
    routers = [
        module
        for chunk in chunks
        for module in chunk.modules()
        if getattr(module, "expert_bias", None) is not None
    ]
    if not routers:
        return []
    flat = torch.cat([router.expert_bias.float() for router in routers])
    for router, part in zip(
        routers, flat.split([len(router.expert_bias) for router in routers]), strict=True
    ):
        router.expert_bias.data = part
    return [flat]
