"""Process groups as frozen axes, passed as arguments instead of read from global state.

This is the only module that reads Megatron's global parallel state.
"""

from __future__ import annotations

import importlib
import sys
import types
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from r3 import extras
from r3.runtime.device import has_gpu

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection

    from r3.config import ParallelConfig
    from r3.runtime.device import Device


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One axis of the layout: ranks that differ only along it. An axis of one rank does nothing.

    Attributes:
        name: for messages.
        group: its process group; None for one rank.
        rank: this rank's number in it.
        size: number of ranks.
    """

    name: str
    group: dist.ProcessGroup | None
    rank: int
    size: int

    @classmethod
    def of(cls, name: str, group: dist.ProcessGroup | None) -> Axis:
        """The axis of a process group of this rank; None is an axis of one rank."""
        if group is None or group.size() == 1:
            return cls(name=name, group=None, rank=0, size=1)
        return cls(name=name, group=group, rank=group.rank(), size=group.size())

    def all_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        """Reduce in place over the axis and return the tensor. All ranks of the axis must call."""
        if self.size > 1:
            dist.all_reduce(tensor, op=op, group=self.group)
        return tensor

    def all_gather_object(self, item: Any) -> list[Any]:
        """Gather one picklable object per rank, in rank order. All ranks of the axis must call."""
        if self.size == 1:
            return [item]
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, item, group=self.group)
        return gathered

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Copy the tensor of axis rank `source` to all ranks. All ranks of the axis must call."""
        if self.size > 1:
            assert self.group is not None
            dist.broadcast(tensor, src=dist.get_global_rank(self.group, source), group=self.group)
        return tensor

    def all_to_all_bytes(self, outgoing: list[bytes]) -> list[bytes]:
        """Send `outgoing[r]` to axis rank r; returns one message per sender.

        All ranks of the axis must call.
        """
        assert len(outgoing) == self.size, (
            f"axis {self.name} has {self.size} ranks, {len(outgoing)} messages given"
        )
        if self.size == 1:
            return list(outgoing)
        sizes_out = torch.tensor([len(message) for message in outgoing], dtype=torch.int64)
        sizes_in = torch.empty_like(sizes_out)
        dist.all_to_all_single(sizes_in, sizes_out, group=self.group)
        sent = torch.frombuffer(bytearray(b"".join(outgoing)) or bytearray(1), dtype=torch.uint8)[
            : int(sizes_out.sum())
        ]
        received = torch.empty(int(sizes_in.sum()), dtype=torch.uint8)
        dist.all_to_all_single(
            received, sent, sizes_in.tolist(), sizes_out.tolist(), group=self.group
        )
        return [part.numpy().tobytes() for part in received.split(sizes_in.tolist())]

    def barrier(self) -> None:
        """Wait for all ranks of the axis. All of them must call."""
        if self.size > 1:
            dist.barrier(group=self.group)


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Every axis of a run.

    Attributes:
        world: all ranks.
        tp, pp, cp, dp, dp_cp: training; `dp` does not include context parallelism.
        ep, etp, expert_dp: training of experts.
        engine_tp: ranks that share one engine.
        engine_dp: numbers the engines.
        megatron: the same groups as Megatron takes them.
    """

    world: Axis
    tp: Axis
    pp: Axis
    cp: Axis
    dp: Axis
    dp_cp: Axis
    ep: Axis
    etp: Axis
    expert_dp: Axis
    engine_tp: Axis
    engine_dp: Axis
    megatron: ProcessGroupCollection

    @property
    def length_multiples(self) -> tuple[int, int]:
        """What lengths must be a multiple of: of a micro-batch, and of each sequence in it.

        Context and sequence parallelism divide them into equal parts.
        """
        of_sequence = 2 * self.cp.size if self.cp.size > 1 else 1
        return of_sequence * self.tp.size, of_sequence


def build_mesh(device: Device, parallel: ParallelConfig) -> Mesh:
    """Create all process groups, once, before any model is built. All ranks must call.

    The order is Megatron's: tp-cp-ep-dp-pp. Engines take consecutive ranks, as vLLM's external
    launcher does.
    """
    install_megatron()
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.process_groups_config import ProcessGroupCollection

    parallel_state.initialize_model_parallel(
        **parallel.megatron,
        virtual_pipeline_model_parallel_size=parallel.vpp if parallel.vpp > 1 else None,
        create_gloo_process_groups=False,
    )
    # Megatron's random tracker must exist before layers are built. The seed does not matter,
    # because dropout is 0 everywhere.
    tensor_parallel.random.model_parallel_cuda_manual_seed(1)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    engines = device.world_size // parallel.engine_tp
    return Mesh(
        world=Axis.of("world", dist.group.WORLD),
        tp=Axis.of("tp", groups.tp),
        pp=Axis.of("pp", groups.pp),
        cp=Axis.of("cp", groups.cp),
        dp=Axis.of("dp", groups.dp),
        dp_cp=Axis.of("dp_cp", groups.dp_cp),
        ep=Axis.of("ep", groups.ep),
        etp=Axis.of("etp", groups.expt_tp),
        expert_dp=Axis.of("expert_dp", groups.expt_dp),
        # Engines communicate through vLLM's groups; these two axes only number ranks.
        engine_tp=Axis(
            name="engine_tp",
            group=None,
            rank=device.rank % parallel.engine_tp,
            size=parallel.engine_tp,
        ),
        engine_dp=Axis(
            name="engine_dp", group=None, rank=device.rank // parallel.engine_tp, size=engines
        ),
        megatron=groups,
    )


def axis_beside(world: Axis, *, timeout_s: float) -> Axis:
    """All ranks on a separate gloo group, for a background thread. All ranks must call.

    Args:
        world: all ranks.
        timeout_s: seconds that a collective waits for other ranks.
    """
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    # A group even of one rank: the thread must use none of the training.
    return Axis(name="beside", group=group, rank=world.rank, size=world.size)


# ------------------------------------------------------------------------------------------------
# Megatron-Core as R3 uses it: without TransformerEngine and torch.compile, and on CPU.


def install_megatron() -> None:
    """Repair Megatron, before it is used and after more of it is imported."""
    _undo_compilation()
    _repair_without_transformer_engine()
    if not has_gpu():
        extras.megatron_on_cpu().install()


def cuda_type_names() -> AbstractContextManager[None]:
    """On CPU, `param.type()` returns CUDA names inside, which Megatron's optimizers ask for."""
    if has_gpu():
        return nullcontext()
    renamed: AbstractContextManager[None] = extras.megatron_on_cpu().cuda_type_names()
    return renamed


