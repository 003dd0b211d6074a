"""Real policies and batches of random rollouts; what their routers and gradients hold."""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from r3 import extras
from r3.algo.advantage import Reward, advantages_of, less_kl
from r3.algo.packing import with_advantages
from r3.config import Config
from r3.layers import local_tokens
from r3.metrics import Mean, mismatch
from r3.models import read_small_files
from r3.models.shape import BYTES_OF, ModelShape
from r3.policy import (
    NONE_MADE,
    Passes,
    Policy,
    TokenScores,
    earlier_passes,
    policy_loss,
    train_on,
)
from r3.policy.weight_slots import Slot
from r3.run import Checkpointer, RunState
from r3.runtime.device import Device
from r3.runtime.mesh import Mesh, build_mesh
from r3.sync import PackingSpec, WeightStream, distribute, export
from r3.tools.planning.sync import planned_shards
from r3.types import Batch, Rollout, Sample, Update
from r3.user_code import advantage_of
from tests.tiny import random_rollouts

ON_CPU, ON_CUDA = (extras.experts(is_cuda=is_cuda) for is_cuda in (False, True))
LENGTHS = (37, 12, 50, 9, 23, 31, 44, 18)


def build(device: Device, config: Config) -> tuple[Mesh, Policy]:
    """The mesh and the policy of a config."""
    mesh = build_mesh(device, config.parallel)
    return mesh, policy_of(device, mesh, config)


def build_with_batch(device: Device, config: Config, **how: Any) -> tuple[Mesh, Policy, Batch]:
    """The same, and one batch of `batches_of`."""
    mesh, policy = build(device, config)
    (batch,) = batches_of(mesh, policy.shape, **how)
    return mesh, policy, batch


def experts_as_on_cuda(kind: str) -> str:
    """The setting for a kind of experts. After "sorted", fused ones are those of CUDA for a while:
    until the next call.
    """
    used = ON_CUDA if kind == "sorted" else ON_CPU
    extras.experts = lambda *, is_cuda: used  # type: ignore[assignment]
    return "fused" if kind == "sorted" else kind


def policy_of(device: Device, mesh: Mesh, config: Config) -> Policy:
    """The policy of a config on a mesh that exists already."""
    policy = Policy(config, device, mesh, ModelShape.read(config.model.path))
    if config.model.experts == "fused":
        layers = [layer.mlp for chunk in policy.chunks for layer in chunk.decoder.layers]
        experts = [layer.experts for layer in layers if hasattr(layer, "experts")]
        asked = extras.experts(is_cuda=device.is_cuda)
        assert all(isinstance(each, asked) for each in experts), f"not {asked}: {experts}"
    return policy


def one_update(
    policy: Policy, batch: Batch, passes: Passes = NONE_MADE, *, total_updates: int
) -> tuple[Update, Mapping[str, Any]]:
    """One update of a policy: what the optimizer did, and the metrics."""
    metrics = policy.forward_backward(batch, passes)
    return policy.step(total_updates), metrics


def step_rewards(
    rewards_R: torch.Tensor, groups_R: torch.Tensor, units_R: torch.Tensor | None = None
) -> list[Reward]:
    """Rewards of a step; every rollout has an advantage of its own unless units are given."""
    units = range(len(rewards_R)) if units_R is None else units_R.tolist()
    return [
        Reward(
            key=(place, 0, 0),
            unit=(unit, 0, 0),
            baseline=(int(group), 0),
            raw=reward,
            shaped=reward,
            deciding=reward,
        )
        for place, (reward, group, unit) in enumerate(
            zip(rewards_R.double().tolist(), groups_R.tolist(), units, strict=True)
        )
    ]


def train_step(
    policy: Policy,
    batches: list[Batch],
    config: Config,
    *,
    report: Callable[[Mapping[str, Any]], None],
    rewards: Sequence[Reward] = (),
    step: int = 1,
) -> None:
    """Train on batches as the loop does; `rewards` give advantages only with KL taken from them."""
    passes, kl = earlier_passes(policy, batches, config, report=report)
    if kl:
        shaped = less_kl(rewards, kl, config.algo.kl_coef)
        advantages_R = advantages_of(shaped, advantage_of(config.algo))
        batches = [with_advantages(batch, advantages_R) for batch in batches]
    train_on(policy, batches, passes, config, step=step, report=report)


