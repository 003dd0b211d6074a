"""Push new weights into a running vLLM engine, bit-identical to an engine that loads them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from vllm import LLM


_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def push(llm: LLM, weights: Iterable[tuple[str, torch.Tensor]], *, tied: bool) -> set[str]:
    """Stream full tensors with Hugging Face names into the engine.

    vLLM reloads layer by layer: parameters move to the meta device, each module is rebuilt when its
    last tensor arrived, and kernel tensors keep their storage, so CUDA graphs stay valid. A tensor
    is kept until its module is complete: a buffer must not be reused before this returns. On CPU
    vLLM 0.30 skips the packing of expert weights in a reload, which leaves them silently wrong;
    this function packs them.

    Args:
        tied: whether the output layer shares the embedding. The checkpoint then has no output
            layer, vLLM's models skip its name, and the reload gives it a parameter of its own, so
            the embedding is loaded into both.

    Returns:
        Names of the parameters that got no tensor.
    """

    def reload(worker: Any) -> set[str]:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.layers.fused_moe import routed_experts
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        model = worker.model_runner.get_model()
        with (
            torch.no_grad(),
            torch.device(worker.device),
            set_current_vllm_config(worker.vllm_config),
        ):
            initialize_layerwise_reload(model)
            # Read now: the reload removes parameters that vLLM derives from others (in latent
            # attention) until it rebuilds them.
            wanted = {_reported(name) for name, _ in model.named_parameters()}
            embedding: list[torch.Tensor] = []

            def detached() -> Iterator[tuple[str, torch.Tensor]]:
                for name, tensor in weights:
                    if name == _EMBEDDING:
                        embedding.append(tensor.detach())
                    yield name, tensor.detach()

            try:
                loaded = set(model.load_weights(detached()))
                if tied and embedding and _HEAD in wanted - loaded:
                    head = model.lm_head.weight
                    head.weight_loader(head, *embedding)
                    loaded.add(_HEAD)
            finally:
                # A reload that stops half-way breaks the next one, so it is always finished.
                finalize_layerwise_reload(model, worker.model_config)
            if worker.device.type == "cpu":
                for module in model.modules():
                    if isinstance(module, routed_experts.RoutedExperts):
                        module.quant_method.moe_kernel.fused_experts.process_weights_after_loading(
                            module
                        )
        return wanted - {_reported(name) for name in loaded}

    return llm.collective_rpc(reload)[0]


def _reported(name: str) -> str:
    """Some models report their experts' parameters without the submodule that holds them."""
    return name.replace(".experts.routed_experts.", ".experts.")
