"""The plan of the weight sync against brute force, for all pairs of layouts of up to 4 ranks.

Weights are random tensors with Hugging Face names. A rank's memory is cut out of them here, value
by value and without the product's code; the plan then says which rank's pieces make which tensor.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from r3.config import ParallelConfig
from r3.configs import KNOWN_SHAPES, PRESETS
from r3.extras import dry_run
from r3.models import Shard, ShardId, SyncPlan, collect
from r3.models.shape import ModelShape
from r3.policy.weight_slots import named
from r3.sync import gather
from r3.tools.planning.sync import Traffic, planned_shards, sync_plans
from tests.families import family
from tests.memory import peak_bytes

SMALLEST: dict[str, Any] = dict(hidden_size=8, intermediate_size=8, head_dim=2)
SMALLEST |= dict(num_hidden_layers=4, vocab_size=13)  # no multiple of 2 or 4: padded
_EXPERTS: dict[str, Any] = dict(num_experts=4, moe_intermediate_size=4)
_LATENT: dict[str, Any] = dict(kv_lora_rank=4, qk_nope_head_dim=2, qk_rope_head_dim=2, v_head_dim=2)
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": _EXPERTS,
    "qwen2_moe": _EXPERTS | dict(shared_expert_intermediate_size=4),
    "qwen3": dict(tie_word_embeddings=True),
    "moonlight": _LATENT | dict(n_routed_experts=4, moe_intermediate_size=4, n_shared_experts=1),
}
Memory = list[dict[ShardId, torch.Tensor]]


def shape_of(name: str, **changes: Any) -> ModelShape:
    return ModelShape.from_hf(family(name, **SMALLEST | MODELS[name] | changes))


def random_weights(shape: ModelShape) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(size, generator=generator) for name, size in shape.tensor_shapes.items()
    }


def layouts(world: int, *, moe: bool) -> Iterator[ParallelConfig]:
    """Every layout of so many ranks that the tiny models allow."""
    sizes = [size for size in (1, 2, 4) if world % size == 0]
    for tp, cp, pp, ep, etp in product(sizes, sizes, sizes, sizes, (0, *sizes)):
        if world % (tp * cp * pp) or world % ((etp or tp) * ep * pp) or etp == tp:
            continue
        if moe or (ep == 1 and etp == 0):
            plain = ParallelConfig(tp=tp, cp=cp, pp=pp, ep=ep, etp=etp)
            yield plain
            if pp == 2:
                yield from (replace(plain, vpp=2), replace(plain, pp_layers=(1, 3)))


def cut(hf: list[torch.Tensor], shard: Shard, shape: ModelShape) -> torch.Tensor:
    """One rank's part of a Megatron tensor, row by row."""
    kind, index, count = shard.kind, shard.index, shard.count
    if kind == "replicated":
        return hf[0]
    if kind == "row":
        width = hf[0].shape[-1] // count
        return hf[0][..., index * width : (index + 1) * width]
    if kind == "column":
        rows = math.ceil(len(hf[0]) / count)
        picked = range(index * rows, (index + 1) * rows)
        zero = torch.zeros_like(hf[0][0])
        return torch.stack([hf[0][row] if row < len(hf[0]) else zero for row in picked])
    if kind == "gated":
        rows = len(hf[0]) // count
        return torch.stack([half[index * rows + row] for half in hf for row in range(rows)])
    assert kind == "qkv"
    query, key, value = hf
    groups = len(key) // shape.head_dim // count
    picked_rows = []
    for group in range(index * groups, (index + 1) * groups):
        wide = shape.num_heads // shape.num_kv_heads * shape.head_dim
        picked_rows += [query[group * wide + row] for row in range(wide)]
        for part in (key, value):
            picked_rows += [part[group * shape.head_dim + row] for row in range(shape.head_dim)]
    return torch.stack(picked_rows)


