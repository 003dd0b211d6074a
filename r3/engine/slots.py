"""Read the routes of a request when it ends, from vLLM's buffer of routes by KV slot.

vLLM (0.30) writes the routes of every step into that buffer. For users who stream it also lists the
blocks of every request in every step, slices the routes of every token and joins the slices at the
end, which is most of what capture costs on CPU. R3 returns whole responses: a request's rows stay
in the buffer until its blocks are freed, and are read there once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from vllm import LLM


class SlotRoutes:
    """Routes of the requests that ended, in an engine that schedules no batch ahead."""

    def __init__(self, llm: LLM) -> None:
        """Take over from vLLM's scheduler, whose outputs have no routes from now on."""
        engine_core: Any = llm.llm_engine.engine_core
        scheduler = engine_core.engine_core.scheduler
        assert not scheduler.scheduler_config.async_scheduling, (
            "routes are read from slots, and a batch scheduled ahead would write to slots of "
            "another request"
        )
        assert scheduler.enable_return_routed_experts, "this engine captures no routes"
        self._scheduler = scheduler
        self._rows: dict[str, list[np.ndarray]] = {}
        free, preempt = scheduler._free_request, scheduler._preempt_request

        def free_request(request: Any, *args: Any, **kwargs: Any) -> Any:
            self._read(request)
            return free(request, *args, **kwargs)

        def preempt_request(request: Any, *args: Any, **kwargs: Any) -> Any:
            # It is computed again later, in another batch: the rows of tokens that are sampled
            # already stay those of the pass that sampled them.
            self._read(request)
            return preempt(request, *args, **kwargs)

        scheduler._free_request = free_request
        scheduler._preempt_request = preempt_request
        scheduler.enable_return_routed_experts = False

    def take(self, request_id: str) -> np.ndarray:
        """Return the routes of a request that ended, [rows, layers, K], from its first row on."""
        rows = self._rows.pop(request_id)
        return rows[0] if len(rows) == 1 else np.concatenate(rows)

    def clear(self) -> None:
        """Forget requests that ended and were not taken."""
        self._rows.clear()

    def _read(self, request: Any) -> None:
        """Keep the rows of a request that its blocks hold and that are not kept yet."""
        rows = self._rows.setdefault(request.request_id, [])
        first = request.sampling_params.routed_experts_prompt_start or 0
        manager = self._scheduler.routed_experts_mgr
        blocks = self._scheduler.kv_cache_manager.get_blocks(request.request_id)
        numbers = blocks.get_block_ids()[manager.attn_gid]
        slots = manager.routed_experts_by_slot
        of_blocks = slots.reshape(-1, manager.block_size, *slots.shape[1:])[numbers]  # a copy
        computed = request.num_tokens - 1  # not the token that was sampled last
        rows.append(of_blocks.reshape(-1, *slots.shape[1:])[first + sum(map(len, rows)) : computed])
