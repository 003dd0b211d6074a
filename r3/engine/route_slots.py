"""Capture: a hook of R3's own at each router, and a table of what they chose, by KV slot.

vLLM's own switch (`enable_return_routed_experts`) is not used: up to 0.30 it copies routes three
times, from 0.31 on it asks for what an engine on CPU has not. The hook is the one that vLLM sets
itself, so it sees ids of the checkpoint's experts before anything is remapped.

The row of a token lies in the slot of its key and value, so routes follow the cache: a shared
prefix has them, a preempted request is computed again with them, and chunks, batches and turns
need no care. They are written inside the forward pass, on CUDA inside vLLM's graphs, by operators
that read the slots of the pass from vLLM's buffer. A block that is given to a request is emptied
first: a row that no router wrote is -1, and refused by `r3.routing.ledger`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from r3.algo.packing import MISSING

if TYPE_CHECKING:
    from vllm import LLM


@contextmanager
def capturing(*, is_cuda: bool) -> Iterator[None]:
    """Inside, an engine that is built captures: its runner gets a table with its KV cache.

    Not later, because vLLM records its CUDA graphs right after it made the cache.
    """
    if is_cuda:
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner as Runner
    else:
        from vllm.v1.worker.cpu_model_runner import CPUModelRunner as Runner
    original = Runner.initialize_kv_cache

    def with_table(runner: Any, *args: Any, **kwargs: Any) -> None:
        original(runner, *args, **kwargs)
        vars(runner)["r3_routes"] = RouteTable(runner)

    Runner.initialize_kv_cache = with_table
    try:
        yield
    finally:
        Runner.initialize_kv_cache = original


class SlotTable:
    """Expert ids by KV slot, [slots + 1, L, K], on the device of the buffer of slots.

    The last row takes what passes that are padded choose for no token.
    """

    def __init__(
        self, layers: int, topk: int, *, blocks: int, block_size: int, slots_N: torch.Tensor
    ) -> None:
        """Make a table in which all rows are missing.

        Args:
            blocks: of the KV cache, of block_size slots each.
            slots_N: the buffer that has the slots of a pass's tokens when a router writes.
        """
        shape = (blocks * block_size + 1, layers, topk)
        self._rows = torch.full(shape, MISSING, dtype=torch.int16, device=slots_N.device)
        self._by_block = self._rows[:-1].view(-1, block_size, layers, topk)
        self._slots_N = slots_N
        self.block_size = block_size

    def write(self, index: int, chosen_NK: torch.Tensor) -> None:
        """Put the choices of one layer for the tokens of a pass to their slots."""
        rows_SK = self._rows[:, index]
        slots_N = self._slots_N[: len(chosen_NK)].remainder(len(rows_SK))  # padding has slot -1
        rows_SK.index_copy_(0, slots_N.long(), chosen_NK.to(rows_SK.dtype))

    def empty(self, blocks: Sequence[int]) -> None:
        """Forget what blocks of the KV cache held."""
        self._by_block[self._on_device(blocks)] = MISSING

    def read(self, blocks: Sequence[int], first: int, last: int) -> np.ndarray:
        """Return the rows [last - first, L, K] of a conversation's tokens from first to last - 1.

        Args:
            blocks: all blocks of the conversation, in their order.
        """
        if first == last:  # of a request that waits, which may have no blocks
            return self._rows[:0].cpu().numpy()
        size = self.block_size
        start, end = first // size, -(-last // size)
        assert end <= len(blocks), (
            f"{len(blocks)} blocks of {size} tokens cannot hold the routes of {last} tokens"
        )
        rows = self._by_block[self._on_device(blocks[start:end])].flatten(0, 1)
        return rows[first - start * size : last - start * size].cpu().numpy()

    def _on_device(self, blocks: Sequence[int]) -> torch.Tensor:
        return torch.tensor(blocks, dtype=torch.int64, device=self._rows.device)


class RouteTable(SlotTable):
    """What the routers of a model runner chose.

    Attributes:
        layers: numbers of the MoE layers, ascending.
        group: of the KV cache, whose slots the rows have.
    """

    def __init__(self, runner: Any) -> None:
        """Set the hooks of a runner that has its KV cache."""
        from vllm.model_executor.layers.fused_moe.layer import MoERunner

        modules = runner.get_model().modules()
        routers = {m.layer_id: m.router for m in modules if isinstance(m, MoERunner)}
        self.layers = sorted(routers)
        assert self.layers, "no router of this engine can be captured"
        # Groups of sliding windows free the blocks that left the window, and give them away.
        groups = runner.kv_cache_config.kv_cache_groups
        full = [i for i, cache_group in enumerate(groups) if _keeps_all(cache_group.kv_cache_spec)]
        assert full, "no group of this engine's KV cache keeps all tokens of a conversation"
        self.group = full[0]
        self._runner, self._batch = runner, runner.input_batch
        (topk,) = {router.top_k for router in routers.values()}
        super().__init__(
            len(self.layers),
            topk,
            blocks=runner.kv_cache_config.num_blocks,
            block_size=groups[self.group].kv_cache_spec.block_size,
            slots_N=self._batch.block_table[self.group].slot_mapping.gpu,
        )
        for index, layer in enumerate(self.layers):
            routers[layer].set_capture_fn(partial(self.write, index))

    def read(self, blocks: Sequence[int], first: int, last: int) -> np.ndarray:
        """As in a `SlotTable`, of the input batch that the table was made for."""
        assert self._runner.input_batch is self._batch, (
            "vLLM replaced its input batch: routes were stored by the slots of the old one"
        )
        return super().read(blocks, first, last)


def _keeps_all(spec: Any) -> bool:
    """Whether all layers of a group of the KV cache keep all tokens of a conversation."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, UniformTypeKVCacheSpecs

    specs = spec.kv_cache_specs.values() if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]
    return all(isinstance(spec, FullAttentionSpec) for spec in specs)


