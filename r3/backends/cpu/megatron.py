"""Stand-ins for Megatron-Core on CPU with gloo.

How: Megatron's modules reach CUDA through their module-global name `torch`. `install()` rebinds
that one name, only inside `megatron.core.*`, to a proxy whose `.cuda` is the host and whose tensor
factories map device "cuda" to "cpu". The rest of the process (vLLM, transformers, torch itself)
still sees the real torch. Each stand-in names the upstream place that needs it (Megatron-Core
0.16.1).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

_CPU = torch.device("cpu")


class _Stream:
    """A stream whose work is always done, for moe/token_dispatcher.py and shared_experts.py."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None: ...
    def wait_stream(self, *_args: Any) -> None: ...
    def wait_event(self, *_args: Any) -> None: ...
    def record_event(self, *_args: Any) -> _Event:
        return _Event()

    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_args: Any) -> None: ...


class _Event:
    """An event that has always happened."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None: ...
    def record(self, *_args: Any) -> None: ...
    def wait(self, *_args: Any) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True


# one object, so that "is this the current stream" comparisons keep their meaning
_ONE_STREAM = _Stream()


class _Cuda(types.ModuleType):
    """`torch.cuda` as the host. Names not listed fall through to the real module."""

    def __init__(self) -> None:
        super().__init__("torch.cuda")
        self.Stream, self.Event = _Stream, _Event
        for kind in ("FloatTensor", "HalfTensor", "BFloat16Tensor"):
            setattr(self, kind, getattr(torch, kind))
        nothing: Callable[..., None] = lambda *_a, **_k: None  # noqa: E731
        stand_ins: dict[str, Callable[..., Any]] = {
            # param_and_grad_buffer.py, rope, p2p_communication.py, tp/layers.py, router.py
            "current_device": lambda: _CPU,
            "synchronize": nothing,  # p2p_communication.py, dist_checkpointing
            "current_stream": lambda *_a, **_k: _ONE_STREAM,  # moe/token_dispatcher.py
            "default_stream": lambda *_a, **_k: _ONE_STREAM,  # param_and_grad_buffer.py
            "stream": lambda *_a, **_k: contextlib.nullcontext(),
            "manual_seed": torch.manual_seed,  # tensor_parallel/random.py
            "get_rng_state": lambda *_a, **_k: torch.get_rng_state(),
            "set_rng_state": lambda state, *_a, **_k: torch.set_rng_state(state),
        }
        for name, stand_in in stand_ins.items():
            setattr(self, name, stand_in)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


class _Distributed(types.ModuleType):
    """`torch.distributed` with uneven list collectives, for tensor_parallel/mappings.py."""

    def __init__(self) -> None:
        super().__init__("torch.distributed")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.distributed, name)

    @staticmethod
    def all_gather(
        outputs: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        real = torch.distributed
        if real.get_backend(group) != "gloo" or len({tuple(out.shape) for out in outputs}) == 1:
            return real.all_gather(outputs, tensor, group=group, async_op=async_op)
        longest = max(out.shape[0] for out in outputs)
        padded = tensor.new_zeros(longest, *tensor.shape[1:])
        padded[: tensor.shape[0]] = tensor
        gathered = [torch.empty_like(padded) for _ in outputs]
        real.all_gather(gathered, padded, group=group)
        for out, full in zip(outputs, gathered, strict=True):
            out.copy_(full[: out.shape[0]])
        return None

    @staticmethod
    def reduce_scatter(
        output: torch.Tensor,
        inputs: list[torch.Tensor],
        op: Any = torch.distributed.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        real = torch.distributed
        if real.get_backend(group) != "gloo" or len({tuple(part.shape) for part in inputs}) == 1:
            return real.reduce_scatter(output, inputs, op=op, group=group, async_op=async_op)
        full = torch.cat(inputs)
        real.all_reduce(full, op=op, group=group)
        output.copy_(full.split([part.shape[0] for part in inputs])[real.get_rank(group)])
        return None


_FACTORIES = (
    *("tensor", "zeros", "ones", "empty", "full", "arange", "randn", "rand", "randint"),
    *("empty_like", "zeros_like", "ones_like", "as_tensor", "linspace", "eye"),
)


def _names_cuda(device: Any) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


class _Torch(types.ModuleType):
    """`torch` as Megatron's modules see it: factories asked for a CUDA tensor make a host tensor
    (schedules.py, clip_grads.py, grad_scaler.py, optimizer.py, utils.py)."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.cuda = _Cuda()
        self.distributed = _Distributed()
        for name in _FACTORIES:
            setattr(self, name, self._on_host(getattr(torch, name)))

    @staticmethod
    def _on_host(factory: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(factory)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if _names_cuda(kwargs.get("device")):
                kwargs["device"] = _CPU
            return factory(*args, **kwargs)

        return wrapped

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


_proxy: _Torch | None = None

# What R3 uses of Megatron: these import the rest. `install` rebinds what is imported later.
_MODULES = (
    "models.gpt.gpt_layer_specs",
    "optimizer",
    "pipeline_parallel.schedules",
    "dist_checkpointing.strategies.fully_parallel",
    "dist_checkpointing.strategies.torch",
)


def install() -> None:
    """Install the stand-ins, before Megatron is used and after more of it is imported."""
    global _proxy
    # "CPU RNG state changed"
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)
    if _proxy is None:
        _proxy = _Torch()
        for name in _MODULES:
            importlib.import_module(f"megatron.core.{name}")
        _serve_without_cuda()
    for name, module in list(sys.modules.items()):
        if (
            name.startswith("megatron.core")
            and module is not None
            and module.__dict__.get("torch") is torch
        ):
            module.torch = _proxy  # type: ignore[attr-defined]


def _serve_without_cuda() -> None:
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    random._get_cuda_rng_state = lambda *_a, **_k: torch.get_rng_state()  # type: ignore[attr-defined]
    random._set_cuda_rng_state = lambda state, *_a, **_k: torch.set_rng_state(state)  # type: ignore[attr-defined]

    # moe/token_dispatcher.py ignores as_numpy for host tensors, and gloo's all-to-all wants plain
    # split sizes.
    def to_host(tensor: Any, as_numpy: bool = False, **_options: Any) -> Any:
        return tensor.cpu().numpy() if torch.is_tensor(tensor) and as_numpy else tensor

    dispatcher = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    dispatcher.maybe_move_tensor_to_cpu = to_host  # type: ignore[attr-defined]
    # Raises on a CPU build of torch; many places of Megatron call it on fresh tensors.
    torch.Tensor.cuda = lambda self, *_a, **_k: self


@contextlib.contextmanager
def cuda_type_names() -> Iterator[None]:
    """Inside, `param.type()` returns CUDA names, which building and clipping of optimizers need."""
    if _proxy is None:
        yield
        return
    real = torch.Tensor.type

    def named(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = real(self, *args, **kwargs)
        return (
            answer.replace("torch.", "torch.cuda.", 1)
            if isinstance(answer, str) and ".cuda." not in answer
            else answer
        )

    torch.Tensor.type = named
    try:
        yield
    finally:
        torch.Tensor.type = real