class Parts:
    """Parts of metrics that a step reports.

    Attributes:
        by_name: the parts of each metric.
    """

    def __init__(self) -> None:
        self.by_name: dict[str, list[Any]] = {}

    def report(self, metrics: Mapping[str, Any]) -> None:
        """Add a part of each of these."""
        for name, part in metrics.items():
            self.by_name.setdefault(name, []).append(part)

    def row(self) -> dict[str, float]:
        """The value of each metric."""
        return {name: type(some[0]).reduce(some) for name, some in self.by_name.items()}


def watch_scores(policy: Policy) -> list[tuple[str, int]]:
    """Mode and number of micro-batches of each pass that will score."""
    scored: list[tuple[str, int]] = []
    real = policy.score

    def counting(micro_batches: Any, **rest: Any) -> Any:
        scored.append((rest["mode"], len(micro_batches)))
        return real(micro_batches, **rest)

    policy.score = counting  # type: ignore[method-assign]  # the real one, counted
    return scored


@dataclass
class Part:
    """A part of a run that has these files in checkpoints."""

    files: Mapping[str, bytes]

    def state_dict(self) -> Mapping[str, bytes]:
        """The files."""
        return self.files

    def load_state_dict(self, state: Mapping[str, bytes]) -> None:
        """Take what the checkpoint has under their names."""
        self.files = {name: state[name] for name in self.files}


def save_checkpoint(
    folder: Path,
    policy: Policy,
    *,
    step: int,
    keep: int = 0,
    state: RunState | None = None,
    files: Mapping[str, bytes] | None = None,
) -> Path:
    """Save the state of a policy at once."""
    checkpointer = Checkpointer(folder, keep=keep, state=state)
    checkpointer.attach(Part(files or {}))
    copy = checkpointer.copy(policy, policy.device, policy.mesh, step=step)
    return checkpointer.write(copy, policy.mesh.world)


def same_state(one: Policy, other: Policy) -> bool:
    """Whether two policies have the same weights and optimizer, bit for bit."""
    with one.memory.optimizer_on_device(), other.memory.optimizer_on_device():
        pairs = zip(one.memory.optimizer_tensors(), other.memory.optimizer_tensors(), strict=True)
        states = all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)
    weights = ([policy.values(each) for each in policy.shared_buffers()] for policy in (one, other))
    return states and all(map(torch.equal, *weights))


def require_planned(policy: Policy) -> None:
    """Assert that this rank has the shards that are planned from sizes alone."""
    parallel, device = policy.config.parallel, policy.device
    size = BYTES_OF[policy.config.model.dtype]
    planned = planned_shards(policy.shape, parallel, device.world_size, device.rank, size)
    if policy.config.model.experts == "sequential":  # whose experts have tensors of their own
        names = {name for slot in policy.slots for name in slot.hf}
        assert names == {name for each in planned for name in each.hf}
        return
    assert {
        (slot.name, slot.hf, slot.kind, slot.index, slot.count, tuple(slot.tensor.shape), slot.rows)
        for slot in policy.slots
    } == {
        (each.name, each.hf, each.kind, each.index, each.count, each.shape, each.rows)
        for each in planned
    }
    sizes = {slot.name: slot.tensor.element_size() for slot in policy.slots}
    assert sizes == {each.name: each.item_size for each in planned}


def weights_of(policy: Policy) -> list[torch.Tensor]:
    """Copies of the tensors of this rank."""
    return [slot.tensor.clone() for slot in policy.slots]


def zero_gradients(policy: Policy) -> None:
    """Begin an update, as the policy does."""
    for chunk in policy.wrapped:
        chunk.zero_grad_buffer()
    policy.optimizer.zero_grad()


