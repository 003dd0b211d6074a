"""Expert matrices on their way into an engine's stacked tensors; a real engine is in tests/e2e."""

from __future__ import annotations

import pytest
import torch

from r3.engine.experts import ExpertBlock, StackedExperts, expert_matrices
from r3.models.shape import ModelShape
from tests.tiny import tiny_config

pytestmark = pytest.mark.unit

EXPERTS, WIDTH, HIDDEN = 3, 8, 5


def matrices() -> dict[tuple[int, int], torch.Tensor]:
    """(expert, part) -> full matrix; gate and up `[F, D]`, down `[D, F]`."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH))
    return {
        (expert, part): torch.randn(sizes[part], generator=generator)
        for expert in range(EXPERTS)
        for part in range(3)
    }


@pytest.mark.parametrize("ranks", [1, 2])
def test_blocks_of_experts_are_copied_like_their_matrices(ranks: int) -> None:
    full = matrices()
    gate_up = [torch.cat([full[expert, 0], full[expert, 1]]) for expert in range(EXPERTS)]
    down = [full[expert, 2] for expert in range(EXPERTS)]
    width = WIDTH // ranks
    for rank in range(ranks):
        single, blocks = (
            StackedExperts(
                w13=torch.full((EXPERTS, 2 * width, HIDDEN), torch.nan, dtype=torch.bfloat16),
                w2=torch.full((EXPERTS, HIDDEN, width), torch.nan, dtype=torch.bfloat16),
                rank=rank,
            )
            for _ in range(2)
        )
        for (expert, part), matrix in full.items():
            single.copy(expert, part, matrix)
        for first, stop in ((0, 1), (1, EXPERTS)):
            for is_down, parts in ((False, gate_up), (True, down)):
                assert not blocks.is_complete
                tensor = torch.stack(parts[first:stop])
                block = ExpertBlock(layer=0, first=first, is_down=is_down, tensor=tensor)
                blocks.copy_block(block)
        assert blocks.is_complete
        assert torch.equal(blocks.w13, single.w13) and torch.equal(blocks.w2, single.w2)


def test_a_matrix_that_came_twice_does_not_stand_for_another() -> None:
    stacked = StackedExperts(w13=torch.zeros(1, 4, 3), w2=torch.zeros(1, 3, 2), rank=0)
    for part in (0, 1, 1):
        stacked.copy(0, part, torch.ones(2, 3))
    assert not stacked.is_complete


def test_names_of_all_expert_matrices_are_the_checkpoints() -> None:
    shape = ModelShape.read(tiny_config().model.path)
    names = expert_matrices(shape)
    assert names.keys() == {name for name in shape.tensor_shapes if ".experts." in name}
    layer = shape.moe_layers[1]
    block = ExpertBlock(layer=layer, first=2, is_down=False, tensor=torch.zeros(2, 4, 1))
    assert [names[name] for name in block.names(shape)] == [
        (layer, expert, part) for expert in (2, 3) for part in (0, 1)
    ]
    assert names[f"model.layers.{layer}.mlp.experts.3.up_proj.weight"] == (layer, 3, 1)


@pytest.mark.parametrize("isa", ["vec", "amx"])
def test_packing_moves_each_number_of_an_expert_to_a_place_of_its_own(isa: str) -> None:
    """So that equal packed experts are equal experts, which is what the proof of weights takes."""
    from vllm._custom_ops import cpu_prepack_moe_weight

    numbers = torch.arange(64 * 96, dtype=torch.int16)
    packed = cpu_prepack_moe_weight(numbers.view(torch.bfloat16).view(1, 64, 96), isa)
    assert not torch.equal(packed.view(torch.int16).flatten(), numbers)
    assert torch.equal(packed.view(torch.int16).flatten().sort().values, numbers)
