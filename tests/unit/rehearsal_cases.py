"""R3's policy, its packing, a step of training and its weight stream on a fake CUDA device."""

import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from types import MappingProxyType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks import gpu
from r3 import extras
from r3.algo.packing import as_batch, with_advantages
from r3.backends import expert_kernels
from r3.backends.cuda.fused_experts import DeviceExperts
from r3.config import Config
from r3.engine.direct_weights import StackedExperts, expert_leaves
from r3.engine.route_slots import SlotTable
from r3.judges import Batches
from r3.layers import local_tokens
from r3.models import Experts
from r3.models.shape import ModelShape
from r3.policy import Policy, scoring
from r3.routing import Replay
from r3.runtime import SideStream, Stash
from r3.runtime.device import Device, prepare_environment, seed_everything, select_device
from r3.runtime.mesh import Mesh, build_mesh, cuda_type_names
from r3.sync import WeightStream, pack_for
from r3.types import Batch
from tests.errors import message_of
from tests.fake_cuda import Order, fake_world
from tests.memory import CPU
from tests.policies import in_backward, step_rewards, train_step
from tests.settings import changed
from tests.tiny import random_rollouts, tiny_config
from tests.wrong_routes import patched

Transfer: Any = extras.dispatch().Transfer
# What a step of a large run sets: everything that has a path of its own on CUDA.
SECTIONS: dict[str, dict[str, Any]] = {
    "model": {"dtype": "bfloat16", "fp32_head": True, "router_logits": "engine"},
    "engine": {"dtype": "bfloat16"},
    "train": {"updates_per_step": 2, "logprob_chunk_tokens": 32},
    "algo": {"kl_coef": 0.1, "correction": "token_tis"},
    "replay": {"mode": "r3", "shadow_every": 1},
}


def config_of(path: str, **changes: Mapping[str, Any]) -> Config:
    """`SECTIONS` with changes of some fields."""
    names = {*SECTIONS, *changes}
    sections = {name: {**SECTIONS.get(name, {}), **changes.get(name, {})} for name in names}
    return tiny_config(path, **sections)


@contextmanager
def job(
    rank: int = 0, size: int = 1, parallel: Mapping[str, int] = MappingProxyType({}), **options: Any
) -> Iterator[tuple[Device, Mesh]]:
    """Inside, the process is one rank of a CUDA job; `options` are those of `fake_world`."""
    with fake_world(topk=2, rank=rank, size=size, **options):
        place: dict[str, Any] = dict(rank=rank, local_rank=rank, world_size=size)
        device = replace(CPU, torch=torch.device("cuda", 0), is_cuda=True, **place)
        yield device, build_mesh(device, tiny_config(parallel={**parallel}).parallel)


def batches_of(mesh: Mesh, shape: ModelShape) -> list[Batch]:
    """Two updates, of two micro-batches and of one, with ragged lengths and a missing route."""
    layers = len(shape.moe_layers)
    rollouts = random_rollouts(shape, [17, 30, 9])
    rollouts[1].routed_experts[3:5] = -1
    parts = [pack_for(mesh, shape, {i: one}, num_layers=layers) for i, one in enumerate(rollouts)]
    advantages_R = torch.full((len(parts),), 0.5)
    batches = (
        as_batch(some, num_loss_tokens=50, num_sequences=len(some))
        for some in (parts[:2], parts[2:])
    )
    return [with_advantages(batch, advantages_R) for batch in batches]


def step(config: Config, device: Device, mesh: Mesh) -> Policy:
    """Build a policy, train one step, and hand its memory over and back."""
    trained = Policy(config, device, mesh, ModelShape.read(config.model.path), trains=True)
    batches, stash = batches_of(mesh, trained.shape), trained.memory._stash
    reserved = set(stash.coming)
    reported: dict[str, Any] = {}
    rewards = step_rewards(torch.ones(3), torch.tensor([0, 0, 1]))
    train_step(trained, batches, config, rewards=rewards, report=reported.update)
    trained.offload()
    trained.onload()
    # Host memory for all tensors of the optimizer was reserved, and for nothing else.
    assert reserved and reserved == stash.pinned.keys() and not stash.coming
    assert "loss/total" in reported or not trained.reports, reported.keys()
    return trained


