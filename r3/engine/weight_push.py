"""Push new weights into a running vLLM engine, bit-identical to an engine that loads them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from r3 import extras
from r3.engine.direct_weights import DirectWeights, direct_weights
from r3.models.tensors import Experts

if TYPE_CHECKING:
    from vllm import LLM

    from r3.models.shape import ModelShape


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
                unloaded = {reported(one) for one in direct.load(weights, only)}
                return Pushed(unloaded=unloaded, reloaded={}, plan=direct)
            pushed = extras.reload_weights(worker, model, weights, shape, copy_experts=copy)
            return replace(pushed, why=direct)

    return llm.collective_rpc(load)[0]


def reported(name: str) -> str:
    """Some models report their experts' parameters without the submodule that holds them."""
    return name.replace(".experts.routed_experts.", ".experts.")