def export_policy(folder: Path, stream: WeightStream, policy: Policy) -> None:
    """Write the policy beside the small files of its starting model. All ranks must call."""
    small_files = read_small_files(policy.config.model.path)
    where = (folder, stream, policy, policy.device, policy.mesh)
    export(*where, small_files=small_files, metadata={})


def samples_of(mesh: Mesh, rollouts: Sequence[Rollout]) -> list[Sample]:
    """The samples of a step that this rank's engine would have made."""
    own = (each for each in rollouts if each.group % mesh.world.size == mesh.world.rank)
    return [Sample(rollout=rollout) for rollout in own]


def batches_of(
    mesh: Mesh,
    shape: ModelShape,
    lengths: Sequence[int] = LENGTHS,
    *,
    micro_batch_tokens: int = 128,
    num_updates: int = 1,
    layers: Sequence[int] | None = None,
) -> list[Batch]:
    """Batches of random rollouts, distributed as in a step. All ranks must call."""
    rollouts = random_rollouts(shape, lengths)
    advantages_R = torch.from_numpy(np.random.default_rng(5).standard_normal(len(rollouts)))
    batches, _ = distribute(
        samples_of(mesh, rollouts),
        mesh,
        shape,
        PackingSpec(
            num_updates=num_updates,
            micro_batch_tokens=micro_batch_tokens,
            on_missing="live",
            layers=layers,
        ),
    )
    return [with_advantages(batch, advantages_R) for batch in batches]