def check_stream(trained: Policy, device: Device, mesh: Mesh) -> int:
    """Stream all weights and copy the experts; returns how many tensors came."""
    shape = trained.shape
    sizes = {
        "linear_fc1.weight": (2 * shape.moe_ffn_size, shape.hidden_size),
        "linear_fc2.weight": (shape.hidden_size, shape.moe_ffn_size),
        "linear_fc1.bias": (2 * shape.moe_ffn_size,),
        "linear_fc2.bias": (shape.hidden_size,),
    }
    of: dict[str, Any] = dict(dtype=torch.bfloat16, device=device.torch)
    parts, experts = expert_leaves(shape), shape.num_experts
    stacks = {
        layer: StackedExperts(
            held={part: torch.empty(experts, *sizes[part], **of) for part in parts},
            rank=0,
            alternates=shape.moe_names.alternates,
        )
        for layer in shape.moe_layers
    }
    count = 0
    stream = WeightStream(trained, device, mesh)
    for name, tensor in stream.read():
        assert tuple(tensor.shape) == shape.tensor_shapes[name], name
        # Expert biases stay float32.
        assert tensor.device == device.torch and tensor.dtype in (torch.bfloat16, torch.float32)
        count += 1
    for key, full in stream.read_blocks():
        if isinstance(key, Experts):
            assert full.device == device.torch
            stacks[key.layer].copy(key, full)
    assert all(stack.is_complete for stack in stacks.values())
    return count


def families(folders: dict[str, str]) -> dict[str, int]:
    """A step of every checkpoint, and its weights; returns how many tensors each has."""
    with job() as where:
        return {
            name: check_stream(step(config_of(folder), *where), *where)
            for name, folder in folders.items()
        }


def settings(steps: list[tuple[str, dict[str, dict[str, Any]]]]) -> int:
    """Steps, each with a checkpoint and changes of the settings; returns how many there were."""
    with job() as where:
        extras.streamed().PART_VALUES = 1 << 14  # a streamed optimizer has several parts
        for path, change in steps:
            values = {f"{key}.{n}": v for key, fields in change.items() for n, v in fields.items()}
            step(changed(values, config_of(path)), *where)
    return len(steps)


def compiled_functions() -> list[str]:
    """Names of Megatron's functions that torch.compile has wrapped."""
    return sorted(
        f"{name}.{key}"
        for name, module in sys.modules.items()
        if name.startswith("megatron.core")
        for owner in (module, *(one for one in vars(module).values() if isinstance(one, type)))
        if owner is module or owner.__module__ == name
        for key, value in vars(owner).items()
        if "_torchdynamo_orig_callable" in getattr(value, "__dict__", {})
        and value.__module__.startswith("megatron.core")
    )


class Seen(TorchDispatchMode):
    """Lists what `look(name, func, args, kwargs, result)` says of each operation.

    Attributes:
        found: what it said, but for empty texts.
    """

    def __init__(self, look: Callable[[str, Any, Any, Any, Any], str]) -> None:
        super().__init__()
        self.found: list[str] = []
        self._look = look

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        said = self._look(func.overloadpacket.__name__, func, args, kwargs or {}, result)
        self.found += [said] if said else []
        return result


def refused(name: str, _func: Any, args: Any, _kwargs: Any, _result: Any) -> str:
    """Raise an error where a CUDA kernel does in deterministic mode, and has a forward.

    Those that the documentation of `torch.use_deterministic_algorithms` lists, as far as language
    models can come near them.
    """
    is_refused = (
        name in ("put_", "histc", "median", "nll_loss_forward", "nll_loss2d_forward")
        or (name == "cumsum" and args[0].is_floating_point())
        or (name == "bincount" and len(args) > 1 and args[1] is not None)
        or (name == "scatter_reduce" and args[4] == "prod")
    )
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    if is_refused and args[0].is_cuda and not warns:
        raise RuntimeError(f"{name} has no deterministic implementation")
    return ""


