"""Runs R3's CUDA path without a GPU, on torch's fake tensors.

A fake tensor has a device, a dtype, a shape and strides, and no contents. Every operation computes
those of its result, and raises an error where CUDA would: tensors on two devices, shapes that do
not fit, dtypes or strides that a kernel does not take.

What asks for contents, for the driver or for other ranks gets an answer from here; each answer
names who asks. Torch itself, Megatron-Core and R3 run as they are.

python -m tests.fake_cuda MODULE:CASE '{"argument": 1}'   prints what the case returns, as JSON
"""

import ctypes
import hashlib
import importlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.warm import interpreter

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


def preload() -> None:
    """Import what the cases import."""
    # Torch asks once whether it has CUDA, when it is imported.
    ctypes.CDLL(str(library()))
    for module in ("tests.unit.rehearsal_cases", "torch.nn.attention.varlen"):
        importlib.import_module(module)


def rehearse(case: Callable[..., Any], **arguments: Any) -> Any:
    """Run a case in a process of its own, on the fake device, and return its result.

    Without a GPU it is forked from a process that has imported the cases.

    Raises:
        AssertionError: the case failed; the message ends with its output.
    """
    name = f"{case.__module__}:{case.__name__}"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment.pop("TORCHDYNAMO_DISABLE", None)  # set on CPU only
    python = interpreter("tests.fake_cuda:preload")
    done = subprocess.run(
        [python, "-m", "tests.fake_cuda", name, json.dumps(arguments)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=590,
    )
    if done.returncode:
        raise AssertionError(f"{name} {arguments}\n{done.stdout[-1000:]}\n{done.stderr[-8000:]}")
    return json.loads(done.stdout.splitlines()[-1])


class Order:
    """What orders the work on several streams, and accesses to memory that nothing orders.

    Collectives run on a stream of their own, as with NCCL. It waits for the current one, which
    waits for a collective when its work is waited for.

    Clocks are those of torch's own sanitizer for CUDA. Memory is that of whole storages. As in
    torch's allocator, memory that is freed belongs to the stream it was made on, which may use it
    again at once.

    Attributes:
        stream: number of the current stream.
        races: operations on memory that another stream may be using.
    """

    def __init__(self) -> None:
        from torch.cuda._sanitizer import StreamSynchronizations

        self.clocks = StreamSynchronizations()
        self.numbers = itertools.count(1)  # of streams and events
        self.stream = 0
        self._collectives = next(self.numbers)
        self.clocks.create_stream(self._collectives)
        self.races: list[str] = []
        self._now = 0
        self._blocks: dict[int, int] = {}  # storage -> its block
        self._made_on: dict[int, int] = {}
        self._free: dict[tuple[int, int], list[int]] = {}  # (stream, bytes) -> blocks
        self._writes: dict[int, tuple[int, int]] = {}  # block -> (stream, time)
        self._reads: dict[int, list[tuple[int, int]]] = {}
        self._works: list[Any] = []

    def made(self, storage: Any) -> int:
        """A storage has new memory, made on the current stream."""
        free = self._free.get((self.stream, storage.nbytes()), [])
        block = free.pop() if free else len(self._made_on)
        self._made_on[block] = self.stream
        self._blocks[storage._cdata] = block
        return block

    def freed(self, storage: Any) -> None:
        """The memory of a storage can be made anew."""
        block = self._blocks.pop(storage._cdata, None)
        if block is not None:
            key = (self._made_on[block], storage.nbytes())
            self._free.setdefault(key, []).append(block)

    def collective(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A collective was queued; returns its work. It fills its first argument."""
        from torch.distributed import Work

        clocks, began, ended = self.clocks, next(self.numbers), next(self.numbers)
        for event in (began, ended):
            clocks.create_event(event)
        clocks.record_state(began, self.stream)
        before, self.stream = self.stream, self._collectives
        clocks.stream_wait_for_event(self.stream, began)
        self.ran(func, args, kwargs, ())
        clocks.record_state(ended, self.stream)
        self.stream = before

        class Collective(Work):
            def wait(work, timeout: Any = None) -> bool:
                clocks.stream_wait_for_event(self.stream, ended)
                return True

        self._works.append(Collective())  # C++ keeps no reference to the Python object
        return self._works[-1].boxed()

    def ran(self, func: Any, args: Any, kwargs: Any, results: Any) -> None:
        """An operation was queued on the current stream."""
        from torch.cuda._sanitizer import zip_arguments
        from torch.utils._pytree import tree_leaves

        read, written, given = set(), set(), set()

        def storages(value: Any) -> Iterator[Any]:
            for leaf in tree_leaves(value):
                # Host memory matters where a copy reads or fills it.
                copies = func.overloadpacket.__name__ == "copy_"
                if hasattr(leaf, "fake_device") and (leaf.is_cuda or copies):
                    yield leaf.untyped_storage()

        is_collective = func.namespace == "c10d"
        for number, (argument, value) in enumerate(zip_arguments(func._schema, args, kwargs)):
            alias = argument.alias_info
            is_filled = is_collective and number == 0
            for storage in storages(value):
                given.add(storage._cdata)
                block = self._blocks.get(storage._cdata)
                block = self.made(storage) if block is None else block
                if is_filled or alias is None or alias.is_write:
                    (written if is_filled or alias else read).add(block)
        written |= {self.made(one) for one in storages(results) if one._cdata not in given}
        self._now += 1
        self.clocks.update_seq_num(self.stream, self._now)
        for block in read | written:
            before = [self._writes[block]] if block in self._writes else []
            before += self._reads.get(block, []) if block in written else []
            for stream, time in before:
                if not self.clocks.is_ordered_after(self.stream, time, stream):
                    self.races.append(f"{func} on stream {self.stream} after stream {stream}")
            if block in written:
                self._writes[block], self._reads[block] = (self.stream, self._now), []
            else:
                self._reads.setdefault(block, []).append((self.stream, self._now))


@contextmanager
def fake_world(
    *,
    topk: int,
    rank: int = 0,
    size: int = 1,
    order: Order | None = None,
    of_rank: Callable[[Any, int], Any] = lambda item, _rank: item,
) -> Iterator[None]:
    """Inside, the process is one rank of a CUDA job. Call it once per process.

    Args:
        topk: experts per token.
        rank, size: this rank and the number of ranks; other ranks do the same as this one.
        order: is told what runs on which stream. None: there is one stream.
        of_rank: what another rank gathers where this one gathers an object.
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

    from r3.backends.cpu.megatron import _Event, _Stream
    from r3.backends.cuda import host_memory
    from r3.models import CheckpointReader

    current = threading.local()  # as in CUDA, a thread begins on device 0
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
            if func.namespace == "c10d":  # nothing arrives, and results have the given buffers
                only_work = [each.type.kind() for each in func._schema.returns] == ["ClassType"]
                if order is None:
                    work = FakeWork().boxed()
                else:
                    work = order.collective(func, args, kwargs or {})
                return work if only_work else (args[0], work)
            results = func(*args, **(kwargs or {}))
            if order is not None:
                order.ran(func, args, kwargs or {}, results)
            return results

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

    def norm(_chunk: int, _flag: Any, tensors: list[list[torch.Tensor]], *_: Any) -> Any:
        """Megatron's `local_multi_tensor_l2_norm`: reads each norm on the host."""
        return torch.stack([one.norm() for each in tensors for one in each]).norm()[None], None

    def gather(gathered: list[Any], item: Any, group: Any = None) -> None:
        others = len(gathered) == size
        gathered[:] = [
            of_rank(item, i) if others and i != rank else item for i in range(len(gathered))
        ]

    def blocks(sizes: Sequence[int], _registrar: Any) -> list[Future[None]]:
        """R3's `page_locked`: memory on the host is fake too."""
        done: Future[None] = Future()
        done.set_result(None)
        return [done for _ in sizes]

    driver: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: size,
        "current_device": lambda: getattr(current, "device", 0),
        "set_device": lambda device: setattr(current, "device", device),
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "current_stream": lambda *_: stream,
        "Stream": _Stream,
        "Event": _Event,
        "stream": lambda *_: nullcontext(),
        "manual_seed": lambda *_: None,
        "is_current_stream_capturing": lambda: False,
        "mem_get_info": lambda *_: (0, 0),
    }
    host_memory.page_locked = blocks
    host_memory.tensor_on = lambda _pages, like: torch.empty(like.shape, dtype=like.dtype)
    if order is not None:
        driver |= _streams(order)
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
    clip_grads.l2_norm_impl = norm
    dist.all_gather_object = gather
    # Borders of sequences are made on the host and read there: tensors of that size keep contents.
    fake_tensor.CONSTANT_NUMEL_LIMIT = 1024
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    with Fakes(allow_non_fake_inputs=True), Answers():
        yield


def _streams(order: Order) -> dict[str, Any]:
    """Names of torch.cuda that tell the order of several streams. Storages tell it their memory."""
    import torch

    from r3.backends.cpu.megatron import _Event, _Stream

    class Event(_Event):
        def __init__(self, *_args: Any, **_kwargs: Any) -> None:
            self.number = next(order.numbers)
            order.clocks.create_event(self.number)

        def record(self, stream: Any = None) -> None:
            order.clocks.record_state(self.number, stream.number if stream else order.stream)

        def wait(self, stream: Any = None) -> None:
            order.clocks.stream_wait_for_event(
                stream.number if stream else order.stream, self.number
            )

        def synchronize(self) -> None:
            order.clocks.all_streams_wait_for_event(self.number)

    class Stream(_Stream):
        def __init__(self, *_args: Any, number: int | None = None, **_kwargs: Any) -> None:
            self.number = next(order.numbers) if number is None else number
            order.clocks.create_stream(self.number)

        def record_event(self, event: Any = None) -> Any:
            event = event or Event()
            event.record(self)
            return event

        def wait_event(self, event: Any) -> None:
            event.wait(self)

        def wait_stream(self, other: Any) -> None:
            self.wait_event(other.record_event())

        def synchronize(self) -> None:
            order.clocks.all_streams_wait_for_stream(self.number)

    @contextmanager
    def entered(stream: Any) -> Iterator[None]:
        before, order.stream = order.stream, stream.number
        try:
            yield
        finally:
            order.stream = before

    real_resize = torch.UntypedStorage.resize_

    def resize(storage: Any, nbytes: int) -> Any:
        if nbytes == 0:
            order.freed(storage)
        result = real_resize(storage, nbytes)
        if nbytes:
            order.made(storage)
        return result

    torch.UntypedStorage.resize_ = resize
    streams: dict[int, Any] = {}
    return {
        "Stream": Stream,
        "Event": Event,
        "stream": entered,
        "current_stream": lambda *_: streams.setdefault(order.stream, Stream(number=order.stream)),
        "synchronize": lambda *_: order.clocks.sync_all_streams(),
    }


if __name__ == "__main__":
    preload()
    module, case = sys.argv[1].split(":")
    result = getattr(importlib.import_module(module), case)(**json.loads(sys.argv[2]))
    sys.stdout.write(f"\n{json.dumps(result)}\n")
    sys.stdout.flush()
    os._exit(0)