def memory_of(
    shards: list[list[Shard]], weights: dict[str, torch.Tensor], shape: ModelShape
) -> Memory:
    """What every rank has: its own pieces, cut out of the full tensors."""
    made: dict[ShardId, torch.Tensor] = {}
    for shard in (shard for own in shards for shard in own):
        if (shard.name, shard.index) not in made:
            each = len(shard.parts)
            parts = [shard.hf[i : i + each] for i in range(0, len(shard.hf), each)]
            cuts = [cut([weights[name] for name in part], shard, shape) for part in parts]
            piece = torch.stack(cuts) if shard.experts else cuts[0].clone()
            assert tuple(piece.shape) == shard.shape, shard
            made[shard.name, shard.index] = piece
    keys = [[(shard.name, shard.index) for shard in own] for own in shards]
    return [{key: made[key] for key in own} for own in keys]


def tensors_of(
    plan: SyncPlan[Shard], read: Callable[[ShardId], torch.Tensor], shape: ModelShape
) -> Iterator[tuple[str, torch.Tensor]]:
    for shard, full in gather(plan, read):
        yield from named(shard, full, shape)


def reading(plan: SyncPlan[Shard], memory: Memory) -> Callable[[ShardId], torch.Tensor]:
    return lambda shard_id: memory[plan.sources[shard_id]][shard_id]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_planned_pieces_gather_to_the_full_tensors(model: str, world: int) -> None:
    shape = shape_of(model)
    weights = random_weights(shape)
    ranks = range(world)
    # One machine, a machine each, and two machines, of which every rank reads.
    readings = [(["a"] * world, 0), ([str(rank) for rank in ranks], world - 1)]
    readings += [(["a" if rank < world / 2 else "b" for rank in ranks], reader) for reader in ranks]
    count = 0
    for parallel in layouts(world, moe=bool(shape.moe_layers)):
        shards = [planned_shards(shape, parallel, world, rank, 4) for rank in ranks]
        memory = memory_of(shards, weights, shape)
        for hosts, reader in readings:
            plan = SyncPlan.of(*collect(shards), hosts, reader)
            gathered = list(tensors_of(plan, reading(plan, memory), shape))
            assert len(gathered) == len(weights), "a tensor is read twice, or not at all"
            for name, tensor in gathered:
                assert torch.equal(tensor, weights[name]), (parallel, reader, name)
            check_sources(plan, hosts, world)
            count += 1
    assert count >= world


def check_sources(plan: SyncPlan[Shard], hosts: list[str], world: int) -> None:
    """The nearest rank is read, and only what no rank of a machine has crosses the network."""
    for shard_id, source in plan.sources.items():
        ranks = plan.holders[shard_id]
        assert source in ranks
        everywhere = {hosts[rank] for rank in ranks} == set(hosts)
        assert (shard_id in plan.crossing) == (not everywhere)
        if everywhere:
            assert hosts[source] == hosts[plan.reader]
            assert plan.reader not in ranks or source == plan.reader
    traffic = Traffic.of(plan)
    sizes = [plan.holders[shard_id][source].nbytes for shard_id, source in plan.sources.items()]
    assert traffic.local[1] + traffic.peer[1] + traffic.network[1] == sum(sizes)
    if world == 1:
        assert traffic.peer == traffic.network == (0, 0)


def test_a_wrong_piece_shows() -> None:
    shape = shape_of("qwen3_moe")
    weights = random_weights(shape)
    parallel = ParallelConfig(tp=2, ep=2, etp=1)
    shards = [planned_shards(shape, parallel, 2, rank, 4) for rank in range(2)]
    memory = memory_of(shards, weights, shape)
    plan = SyncPlan.of(*collect(shards), ["a"] * 2, 0)
    swapped = {("decoder.layers.1.self_attention.linear_qkv.weight", i): 1 - i for i in (0, 1)}

    def read(shard_id: ShardId) -> torch.Tensor:
        index = swapped.get(shard_id, shard_id[1])
        return memory[plan.sources[shard_id[0], index]][shard_id[0], index]

    found = tensors_of(plan, read, shape)
    wrong = [name for name, tensor in found if not torch.equal(tensor, weights[name])]
    assert wrong == [f"model.layers.1.self_attn.{x}_proj.weight" for x in "qkv"]
    del shards[1][-1]  # down of the last experts, which no other rank has
    with pytest.raises(AssertionError, match=r"no rank has shards|KeyError"):
        lost = SyncPlan.of(*collect(shards), ["a"] * 2, 0)
        assert set(lost.tensors) == set(plan.tensors), "no rank has shards"


