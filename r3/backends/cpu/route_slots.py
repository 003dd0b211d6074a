"""Keep routes by KV slot, and read those of a request when it ends: capture on CPU.

vLLM (0.30) copies the routes of every layer and step three times before they are in its buffer of
routes by KV slot. For users who stream it also lists the blocks of every request in every step,
slices the routes of every token and joins the slices at the end. R3 returns whole responses, and
its engines have one data-parallel rank (`refuse_unfit`): the routes of a step go to their slots at
once, and a request's rows stay there until its blocks are freed, where they are read once.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from vllm import LLM


class SlotRoutes:
    """Routes of the requests that ended, in an engine that schedules no batch ahead."""

    def __init__(self, llm: LLM) -> None:
        """Take over from vLLM's scheduler and model runner, whose outputs have no routes now."""
        engine_core: Any = llm.llm_engine.engine_core
        scheduler = engine_core.engine_core.scheduler
        assert not scheduler.scheduler_config.async_scheduling, (
            "routes are read from slots, and a batch scheduled ahead would write to slots of "
            "another request"
        )
        assert scheduler.enable_return_routed_experts, "this engine captures no routes"
        (cpu_runner,) = llm.collective_rpc(lambda worker: worker.model_runner)
        self._scheduler, self._runner = scheduler, cpu_runner
        self._rows: dict[str, list[np.ndarray]] = {}
        self._chosen: dict[int, torch.Tensor] = {}  # layer -> its choices in this step
        self._layers = _capture(cpu_runner.get_model().modules(), self._chosen)
        assert self._layers, "no router of this engine captures its choices"
        # Views of vLLM's buffers, made once, because each call of a step counts in a small model.
        manager, self._batch = scheduler.routed_experts_mgr, cpu_runner.input_batch
        self._group, slots = manager.attn_gid, manager.routed_experts_by_slot
        self._slots_N = self._batch.block_table[self._group].slot_mapping.gpu.numpy()
        self._by_block = slots.reshape(-1, manager.block_size, *slots.shape[1:])
        self._by_slot = slots.reshape(len(slots), -1)
        of_layers = np.arange(self._by_slot.shape[1]).reshape(slots.shape[1:])[self._layers].ravel()
        first, last = of_layers[0], of_layers[-1]
        self._columns: np.ndarray | None = None if last - first + 1 == len(of_layers) else of_layers
        if self._columns is None:  # a slice takes a quarter of the time
            self._by_slot = self._by_slot[:, first : last + 1]
        update, free, preempt = (
            scheduler.update_from_output,
            scheduler._free_request,
            scheduler._preempt_request,
        )

        def update_from_output(scheduler_output: Any, model_runner_output: Any) -> Any:
            self.store(scheduler_output.total_num_scheduled_tokens)
            return update(scheduler_output, model_runner_output)

        def free_request(request: Any, *args: Any, **kwargs: Any) -> Any:
            self._read(request)
            return free(request, *args, **kwargs)

        def preempt_request(request: Any, *args: Any, **kwargs: Any) -> Any:
            # It is computed again later, in another batch: the rows of tokens that are sampled
            # already stay those of the pass that sampled them.
            self._read(request)
            return preempt(request, *args, **kwargs)

        scheduler.update_from_output = update_from_output
        scheduler._free_request = free_request
        scheduler._preempt_request = preempt_request
        scheduler.enable_return_routed_experts = False
        cpu_runner.routed_experts_initialized = False

    def take(self, request_id: str) -> np.ndarray:
        """Return the routes of a request that ended, [rows, layers, K], from its first row on."""
        rows = self._rows.pop(request_id)
        return rows[0] if len(rows) == 1 else np.concatenate(rows)

    def clear(self) -> None:
        """Forget requests that ended and were not taken."""
        self._rows.clear()

    def store(self, num_tokens: int) -> None:
        """Put the choices of the step that was computed last, of `num_tokens` tokens, to their
        slots."""
        if not num_tokens:
            return
        assert self._runner.input_batch is self._batch, (
            "vLLM replaced its input batch: routes would be stored by the slots of the old one"
        )
        assert list(self._chosen) == self._layers, (
            f"routers of layers {list(self._chosen)} chose experts in this step, not those of "
            f"{self._layers}"
        )
        chosen = torch.cat(tuple(self._chosen.values()), 1).numpy()  # [N, L * K]
        self._chosen.clear()
        assert len(chosen) == num_tokens, (
            f"routers chose experts of {len(chosen)} tokens in a step of {num_tokens}"
        )
        slots_N = self._slots_N[:num_tokens]
        if self._columns is None:
            self._by_slot[slots_N] = chosen
        else:
            self._by_slot[slots_N[:, None], self._columns] = chosen

    def _read(self, request: Any) -> None:
        """Keep the rows of a request that its blocks hold and that are not kept yet."""
        rows = self._rows.setdefault(request.request_id, [])
        first = request.sampling_params.routed_experts_prompt_start or 0
        blocks = self._scheduler.kv_cache_manager.get_blocks(request.request_id)
        of_blocks = self._by_block[blocks.get_block_ids()[self._group]]  # a copy
        of_tokens = of_blocks.reshape(-1, *of_blocks.shape[2:])
        computed = request.num_tokens - 1  # not the token that was sampled last
        rows.append(of_tokens[first + sum(map(len, rows)) : computed])


def _capture(modules: Any, chosen: dict[int, torch.Tensor]) -> list[int]:
    """Let routers put their choices into `chosen`, and return the numbers of their layers."""
    from vllm.model_executor.layers.fused_moe.layer import MoERunner

    layers = []
    for module in modules:
        if isinstance(module, MoERunner) and module.router.capture_fn is not None:
            layers.append(module.layer_id)
            module.router.set_capture_fn(partial(chosen.__setitem__, module.layer_id))
    return sorted(layers)