def waits(name: str, func: Any, args: Any, kwargs: Any, result: Any) -> str:
    """The name of an operation for which the host waits until the device is done."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)]
    found = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & {*func.tags}
    does = bool(found)
    if name == "index":  # its result has a known shape unless it is indexed by a mask
        does = any(one.dtype == torch.bool for one in tensors[1:])
    elif name in ("copy_", "_to_copy"):
        tensors.append(result)
        between = len({one.device.type for one in tensors}) > 1
        # copy_(to, from, non_blocking)
        does = between and not (kwargs.get("non_blocking") or True in args[2:3])
    return name if does and any(one.is_cuda for one in tensors) else ""


def waits_of_a_layer(path: str, kinds: list[str]) -> dict[str, list[str]]:
    """What forward and backward of a MoE layer under replay wait for: router, dispatch, experts."""
    found = {}
    with job() as (device, mesh):
        for kind in kinds:
            config = config_of(path, model={"experts": kind})
            trained = Policy(config, device, mesh, ModelShape.read(config.model.path))
            micro_batch = batches_of(mesh, trained.shape)[0][0]
            tokens = local_tokens(micro_batch, mesh.cp, device.torch)
            sizes = len(tokens.tokens_N), 1, trained.shape.hidden_size
            hidden = torch.randn(sizes, device="cuda").bfloat16()
            last = trained.chunks[0].decoder.layers[-1]
            captured_N, routes_N = tokens.captured_N, tokens.routed_experts_NLK[:, -1]
            rows = int(captured_N.sum())
            routes_N, captured_N = routes_N.to(device.torch), captured_N.to(device.torch)
            with trained.replay.schedule("replay", training=True), Seen(waits) as seen:
                tap = trained.replay.taps[last.layer_number - 1]
                tap.load(routes_N, captured_N, rows=rows)
                last.mlp(hidden.requires_grad_())[0].sum().backward()
            found[kind] = seen.found
    return found


def capture(graph: int = 8) -> dict[str, Any]:
    """A pass of the hook that captures routes, as inside a CUDA graph of `graph` tokens."""
    found: dict[str, Any] = {}
    with fake_world(topk=2):
        slots_N = torch.zeros(64, dtype=torch.int64, device="cuda")
        table = SlotTable(3, 2, blocks=4, block_size=16, slots_N=slots_N)
        chosen_NK = torch.zeros(graph, 2, dtype=torch.int32, device="cuda")
        with Seen(waits) as seen:
            for layer in range(3):
                table.write(layer, chosen_NK)
        found["waits of a write"] = seen.found
        with Seen(waits) as seen:
            table.read([0, 1], 3, 20)
        found["waits of a read"] = seen.found
        table.empty([1, 2])
        wrong = {
            "choices on the host": chosen_NK.cpu(),
            "more tokens than slots": torch.zeros(65, 2, dtype=torch.int32, device="cuda"),
            "another number of experts": torch.zeros(graph, 3, dtype=torch.int32, device="cuda"),
        }
        for name, choices in wrong.items():
            write = lambda choices=choices: table.write(0, choices)  # noqa: E731
            found[name] = message_of(write, RuntimeError, IndexError)
    return found


@contextmanager
def deterministic_kernels() -> Iterator[None]:
    """Switch deterministic mode on as a run does."""
    seed_everything(1, deterministic=True)
    try:
        with Seen(refused):
            yield
    finally:
        torch.use_deterministic_algorithms(False)


def process(path: str) -> dict[str, Any]:
    """What is set once in a process, or in each of its threads."""
    found: dict[str, Any] = {"compiled before": compiled_functions()}
    os.environ.pop("VLLM_LOGGING_LEVEL", None)
    os.environ["LOCAL_RANK"] = "1"
    with job(rank=1, size=2) as (device, mesh):
        prepare_environment()
        found["logging"] = os.environ["VLLM_LOGGING_LEVEL"]
        with deterministic_kernels():
            step(config_of(path), device, mesh)
            found["deterministic"] = torch.are_deterministic_algorithms_enabled()
            sum_up = lambda: torch.ones(3, device="cuda").cumsum(0)  # noqa: E731
            found["cumsum"] = message_of(sum_up, RuntimeError)
        found["compiled"] = compiled_functions()
        kept, tensor = Stash(device=device), torch.ones(8, device="cuda")
        with Seen(lambda name, _, args, *__: args[0].device.type if name == "copy_" else "") as to:
            for move in (kept.put, kept.put, kept.get, kept.get) * 2:
                move("x", tensor)
        found["stash"] = to.found
        select_device()
        thread = threading.Thread(target=lambda: devices.append(torch.cuda.current_device()))
        devices = [torch.cuda.current_device()]
        thread.start()
        thread.join()
        found["a rank's device, and a new thread's"] = devices
        score = lambda many: [float(torch.cuda.current_device())] * len(many)  # noqa: E731
        scorer = Batches(lambda *_: [1], score, size=1, tokens=1, wait_s=0.0)
        scorer.start(0, len, ())
        ((_, found["reward model's device"], _),) = scorer.collect(60.0)
        scorer.close()
    return found


def nothing(_wait: Callable[..., Any]) -> Callable[..., None]:
    """In place of a wait."""
    return lambda: None


def order_of_streams(path: str) -> dict[str, int]:
    """Races of an optimizer's updates, streamed and resident: as it is, and without its waits."""
    order = Order()
    found = {}
    with job(order=order) as where:
        extras.streamed().PART_VALUES = 1 << 14  # several parts
        trained = step(config_of(path, train={"optimizer": "streamed"}), *where)
        in_part = {"optimizer": "streamed", "optimizer_kept_gib": 5e-4}
        some_kept = step(config_of(path, train=in_part), *where).memory
        assert some_kept._staying and some_kept._stash.sizes, "some stays, some moves"
        found["a step"] = len(order.races)
        coming, going = trained.memory._coming, trained.memory._going

        @contextmanager
        def unordered(stream: SideStream) -> Iterator[None]:
            with torch.cuda.stream(stream._stream):
                yield

        without: dict[str, tuple[SideStream, str, Callable[..., Any]]] = {
            "nothing": (coming, "join", lambda real: real),
            "coming.join": (coming, "join", nothing),
            "going.finish": (going, "finish", nothing),
            "going.join": (going, "join", nothing),
            "coming.after_current": (coming, "after_current", lambda _: lambda: unordered(coming)),
            "going.after_current": (going, "after_current", lambda _: lambda: unordered(going)),
        }
        for name, wait in without.items():
            order.races.clear()
            for values in (1 << 40, 1 << 14):  # a single part, and several where that has no race
                extras.streamed().PART_VALUES = values
                torch.cuda.synchronize()
                with patched(*wait), cuda_type_names():
                    for _ in range(0 if order.races else 2):
                        trained.optimizer.step()
            found[f"without {name}"] = len(order.races)
        resident = step(config_of(path), *where)
        for name, what in product(("step", "offload"), ("nothing", "coming.join")):
            order.races.clear()
            with patched(resident.memory._coming, "join", without[what][2]):
                resident.offload()
                resident.onload()
                with cuda_type_names():
                    if name == "step":
                        resident.optimizer.step()
                    resident.offload()
            resident.onload()
            found[f"resident {name} without {what}"] = len(order.races)
    return found