@pytest.mark.parametrize("parallel", [ParallelConfig(ep=4), ParallelConfig(tp=2, ep=4, etp=1)])
def test_copies_of_a_sync_never_exceed_one_layer(parallel: ParallelConfig) -> None:
    """Every read is a real copy, and the reader keeps what it gets until its layer is complete."""
    sizes = dict(hidden_size=64, moe_intermediate_size=64, num_hidden_layers=6, num_experts=16)
    shape = shape_of("qwen3_moe", **sizes)
    weights = random_weights(shape)
    shards = [planned_shards(shape, parallel, 4, rank, 4) for rank in range(4)]
    memory = memory_of(shards, weights, shape)
    plan = SyncPlan.of(*collect(shards), ["a"] * 4, 1)

    parts = Counter(map(layer_of, weights))

    def sync(plan: SyncPlan[Shard]) -> None:
        kept: dict[str, list[torch.Tensor]] = {}
        read = reading(plan, memory)
        for name, tensor in tensors_of(plan, lambda shard_id: read(shard_id).clone(), shape):
            layer = layer_of(name)
            kept.setdefault(layer, []).append(tensor)
            if len(kept[layer]) == parts[layer]:
                del kept[layer]

    layer = sum(tensor.nbytes for name, tensor in weights.items() if layer_of(name) == "0")
    # Two pieces of a matrix, gate and up in one, while they are joined.
    matrix = 2 * 2 * max(tensor.nbytes for tensor in weights.values())
    assert layer <= peak_bytes(lambda: sync(plan)) <= layer + matrix < 1.2 * layer
    # Control: in the order in which ranks publish, the experts of all layers wait for those of the
    # last rank.
    published = {shard.name: shard for own in shards for shard in own}
    assert peak_bytes(lambda: sync(replace(plan, tensors=published))) > 4 * layer


def layer_of(name: str) -> str:
    """The layer of an HF tensor, or the tensor's own name outside of the layers."""
    return name.split(".")[2] if name.startswith("model.layers.") else name


def test_the_dry_run_shows_the_plan() -> None:
    shape = ModelShape.from_hf(KNOWN_SHAPES["Qwen/Qwen3-30B-A3B"])
    text = dry_run().describe(PRESETS["qwen3-moe-30b-a3b"](), shape, 8)
    rows = text.split("\nweight sync, GiB read per rank\n")[1].split("\n\n")[0].splitlines()
    # A rank has an eighth of the experts and all the rest; seven eighths are its peers'.
    experts, whole = shape.num_expert_params * 2 / 2**30, shape.num_params * 2 / 2**30
    local, peer = whole - experts * 7 / 8, experts * 7 / 8
    assert rows[1].split() == ["0", f"{local:.1f}", f"{peer:.1f}", "-"]
    assert len(rows) == 1 + 8
    # Over two machines of 8 ranks, with all experts on each: nothing crosses.
    text = dry_run().describe(PRESETS["qwen3-moe-30b-a3b"](), shape, 16)
    assert len(re.findall(rf"\d +{local:.1f} +{peer:.1f} +-\n", text)) == 16


def test_layers_of_another_machine_cross_the_network() -> None:
    shape = shape_of("qwen3_moe")
    hosts = ["a", "a", "b", "b"]
    (plan,) = sync_plans(shape, ParallelConfig(pp=2), hosts, [0], 2)
    bytes_of = {name: math.prod(size) * 2 for name, size in shape.tensor_shapes.items()}
    far = ("model.layers.2.", "model.layers.3.", "model.norm", "lm_head")
    expected = sum(size for name, size in bytes_of.items() if name.startswith(far))
    # The vocabulary of 13 is not padded without tensor parallelism.
    traffic = Traffic.of(plan)
    assert traffic.network[1] == expected
    assert traffic.local[1] == sum(bytes_of.values()) - expected
    assert traffic.peer == (0, 0)
