"""The picture of agreement per layer, by its pixels."""

from __future__ import annotations

import pytest

from r3.tools.tensorboard import LOW, STEPS, Grid, heat_strip, scale_end

pytestmark = pytest.mark.unit

WHITE, RED, GREY = [244, 244, 242], [140, 29, 24], [190, 190, 190]


def test_a_cell_shows_the_agreement_of_its_step_and_layer() -> None:
    history = [(1, {2: 1.0, 10: LOW, 11: LOW}), (2, {2: (1 + LOW) / 2, 11: 1.0})]
    image, grid = heat_strip(history), Grid(columns=2, rows=3)
    assert image.shape == (*reversed(grid.size), 3) and image.dtype == "uint8"

    def pixel(column: int, row: int) -> list[int]:
        x, y = grid.middle(column, row)
        return image[y, x].tolist()

    assert [pixel(0, row) for row in range(3)] == [WHITE, RED, RED]
    assert [pixel(1, row) for row in range(3)] == [[192, 136, 133], GREY, WHITE]


def test_the_scale_reaches_down_to_the_lowest_agreement() -> None:
    assert scale_end([0.95, 0.99]) == LOW and scale_end([0.36, float("nan")]) == 0.3
    image, grid = heat_strip([(1, {0: 0.3, 1: 0.86})]), Grid(columns=1, rows=2)
    low, middle = ([int(c) for c in image[grid.middle(0, row)[::-1]]] for row in (0, 1))
    assert (low, middle) == (RED, [223, 201, 198])


def test_axes_and_legend_have_ink_and_the_legend_both_ends() -> None:
    image = heat_strip([(1, {0: 1.0}), (2, {0: 1.0})])  # agreement of 1 alone: no red in the cells
    width, below = image.shape[1], Grid(columns=2, rows=1).middle(0, 0)[1] + 25
    assert (image[:, :50] < 100).any(), "labels of the layers"
    assert (image[below:, : width - 100] < 100).any(), "labels of the steps"
    legend = image[:, width - 60].tolist()
    assert RED in legend and WHITE in legend


@pytest.mark.parametrize(("steps", "layers"), [(1, 1), (STEPS, 61)])
def test_few_and_many_cells_fit(steps: int, layers: int) -> None:
    history = [(step, dict.fromkeys(range(layers), 0.9)) for step in range(steps)]
    height, width, _ = heat_strip(history).shape
    assert 150 < height < 450 and 300 < width < 700


def test_nothing_to_draw_is_refused() -> None:
    with pytest.raises(ValueError, match="no step has the agreement"):
        heat_strip([(1, {})])