def order_of_transfers(path: str) -> dict[str, Any]:
    """A pass of divided experts: races as it is and without waits, and products beside transfers.

    Args:
        path: a checkpoint with shared experts.
    """
    order = Order()
    found: dict[str, Any] = {}
    parallel = {"ep": 2}
    with job(rank=1, size=2, parallel=parallel, order=order) as (device, mesh):
        config = config_of(path, parallel=parallel)
        trained = Policy(config, device, mesh, ModelShape.read(path))
        batch = batches_of(mesh, trained.shape)[0]

        def run(skipped: Callable[[], bool]) -> tuple[int, dict[str, int]]:
            """Races and products of a pass, which leaves out some waits for tokens."""
            order.races.clear()
            torch.cuda.synchronize()
            pending: list[Transfer] = []

            def starting(start: Callable[..., None]) -> Callable[..., None]:
                def starts(transfer: Transfer, *args: Any, **kwargs: Any) -> None:
                    start(transfer, *args, **kwargs)
                    pending.append(transfer)

                return starts

            def finishing(finish: Callable[..., Any]) -> Callable[..., Any]:
                def finishes(transfer: Transfer) -> list[torch.Tensor]:
                    pending.remove(transfer)
                    are_sizes = not transfer._results[0].is_floating_point()
                    if skipped() and not are_sizes:
                        transfer._pending.clear()
                    return finish(transfer)

                return finishes

            def beside(name: str, *_: Any) -> str:
                """Direction and name of a product that is queued while rows travel."""
                is_one = name.endswith("mm") and pending
                return f"{'backward' if in_backward() else 'forward'} {name}" if is_one else ""

            with (
                patched(Transfer, "start", starting),
                patched(Transfer, "finish", finishing),
                Seen(beside) as seen,
                cuda_type_names(),
            ):
                trained.forward_backward(batch)
            return len(order.races), dict(Counter(seen.found))

        found["races"], found["products"] = run(lambda: False)
        found["races without waits in forward"], _ = run(lambda: not in_backward())
        found["races without waits in backward"], _ = run(in_backward)
        found["layers"] = len(trained.shape.moe_layers) * len(batch)
    return found


