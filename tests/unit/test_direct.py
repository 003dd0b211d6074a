"""Which part of a tensor a rank of the engine has of it; a real engine is in tests/e2e."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from r3.engine.direct_weights import (
    Piece,
    StackedExperts,
    Target,
    WeightMismatch,
    expert_layers,
    matrices,
    part_of_rank,
    pieces_of,
)
from r3.models import Experts
from r3.models.shape import ModelShape
from tests.families import family
from tests.tiny import tiny_config

FULL = torch.arange(40.0).view(10, 4)


@pytest.mark.parametrize("rank", range(2))
def test_rows_or_columns_are_divided_over_ranks(rank: int) -> None:
    rows = part_of_rank(FULL, (5, 4), rank, 2)
    columns = part_of_rank(FULL, (10, 2), rank, 2)
    assert torch.equal(rows, FULL.chunk(2)[rank])
    assert torch.equal(columns, FULL.chunk(2, 1)[rank])
    assert torch.equal(part_of_rank(FULL, (10, 4), rank, 2), FULL)


def test_a_key_head_is_held_by_several_ranks() -> None:
    # Two heads of five rows on four ranks.
    parts = [part_of_rank(FULL, (5, 4), rank, 4) for rank in range(4)]
    first, second = FULL.chunk(2)
    for part, expected in zip(parts, (first, first, second, second), strict=True):
        assert torch.equal(part, expected)


def test_a_padded_vocabulary_ends_with_the_last_token() -> None:
    assert torch.equal(part_of_rank(FULL, (6, 4), 1, 2), FULL[6:])
    assert torch.equal(part_of_rank(FULL, (16, 4), 0, 1), FULL)


@pytest.mark.parametrize(
    "size", [(2, 4), (10, 1), (10, 3), (4, 10), (10, 1, 4)], ids=lambda size: str(list(size))
)
def test_a_place_of_another_layout_is_refused_by_name(size: tuple[int, ...]) -> None:
    """Of ten rows of four on two ranks; [10, 1] would take a broadcast of a column."""
    target = Target(
        name="model.layers.1.norm.weight",
        module=nn.Module(),
        leaf="weight",
        like=torch.empty(size),
        is_packed=False,
    )
    piece = Piece(parameter=target.name, start=0, rows=size[0])
    with pytest.raises(WeightMismatch, match=r"nothing was loaded.*model\.layers\.1\.norm\.weight"):
        target.refuse_unfit("norm.weight", FULL.shape, piece, 2)
    fits = replace(target, like=torch.empty(5, 4))
    fits.refuse_unfit("norm.weight", FULL.shape, replace(piece, rows=5), 2)


@pytest.mark.parametrize("interleaved", [True, False])
def test_parts_of_a_gated_delta_layer_are_divided_one_by_one(interleaved: bool) -> None:
    heads = dict(linear_num_key_heads=2, linear_num_value_heads=4)
    sizes = dict(linear_key_head_dim=3, linear_value_head_dim=5, linear_conv_kernel_dim=4)
    name = "qwen3_next" if interleaved else "qwen3_5_moe"
    shape = ModelShape.from_hf(family(name, **heads, **sizes))
    mixed = torch.arange(32.0)[:, None]  # q and k of 6 rows, v of 20
    z, ba = 100 + torch.arange(20.0)[:, None], 200 + torch.arange(4.0)[:, None]
    full = {"in_proj_qkv": mixed, "in_proj_z": z, "in_proj_b": ba, "in_proj_a": ba + 4}
    full |= {"conv1d": mixed}
    rows = {"conv1d": 16, "in_proj_qkvz": 26, "in_proj_ba": 4}
    for rank in range(2):
        expected = [part.chunk(2)[rank] for part in (*mixed.split([6, 6, 20]), z)]
        whole = {
            "conv1d": torch.cat(expected[:3]),
            "in_proj_qkvz": torch.cat(expected),
            "in_proj_ba": torch.cat([part.chunk(2)[rank] for part in (ba, ba + 4)]),
        }
        for layer in ("conv1d",) if interleaved else whole:
            found = torch.full((rows[layer], 1), -1.0)
            name = f"model.layers.0.linear_attn.{layer}.weight"
            for source, piece in pieces_of(name, rows[layer], nn.Module(), shape):
                own = found.narrow(0, piece.start, piece.rows)
                part = full[source.split(".")[-2]][piece.first : piece.end]
                own.copy_(part_of_rank(part, own.shape, rank, 2))
            assert torch.equal(found, whole[layer])


EXPERTS, WIDTH, HIDDEN = 3, 8, 5
SIZES = {
    "linear_fc1.weight": (2 * WIDTH, HIDDEN),
    "linear_fc2.weight": (HIDDEN, WIDTH),
    "linear_fc1.bias": (2 * WIDTH,),
    "linear_fc2.bias": (HIDDEN,),
}


@pytest.mark.parametrize("alternates", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_each_rank_of_an_engine_gets_its_part(ranks: int, alternates: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    full = {part: torch.randn(EXPERTS, *size, generator=generator) for part, size in SIZES.items()}
    width = WIDTH // ranks
    for rank in range(ranks):
        own = slice(rank * width, (rank + 1) * width)
        expected = {}
        for kind in ("weight", "bias"):
            gate, up = full[f"linear_fc1.{kind}"].chunk(2, 1)
            both = [gate[:, own], up[:, own]]
            stacked = torch.stack(both, 2).flatten(1, 2) if alternates else torch.cat(both, 1)
            expected[f"linear_fc1.{kind}"] = stacked
        expected["linear_fc2.weight"] = full["linear_fc2.weight"][:, :, own]
        bias = full["linear_fc2.bias"]
        expected["linear_fc2.bias"] = bias if rank == 0 else torch.zeros_like(bias)
        held = {part: torch.full_like(one, torch.nan) for part, one in expected.items()}
        experts = StackedExperts(held=held, rank=rank, alternates=alternates)
        for first, stop in ((0, 1), (1, EXPERTS)):
            for part, tensor in full.items():
                assert not experts.is_complete
                key = Experts(layer=0, first=first, count=stop - first, part=part)
                experts.copy(key, tensor[first:stop])
        assert experts.is_complete
        for part, tensor in expected.items():
            assert torch.equal(held[part], tensor), part
            assert torch.equal(experts.rows(part, full[part]), tensor), part


def test_experts_that_came_twice_do_not_stand_for_others() -> None:
    parts = ("linear_fc1.weight", "linear_fc2.weight")
    held = {part: torch.zeros(2, *SIZES[part]) for part in parts}
    stacked = StackedExperts(held=held, rank=0)
    one = Experts(layer=0, first=0, count=1, part="linear_fc1.weight")
    for key in (one, one, replace(one, part="linear_fc2.weight"), replace(one, first=1)):
        stacked.copy(key, torch.ones(1, *SIZES[key.part]))
    assert not stacked.is_complete


@pytest.mark.parametrize("biases", [False, True])
def test_names_of_all_experts_are_the_checkpoints(biases: bool) -> None:
    shape = ModelShape.read(tiny_config().model.path)
    if biases:
        shape = ModelShape.from_hf(family("gpt_oss"))
    layers = expert_layers(shape)
    assert layers.keys() == {name for name in shape.tensor_shapes if ".experts." in name}
    layer = shape.moe_layers[1]
    key = Experts(layer=layer, first=2, count=2, part="linear_fc1.weight")
    parts = [f"{e}.{x}_proj.weight" for e in (2, 3) for x in ("gate", "up")]
    names = [f"model.layers.{layer}.mlp.experts.{part}" for part in parts]
    assert list(key.names(shape)) == names and {layers[name] for name in names} == {layer}
    full = torch.arange(2 * 4.0).view(2, 4, 1)
    made = {name: one.flatten().tolist() for name, one in matrices(key, full, shape)}
    assert [*made] == names and [*made.values()] == full.view(4, 2).tolist()


@pytest.mark.parametrize("isa", ["vec", "amx"])
def test_packing_moves_each_number_of_an_expert_to_a_place_of_its_own(isa: str) -> None:
    """So that equal packed experts are equal experts, which is what the proof of weights takes."""
    from vllm._custom_ops import cpu_prepack_moe_weight

    numbers = torch.arange(64 * 96, dtype=torch.int16)
    packed = cpu_prepack_moe_weight(numbers.view(torch.bfloat16).view(1, 64, 96), isa)
    assert not torch.equal(packed.view(torch.int16).flatten(), numbers)
    assert torch.equal(packed.view(torch.int16).flatten().sort().values, numbers)