def by_expert(slot: Slot, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """A tensor of a slot by Megatron's name, those of experts one by one."""
    if slot.experts is None:
        yield slot.name, tensor
        return
    for number, one in enumerate(tensor, slot.experts.first):
        yield replace(slot.experts, first=number, count=1).name, one


def buffers_of(policy: Policy) -> list[Any]:
    """Megatron's buffers of parameters and gradients."""
    chunks = policy.wrapped
    return [b for chunk in chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]


def gathered(buffer: Any) -> torch.Tensor:
    """Reduced gradients of a buffer: each data-parallel rank owns one part of every bucket."""
    group, whole = buffer.data_parallel_group, torch.zeros_like(buffer.grad_data)
    for bucket in buffer.buckets:
        mine = bucket.grad_data.chunk(group.size())[group.rank()].clone()
        parts = [torch.empty_like(mine) for _ in range(group.size())]
        dist.all_gather(parts, mine, group=group)
        whole[bucket.offset : bucket.offset + bucket.grad_data.numel()] = torch.cat(parts)
    return whole


def full_gradients(policy: Policy) -> dict[str, tuple[str, int, torch.Tensor]]:
    """Reduced gradients of this rank's tensors by Megatron's name: (kind, shard, gradient)."""
    found: dict[str, tuple[str, int, torch.Tensor]] = {}
    buffers = buffers_of(policy)
    whole = [gathered(buffer) for buffer in buffers]
    for slot in policy.slots:
        for buffer, gradient in zip(buffers, whole, strict=True):
            offset, rest = divmod(
                slot.tensor.data_ptr() - buffer.param_data.data_ptr(),
                buffer.param_data.element_size(),
            )
            if rest == 0 and 0 <= offset <= gradient.numel() - slot.tensor.numel():
                value = (
                    gradient[offset : offset + slot.tensor.numel()].view(slot.tensor.shape).clone()
                )
                found[slot.name] = (slot.kind, slot.index, value)
                break
    return found


def padded_backward(policy: Policy, batch: Batch) -> dict[str, Any]:
    """The same loss from one padded dense forward.

    An independent implementation of attention, packing and log-probabilities.
    """
    zero_gradients(policy)
    total = 0.0
    with policy.replay.schedule("replay", training=True):
        for micro_batch in batch:
            borders = list(zip(micro_batch.cu_seqlens, micro_batch.cu_seqlens[1:], strict=False))
            longest = max(end - start for start, end in borders)
            tokens = torch.zeros(len(borders), longest, dtype=torch.int64)
            for row, (start, end) in enumerate(borders):
                tokens[row, : end - start] = micro_batch.tokens_N[start:end]
            routes = padded_rows(micro_batch.routed_experts_NLK, micro_batch.cu_seqlens)
            captured = (routes >= 0).flatten(1).all(1)
            policy.replay.load(routes, captured, rows=int(captured.sum()))
            positions = torch.arange(longest).expand(len(borders), longest)
            logits_bsV = policy.wrapped[0](tokens, positions, None)
            logits_NV = torch.cat(
                [logits_bsV[row, : end - start] for row, (start, end) in enumerate(borders)]
            )
            logprobs_N = logits_NV.log_softmax(-1).gather(-1, micro_batch.targets_N[:, None])[:, 0]
            tokens_N = local_tokens(micro_batch, policy.mesh.cp, policy.device.torch)
            loss, _ = policy_loss(policy.config, tokens_N, policy.mesh.cp, logprobs_N, NONE_MADE)
            loss.backward()
            total += float(loss)
    for chunk in policy.wrapped:
        chunk.finish_grad_sync()
    return {"loss/total": Mean(total, 1.0)}


def figures_of(scores: TokenScores) -> dict[str, float]:
    """The mismatch panel of one pass on one rank."""
    columns = (scores.logprobs, scores.rollout_logprobs, scores.loss_mask)
    parts = mismatch(*(torch.cat(column) for column in columns))
    return {name: type(part).reduce([part]) for name, part in parts.items()}


def padded_rows(values_N: torch.Tensor, cu_seqlens: Sequence[int]) -> torch.Tensor:
    """Values of packed tokens in the order of a router that sees the sequences padded.

    Position by position, -1 at padding.
    """
    borders = list(pairwise(cu_seqlens))
    longest = max(end - start for start, end in borders)
    padded = torch.full((longest, len(borders), *values_N.shape[1:]), -1, dtype=values_N.dtype)
    for row, (start, end) in enumerate(borders):
        padded[: end - start, row] = values_N[start:end]
    return padded.flatten(0, 1)


def routing_map(routes_NK: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Whether a token goes to an expert [N, E]. A row of -1 names the first one."""
    ids_NK = routes_NK.long().clamp(min=0)
    return torch.zeros(len(ids_NK), num_experts, dtype=torch.bool).scatter(1, ids_NK, True)


def in_backward() -> bool:
    """Whether this runs inside a backward pass, as recomputation does."""
    return torch._C._current_graph_task_id() != -1


@contextmanager
def read_back(policy: Policy, *, backward: bool = False) -> Iterator[dict[int, list[torch.Tensor]]]:
    """Yield layer -> routing map [N, E] of each forward inside, in order.

    Args:
        backward: of recomputations only.
    """
    maps: dict[int, list[torch.Tensor]] = {layer: [] for layer in policy.replay.taps}
    routers = {
        layer.layer_number - 1: layer.mlp.router
        for chunk in policy.chunks
        for layer in chunk.decoder.layers
        if hasattr(layer.mlp, "router")
    }

    def keep(layer: int) -> Callable[[Any, Any, Any], None]:
        def hook(_module: Any, _args: Any, out: Any) -> None:
            if in_backward() == backward:
                maps[layer].append(out[1].cpu())

        return hook

    hooks = [router.register_forward_hook(keep(layer)) for layer, router in routers.items()]
    try:
        yield maps
    finally:
        for hook in hooks:
            hook.remove()


class Watched(TorchDispatchMode):
    """Shows each operation inside to `see(func, args, result)`."""

    def __init__(self, see: Callable[[Any, Any, Any], object]) -> None:
        super().__init__()
        self._see = see

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._see(func, args, result)
        return result


def tensors_with(sizes: Sequence[int]) -> list[str]:
    """Shapes of the reachable tensors, or of their bases, with a dimension of one of these sizes.

    Tensors without memory do not count.
    """
    gc.collect()
    return sorted(
        f"{tuple(one.shape)} {one.dtype}"
        for one in gc.get_objects()
        if issubclass(type(one), torch.Tensor)  # `isinstance` makes modules warn
        and not {*sizes}.isdisjoint((*one.shape, *(one._base.shape if one._is_view() else ())))
        and one.untyped_storage().nbytes()
    )
