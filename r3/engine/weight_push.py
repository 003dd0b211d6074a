"""Push new weights into a running vLLM engine, bit-identical to an engine that loads them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from r3.engine.direct_weights import (
    DirectWeights,
    StackedExperts,
    direct_weights,
    expert_leaves,
    matrices,
    plain_experts,
)
from r3.models.hf_checkpoint import joined
from r3.models.tensors import Experts

if TYPE_CHECKING:
    from vllm import LLM

    from r3.models.shape import ModelShape


_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, kw_only=True)
class Pushed:
    """What became of a push.

    Attributes:
        unloaded: parameters that nothing was loaded into.
        reloaded: MoE layer -> why its experts went through vLLM's reload instead of a plain copy.
        why: why weights other than experts went through the reload; empty if all were copied.
        plan: of the push; None if weights went through the reload.
    """

    unloaded: set[str]
    reloaded: dict[int, str]
    why: str = ""
    plan: DirectWeights | None = None

    @property
    def note(self) -> str:
        """What to tell a user if weights went through the reload."""
        what, why = "weights other than experts", self.why
        if self.reloaded:
            layer, of_layer = min(self.reloaded.items())
            what += f", and the experts of {len(self.reloaded)} layers,"
            why += f"; layer {layer}: {of_layer}"
        return (
            f"{what} go through vLLM's reload instead of a plain copy, so that each weight sync "
            f"takes longer: {why}"
        )


def push(
    llm: LLM,
    weights: Iterable[tuple[str | Experts, torch.Tensor]],
    shape: ModelShape,
    *,
    copy: bool = True,
    only: Collection[str] | None = None,
) -> Pushed:
    """Stream full tensors, under Hugging Face names or of neighbouring experts, into the engine.

    They are copied straight into the engine's parameters if these have the plain layout. Otherwise
    everything but plain experts goes through vLLM's reload.

    Args:
        copy: False sends all weights through the reload, for comparisons.
        only: names of all tensors that come, if not all do; see `DirectWeights.beside`.
    """

    def load(worker: Any) -> Pushed:
        from vllm.config import set_current_vllm_config

        parallel = worker.vllm_config.parallel_config
        ranks = parallel.tensor_parallel_size
        model = worker.model_runner.get_model()
        with (
            torch.no_grad(),
            # A default device is a Python call in every operation, and on CPU changes nothing.
            nullcontext() if worker.device.type == "cpu" else torch.device(worker.device),
            set_current_vllm_config(worker.vllm_config),
        ):
            direct: DirectWeights | str = "as asked"
            if copy:
                direct = direct_weights(model, shape, parallel.rank % ranks, ranks)
            if isinstance(direct, DirectWeights):
                unloaded = {_reported(one) for one in direct.load(weights, only)}
                return Pushed(unloaded=unloaded, reloaded={}, plan=direct)
            pushed = _reload(worker, model, weights, shape, copy_experts=copy)
            return replace(pushed, why=direct)

    return llm.collective_rpc(load)[0]


def _reload(
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
        names.setdefault(id(parameter), set()).add(_reported(name))
    initialize_layerwise_reload(model)
    # Read now: the reload removes parameters that vLLM derives from others (in latent attention)
    # until it rebuilds them.
    wanted = {_reported(name) for name, _ in model.named_parameters()}
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
    loaded = {_reported(name) for name in loaded}
    for same in names.values():
        # Both modules get back the memory that was loaded, but for a tied output layer (above).
        if same & loaded and _HEAD not in same:
            loaded |= same
    unloaded = wanted - loaded
    return Pushed(unloaded=unloaded, reloaded=reloaded)


def _reported(name: str) -> str:
    """Some models report their experts' parameters without the submodule that holds them."""
    return name.replace(".experts.routed_experts.", ".experts.")
