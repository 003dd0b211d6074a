"""The picture of agreement per layer, by its pixels."""

from __future__ import annotations

import pytest

from r3.metrics.heatmap import LOW, heat_strip

pytestmark = pytest.mark.unit

WHITE, RED, GREY = [247, 247, 247], [165, 0, 38], [190, 190, 190]


def test_a_cell_shows_the_agreement_of_its_step_and_layer() -> None:
    image = heat_strip([{2: 1.0, 10: LOW, 11: 0.0}, {2: (1 + LOW) / 2, 11: 1.0}])
    assert image.shape == (4 + 2 * 8 + 2 + 8, 3 * 128, 3) and image.dtype == "uint8"
    middle = [
        [image[4 + 8 * row + 4, 128 * column + 64].tolist() for column in range(3)]
        for row in range(2)
    ]
    assert middle == [[WHITE, RED, RED], [[206, 124, 142], GREY, WHITE]]
    ticks = (image[0, :, 0] == 40).nonzero()[0].tolist()
    assert ticks == [128, 129], "layer 10 is the second column"
    assert image[-1, 0].tolist() == RED and image[-1, -1].tolist() == WHITE


def test_nothing_to_draw_is_refused() -> None:
    with pytest.raises(ValueError, match="no step has the agreement"):
        heat_strip([{}])
