"""Runs R3's CUDA path without a GPU, on torch's fake tensors.

A fake tensor has a device, a dtype, a shape and strides, and no contents. Every operation computes
those of its result, and raises an error where CUDA would: tensors on two devices, shapes that do
not fit, dtypes or strides that a kernel does not take.

What asks for contents, for the driver or for other ranks gets an answer from here; each answer
names who asks. Torch itself, Megatron-Core and R3 run as they are.

python -m tests.fake_cuda MODULE:CASE '{"argument": 1}'   prints what the case returns, as JSON
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "tests/fake_cuda.cpp"


def library() -> Path:
    """Compile `fake_cuda.cpp`, once per version and place of torch."""
    spec = find_spec("torch")
    assert spec is not None and spec.origin is not None
    torch = Path(spec.origin).parent
    # The path too: the library finds torch by it, and an environment may be gone later.
    content = SOURCE.read_bytes() + (torch / "version.py").read_bytes() + str(torch).encode()
    name = f"r3-fake-cuda-{os.getuid()}-{hashlib.sha256(content).hexdigest()[:16]}.so"
    built = Path(tempfile.gettempdir()) / name
    if not built.exists():
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder) / name
            command = ["g++", "-O0", "-std=c++20", "-shared", "-fPIC", str(SOURCE), "-o", str(made)]
            command += [f"-I{torch}/include", f"-L{torch}/lib", f"-Wl,-rpath,{torch}/lib"]
            subprocess.run([*command, "-lc10", "-ltorch_cpu"], check=True)
            made.replace(built)
    return built


def rehearse(case: Callable[..., Any], **arguments: Any) -> Any:
    """Run a case in a process of its own, on the fake device, and return its result.

    Raises:
        AssertionError: the case failed; the message ends with its output.
    """
    name = f"{case.__module__}:{case.__name__}"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.fake_cuda", name, json.dumps(arguments)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=590,
    )
    if done.returncode:
        raise AssertionError(f"{name} {arguments}\n{done.stdout[-1000:]}\n{done.stderr[-8000:]}")
    return json.loads(done.stdout.splitlines()[-1])


@contextmanager
def fake_world(*, topk: int, rank: int = 0, size: int = 1) -> Iterator[None]:
    """Inside, the process is one rank of a CUDA job. Call it once per process.

    Args:
        topk: experts per token.
        rank, size: this rank and the number of ranks; other ranks do the same as this one.
    """
    import torch
    import torch.distributed as dist
    from megatron.core.optimizer import clip_grads
    from megatron.core.transformer.moe import token_dispatcher
    from torch._C._distributed_c10d import FakeWork
    from torch._subclasses import fake_tensor
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch.utils._python_dispatch import TorchDispatchMode

    from r3.models.hf_checkpoint import CheckpointReader
    from r3.policy import fused_experts
    from r3.runtime.device_cpu import _Event, _Stream

    stream, real_numpy, real_pointer = _Stream(), torch.Tensor.numpy, torch.Tensor.data_ptr
    real_read = CheckpointReader.read

    class Answers(TorchDispatchMode):
        """Answers to operations whose result is, or depends on, contents."""

        def __torch_dispatch__(
            self, func: Any, _types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if (
                func is torch.ops.aten._local_scalar_dense.default
                and getattr(args[0], "constant", 0) is None
            ):
                return 1.0 if args[0].is_floating_point() else args[0].dtype == torch.bool or 1
            if func is torch.ops.aten.masked_select.default:
                # Megatron's permute (moe_utils.py): every token chose `topk` experts.
                return args[0].new_empty(args[1].shape[-1] * topk)
            if func is torch.ops.aten.nonzero.default:
                # R3's dispatch: every token chose `topk` experts, some of them on every rank.
                per_row = topk if args[0].dim() == 2 else 1
                return args[0].new_empty(
                    (args[0].shape[0] * per_row, args[0].dim()), dtype=torch.int64
                )
            if func.namespace == "c10d":  # nothing arrives, and results have the given buffers
                only_work = [each.type.kind() for each in func._schema.returns] == ["ClassType"]
                return FakeWork().boxed() if only_work else (args[0], FakeWork().boxed())
            return func(*args, **(kwargs or {}))

    class Fakes(FakeTensorMode):
        # `torch.tensor(..., device="cuda")` makes its tensor on the host first.
        avoid_device_init = True

    def numpy(tensor: torch.Tensor, **kwargs: Any) -> Any:
        """`Tensor.numpy`: ones. R3's metrics, Megatron's dispatcher."""
        if not isinstance(tensor, FakeTensor):
            return real_numpy(tensor, **kwargs)
        assert tensor.device.type == "cpu", f".numpy() of a tensor on {tensor.device}"
        with unset_fake_temporarily():
            return real_numpy(torch.ones(tensor.shape, dtype=tensor.dtype))

    def data_ptr(tensor: torch.Tensor) -> int:
        """`Tensor.data_ptr`: addresses of one storage are next to each other. WeightStream."""
        if not isinstance(tensor, FakeTensor):
            return real_pointer(tensor)
        offset = tensor.storage_offset() * tensor.element_size()
        return (tensor.untyped_storage()._cdata << 32) + offset

    def move(module: torch.nn.Module, fn: Any, recurse: bool = True) -> torch.nn.Module:
        """`Module.to`: a fake parameter cannot change its device, so each gets a successor."""
        for each in module.modules():
            for name, old in each._parameters.items():
                if old is not None:
                    with torch.no_grad():
                        new = torch.nn.Parameter(fn(old), old.requires_grad)
                    vars(new).update({k: v for k, v in vars(old).items() if k not in vars(new)})
                    each._parameters[name] = new
            for name, buffer in each._buffers.items():
                each._buffers[name] = None if buffer is None else fn(buffer)
        return module

    def read(*args: Any) -> torch.Tensor:
        """`CheckpointReader.read`: safetensors fills a tensor itself, which must be real."""
        with unset_fake_temporarily():
            return real_read(*args)

    def in_order(
        tokens: torch.Tensor, sizes: Any, order: Any, probs: Any = None, fused: bool = False
    ) -> Any:
        """Megatron's `sort_chunks_by_idxs`: sizes are read on the host."""
        return tokens.clone(), None if probs is None else probs.clone()

    real_exchange = token_dispatcher.all_to_all

    def exchange(group: Any, rows: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Megatron's `all_to_all`: sizes are read on the host. All ranks send equally many rows."""
        even = [len(rows) // group.size()] * group.size()
        return real_exchange(group, rows, even, even)

    def sizes(experts: torch.Tensor, count: int) -> list[int]:
        """R3's `fused_experts._sizes`: the last expert has all slots."""
        return [0] * count + [len(experts)]

    def norm(_chunk: int, _flag: Any, tensors: list[list[torch.Tensor]], *_: Any) -> Any:
        """Megatron's `local_multi_tensor_l2_norm`: reads each norm on the host."""
        return torch.stack([one.norm() for each in tensors for one in each]).norm()[None], None

    def gather(gathered: list[Any], item: Any, group: Any = None) -> None:
        gathered[:] = [item] * len(gathered)

    driver: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: size,
        "current_device": lambda: 0,
        "set_device": lambda *_: None,
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "current_stream": lambda *_: stream,
        "Stream": _Stream,
        "Event": _Event,
        "stream": lambda *_: nullcontext(),
        "manual_seed": lambda *_: None,
        "is_current_stream_capturing": lambda: False,
        "mem_get_info": lambda *_: (0, 0),
        "cudart": lambda: types.SimpleNamespace(cudaHostRegister=lambda pointer, size, flags: 0),
        "check_error": lambda result: None,
    }
    for name, answer in driver.items():
        setattr(torch.cuda, name, answer)
    state = torch.get_rng_state()
    for module in (torch.cuda, torch.cuda.random):
        module.get_rng_state = lambda *_, **__: state.clone()
        module.set_rng_state = lambda *_, **__: None
    torch.Tensor.record_stream = lambda *_: None
    torch.Tensor.numpy, torch.Tensor.data_ptr = numpy, data_ptr
    torch.nn.Module._apply = move
    CheckpointReader.read = read
    token_dispatcher.sort_chunks_by_idxs = in_order
    token_dispatcher.all_to_all = exchange
    fused_experts._sizes = sizes
    clip_grads.l2_norm_impl = norm
    dist.all_gather_object = gather
    # Borders of sequences are made on the host and read there: tensors of that size keep contents.
    fake_tensor.CONSTANT_NUMEL_LIMIT = 1024
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    with Fakes(allow_non_fake_inputs=True), Answers():
        yield


if __name__ == "__main__":
    # Torch asks once whether it has CUDA, when it is imported.
    ctypes.CDLL(str(library()))
    module, case = sys.argv[1].split(":")
    result = getattr(importlib.import_module(module), case)(**json.loads(sys.argv[2]))
    sys.stdout.write(f"\n{json.dumps(result)}\n")
    sys.stdout.flush()
    os._exit(0)
