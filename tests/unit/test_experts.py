"""Tensors of experts on their way into an engine's stacked ones; a real engine is in tests/e2e."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from r3.engine.direct_weights import StackedExperts, expert_layers, matrices
from r3.models.shape import ModelShape
from r3.models.tensors import Experts
from tests.families import family
from tests.tiny import tiny_config

pytestmark = pytest.mark.unit

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
    held = {
        part: torch.zeros(2, *SIZES[part]) for part in ("linear_fc1.weight", "linear_fc2.weight")
    }
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
    names = [
        f"model.layers.{layer}.mlp.experts.{e}.{x}_proj.weight"
        for e in (2, 3)
        for x in ("gate", "up")
    ]
    assert list(key.names(shape)) == names and {layers[name] for name in names} == {layer}
    full = torch.arange(2 * 4.0).view(2, 4, 1)
    assert [(name, one.flatten().tolist()) for name, one in matrices(key, full, shape)] == [
        *zip(names, ([0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0]), strict=True)
    ]


@pytest.mark.parametrize("isa", ["vec", "amx"])
def test_packing_moves_each_number_of_an_expert_to_a_place_of_its_own(isa: str) -> None:
    """So that equal packed experts are equal experts, which is what the proof of weights takes."""
    from vllm._custom_ops import cpu_prepack_moe_weight

    numbers = torch.arange(64 * 96, dtype=torch.int16)
    packed = cpu_prepack_moe_weight(numbers.view(torch.bfloat16).view(1, 64, 96), isa)
    assert not torch.equal(packed.view(torch.int16).flatten(), numbers)
    assert torch.equal(packed.view(torch.int16).flatten().sort().values, numbers)