_as_written: set[str] = set()  # modules of Megatron without torch.compile


def _undo_compilation() -> None:
    """Run Megatron's small fused operations as they are written, without torch.compile.

    On CUDA it decorates about 40 of them when it is imported, in every router's forward pass too
    (moe/router.py), where they compile, guard and recompile without gain.
    """
    importlib.import_module("megatron.core.jit").disable_jit_fuser()  # for modules to come
    for name, module in list(sys.modules.items()):
        # A look at all of them takes a tenth of a second, and every policy asks.
        if not name.startswith("megatron.core") or module is None or name in _as_written:
            continue
        _as_written.add(name)
        classes = [one for one in vars(module).values() if isinstance(one, type)]
        for owner in (module, *(one for one in classes if one.__module__ == name)):
            for key, value in list(vars(owner).items()):
                # __dict__: stand-ins for absent packages have every attribute.
                original: Any = getattr(value, "__dict__", {}).get("_torchdynamo_orig_callable")
                if getattr(original, "__module__", "").startswith("megatron.core"):
                    static = isinstance(value, staticmethod)
                    setattr(owner, key, staticmethod(original) if static else original)


def _repair_without_transformer_engine() -> None:
    """Upstream faults that show when TransformerEngine is absent, on CUDA as well.

    0.16.1 has all of them, 0.19.2 the second and the last.
    """
    moe_utils = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # type: ignore[attr-defined]  # NameError in the router's gating product
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    # CheckpointWithoutOutput() defaults to the fp8 branch
    if not hasattr(random, "FP8GlobalStateManager"):
        random.FP8GlobalStateManager = types.SimpleNamespace(  # type: ignore[attr-defined]
            is_fp8_enabled=lambda: False, get_fp8_recipe=lambda: None
        )
        random.activation_recompute_forward = lambda **_k: nullcontext()  # type: ignore[attr-defined]
        random.fp8_autocast = lambda *_a, **_k: nullcontext()  # type: ignore[attr-defined]
    attention = importlib.import_module("megatron.core.transformer.multi_latent_attention")
    if not isinstance(attention.TELinear, type):  # a MagicMock there: isinstance() raises
        attention.HAVE_TE = False  # type: ignore[attr-defined]
    if attention.Linear is None:
        # 0.19.2 has its name only with TransformerEngine, and refuses whatever it does not know.
        layers = importlib.import_module("megatron.core.post_training.modelopt.layers")
        attention.Linear = layers.Linear  # type: ignore[attr-defined]
