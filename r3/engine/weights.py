"""New weights into a running vLLM engine, bit-identical to an engine freshly loaded from the same tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from vllm import LLM


_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def push(llm: LLM, weights: Iterable[tuple[str, torch.Tensor]], *, tied: bool) -> set[str]:
    """Stream full tensors with Hugging Face names into the engine; returns the parameters that nothing was loaded into.

    vLLM's layerwise reload: parameters move to the meta device, each module is re-made when its last tensor has come, and
    kernel tensors keep their storage (CUDA graphs stay valid). A tensor is held until its module is complete, so a buffer
    must not be reused before this returns. On CPU vLLM 0.30 skips the experts' weight packing in a reload, which leaves
    them silently wrong: it is run here.

    With tied embeddings the checkpoint has no output layer, and vLLM's models skip its name. The reload gives the output
    layer a parameter of its own, so the embedding is loaded into both.
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
            # Asked now: parameters that vLLM derives from others (latent attention's) are put away until they are re-made.
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
                # A reload that stops half-way poisons the next one; close it whatever happened.
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