def layout(path: str, rank: int, parallel: dict[str, int], experts: str = "auto") -> bool:
    """A step as one of two ranks that share every sequence, the experts or the layers."""

    def of_rank(item: Any, other: int) -> Any:
        """A stage gathers the numbers of its layers, and every stage has as many."""
        if "pp" in parallel and isinstance(item, list) and {*map(type, item)} == {int}:
            return [layer + (other - rank) * len(item) for layer in item]
        return item

    with job(rank=rank, size=2, parallel=parallel, of_rank=of_rank) as where:
        step(config_of(path, model={"experts": experts}, parallel=parallel), *where)
    return True


def first_experiments() -> list[str]:
    """The experiments of benchmarks/gpu.py that use one device."""
    experiments = (gpu.attention, gpu.grouped, gpu.kernels, gpu.layer, gpu.stash)
    with fake_world(topk=8):
        # plain torch, for comparison, asks how many rows there are
        expert_kernels.sum_rows = torch.ops.r3.sum_rows
        for experiment in experiments:
            experiment()
    return [experiment.__name__ for experiment in experiments]


def _with(field: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    """Wraps `local_tokens`, which then changes a field."""

    def wrap(real: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*args: Any) -> Any:
            tokens = real(*args)
            return replace(tokens, **{field: change(getattr(tokens, field))})

        return changed

    return wrap


def _float_experts(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, tokens, *rest: forward(self, tokens.float(), *rest)


def _on_the_host(load: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, routes, *rest, **facts: load(self, routes.cpu(), *rest, **facts)


MISTAKES: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "advantages on the host": (scoring, "local_tokens", _with("advantages_N", torch.Tensor.cpu)),
    "a loss mask that is too short": (
        scoring,
        "local_tokens",
        _with("loss_mask_N", lambda mask: mask[:-1]),
    ),
    "routes on the host": (Replay, "load", _on_the_host),
    "experts in two dtypes": (DeviceExperts, "forward", _float_experts),
}


def mistakes(path: str, narrow: str) -> dict[str, str]:
    """Steps with a mistake in them; returns the error of each.

    Args:
        path: a checkpoint.
        narrow: a checkpoint whose experts are narrower than a kernel's alignment.
    """
    errors = {}
    with job() as where:

        def attempt(path: str) -> str:
            kinds = RuntimeError, TypeError, AssertionError
            return message_of(lambda: step(config_of(path), *where), *kinds)

        for name, mistake in MISTAKES.items():
            with patched(*mistake):
                errors[name] = attempt(path)
        errors["experts that are not aligned"] = attempt(narrow)
        errors["no mistake"] = attempt(path)
    return errors
