"""Weights through vLLM's reload, where an engine's layers have no plain layout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch

from r3.engine.direct_weights import StackedExperts, expert_leaves, matrices, plain_experts
from r3.engine.weight_push import Pushed, reported
from r3.models.hf_checkpoint import joined
from r3.models.shape import ModelShape
from r3.models.tensors import Experts

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def reload_weights(
    worker: Any,
    model: Any,
    weights: Iterable[tuple[str | Experts, torch.Tensor]],
    shape: ModelShape,
    *,
    copy_experts: bool,
) -> Pushed:
    """Load weights with vLLM's reload, layer by layer, and copy experts with a plain layout.

    Parameters move to the meta device, each module is rebuilt when its last tensor arrived, and
    kernel tensors keep their storage, so CUDA graphs stay valid. A tensor is kept until its module
    is complete: a buffer must not be reused before this returns. On CPU vLLM 0.30 skips the packing
    of expert weights in a reload, which leaves them silently wrong; this function packs them.

    With tied embeddings the checkpoint has no output layer, vLLM's models skip its name, and the
    reload gives it a parameter of its own, so the embedding is loaded into both.
    """
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    moe = {
        int(name.split(".layers.")[1].split(".")[0]): (name, module)
        for name, module in model.named_modules()
        if isinstance(module, RoutedExperts)
    }
    stacked: dict[int, StackedExperts] = {}
    reloaded: dict[int, str] = {}
    embedding: list[torch.Tensor] = []

    def rest() -> Iterator[tuple[str, torch.Tensor]]:
        """Copy experts; yield what the reload has to take."""
        for key, full in weights:
            if not isinstance(key, Experts):
                if key == _EMBEDDING:
                    embedding.append(full.detach())
                yield key, full.detach()
            elif key.layer in stacked:
                stacked[key.layer].copy(key, full.detach())
            else:
                yield from matrices(key, full.detach(), shape)

    for parameter in model.parameters():
        loader = getattr(parameter, "weight_loader", None)
        if isinstance(loader, partial):  # of MiniMax-M2; vLLM asks for the name
            loader.__name__ = loader.func.__name__  # type: ignore[attr-defined]
    names: dict[int, set[str]] = {}  # of one parameter, which two modules may have
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(reported(name))
    initialize_layerwise_reload(model)
    # Read now: the reload removes parameters that vLLM derives from others (in latent attention)
    # until it rebuilds them.
    wanted = {reported(name) for name, _ in model.named_parameters()}
    for layer, (_, module) in moe.items() if copy_experts else ():
        info = get_layerwise_info(module)
        experts = plain_experts(module, shape, info.kernel_tensors[0])
        if isinstance(experts, str):
            reloaded[layer] = experts
        else:
            stacked[layer] = experts
            # The reload loads nothing into it: it puts the tensors back without a warning.
            info.load_numel_total = 0
    try:
        # vLLM takes these as its models' checkpoints have them, other stacked experts one by one.
        as_stored = shape.moe_names.alternates or shape.renamed
        stream = joined(rest(), shape) if as_stored else rest()
        loaded = set(model.load_weights(stream))
        if shape.tied and embedding and _HEAD in wanted - loaded:
            head = model.lm_head.weight
            head.weight_loader(head, *embedding)
            loaded.add(_HEAD)
    finally:
        # A reload that stops half-way breaks the next one, so it is always finished.
        finalize_layerwise_reload(model, worker.model_config)
    if worker.device.type == "cpu":
        for _, module in moe.values():
            module.quant_method.moe_kernel.fused_experts.process_weights_after_loading(module)
    for layer, experts in stacked.items():
        if experts.is_complete:
            loaded |= {f"{moe[layer][0]}.{name}" for name in expert_leaves(shape).values()}
    loaded = {reported(name) for name in loaded}
    for same in names.values():
        # Both modules get back the memory that was loaded, but for a tied output layer (above).
        if same & loaded and _HEAD not in same:
            loaded |= same
    unloaded = wanted - loaded
    return Pushed(unloaded=unloaded, reloaded=reloaded)