class SlotRoutes:
    """Routes of the requests that ended, read when their blocks are freed."""

    def __init__(self, llm: LLM, layers: Sequence[int]) -> None:
        """Take an engine that was built while `capturing`.

        Args:
            layers: numbers of the model's MoE layers, ascending.
        """
        engine_core: Any = llm.llm_engine.engine_core
        scheduler = engine_core.engine_core.scheduler
        (table,) = llm.collective_rpc(lambda worker: vars(worker.model_runner).get("r3_routes"))
        assert table is not None, "this engine captures no routes: vLLM built another model runner"
        assert table.layers == list(layers), (
            f"the engine has routers in layers {table.layers}, the model in {list(layers)}"
        )
        self._table, self._scheduler = table, scheduler
        self._rows: dict[str, list[np.ndarray]] = {}
        pool = scheduler.kv_cache_manager.block_pool
        new_blocks, free, preempt = (
            pool.get_new_blocks,
            scheduler._free_request,
            scheduler._preempt_request,
        )

        def get_new_blocks(num_blocks: int) -> Any:
            blocks = new_blocks(num_blocks)
            table.empty([block.block_id for block in blocks])
            return blocks

        def free_request(request: Any, *args: Any, **kwargs: Any) -> Any:
            self._read(request)
            return free(request, *args, **kwargs)

        def preempt_request(request: Any, *args: Any, **kwargs: Any) -> Any:
            # It is computed again later, in another batch: the rows of tokens that are sampled
            # already stay those of the pass that sampled them.
            self._read(request)
            return preempt(request, *args, **kwargs)

        pool.get_new_blocks = get_new_blocks
        scheduler._free_request = free_request
        scheduler._preempt_request = preempt_request

    def take(self, request_id: str) -> np.ndarray:
        """Return the routes of a request that ended, [rows, L, K], from its first row on."""
        rows = self._rows.pop(request_id)
        return rows[0] if len(rows) == 1 else np.concatenate(rows)

    def clear(self) -> None:
        """Forget requests that ended and were not taken."""
        self._rows.clear()

    def _read(self, request: Any) -> None:
        """Keep the rows of a request that its blocks hold and that are not kept yet."""
        rows = self._rows.setdefault(request.request_id, [])
        first = (request.sampling_params.routed_experts_prompt_start or 0) + sum(map(len, rows))
        # Not the token that was sampled last; of a request that is aborted, not what waited.
        computed = min(request.num_tokens - 1, request.num_computed_tokens)
        blocks = self._scheduler.kv_cache_manager.get_blocks(request.request_id).get_block_ids()
        rows.append(self._table.read(blocks[self._table.group], first, max(first, computed)))
