"""A heat map of routing agreement per layer and step: live routing against the replayed experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw, ImageFont

LOW = 0.8
"""The darkest colour is this agreement, or the tenth below the lowest one if that is less."""
STEPS = 64
"""A picture should show no more than so many of the newest steps."""
_AGREES, _DIFFERS = np.array([244.0, 244.0, 242.0]), np.array([140.0, 29.0, 24.0])
_ABSENT, _INK = (190, 190, 190), (40, 40, 40)
_FONT_SIZE = 13
_LEFT, _TOP, _RIGHT, _BOTTOM = 56, 34, 84, 44  # margins for labels and legend
# Of the cells, about: each has a whole number of pixels. TensorBoard shows pictures 350 wide, and
# the labels of a wider one would be too small to read.
_WIDTH, _HEIGHT = 288, 200
_MAX_CELL = 40
_MIN_HEIGHT = 120  # room for the legend
_LABELS = 10  # most labels of an axis
_LEGEND_WIDTH = 12


@dataclass(frozen=True)
class Grid:
    """Where the cells of a picture are, in pixels."""

    columns: int
    rows: int

    @property
    def cell(self) -> tuple[int, int]:
        """Width and height of a cell."""
        return max(4, min(_MAX_CELL, _WIDTH // self.columns)), max(
            4, min(_MAX_CELL, _HEIGHT // self.rows)
        )

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of the whole picture."""
        width, height = self.cell
        inside = max(height * self.rows, _MIN_HEIGHT)
        return _LEFT + max(width * self.columns, 200) + _RIGHT, _TOP + inside + _BOTTOM

    def middle(self, column: int, row: int) -> tuple[int, int]:
        """The pixel in the middle of a cell; row 0 is the lowest."""
        width, height = self.cell
        return _LEFT + width * column + width // 2, _TOP + height * (
            self.rows - 1 - row
        ) + height // 2


def heat_strip(history: Sequence[tuple[int, Mapping[int, float]]]) -> np.ndarray:
    """Draw agreement by step (column) and layer (row, the first at the bottom), with a legend.

    White is 1, dark red the low end of the scale, grey a layer that a step lacks.

    Args:
        history: steps with their agreement by layer.

    Returns:
        An image [height, width, 3], uint8.

    Raises:
        ValueError: there is nothing to draw.
    """
    layers = sorted({layer for _, by_layer in history for layer in by_layer})
    if not layers:
        raise ValueError("no step has the agreement of any layer")
    low = scale_end([value for _, by_layer in history for value in by_layer.values()])
    grid = Grid(columns=len(history), rows=len(layers))
    image = Image.new("RGB", grid.size, "white")
    draw = ImageDraw.Draw(image)
    font = ImageFont.load_default(_FONT_SIZE)
    width, height = grid.cell
    for column, (_, by_layer) in enumerate(history):
        for row, layer in enumerate(layers):
            x, y = grid.middle(column, row)
            left, top = x - width // 2, y - height // 2
            draw.rectangle(
                (left, top, left + width - 1, top + height - 1),
                fill=_colour(by_layer.get(layer), low),
            )
    bottom = _TOP + height * len(layers)
    middle_x, middle_y = _LEFT + width * len(history) // 2, (_TOP + bottom) // 2
    draw.text((_LEFT, 8), "agreement of live with replayed routes", _INK, font)
    for row in _labelled(len(layers)):
        draw.text((_LEFT - 6, grid.middle(0, row)[1]), str(layers[row]), _INK, font, anchor="rm")
    for column in _labelled(len(history)):
        draw.text(
            (grid.middle(column, 0)[0], bottom + 6),
            str(history[column][0]),
            _INK,
            font,
            anchor="ma",
        )
    draw.text((middle_x, bottom + 24), "step", _INK, font, anchor="ma")
    draw.text((4, middle_y), "layer", _INK, font, anchor="lm")
    _legend(draw, grid, font, low)
    return np.asarray(image)


def _legend(
    draw: ImageDraw.ImageDraw,
    grid: Grid,
    font: ImageFont.FreeTypeFont | ImageFont.ImageFont,
    low: float,
) -> None:
    left, top, bottom = grid.size[0] - _RIGHT + 24, _TOP, grid.size[1] - _BOTTOM
    for y in range(top, bottom):
        share = (bottom - 1 - y) / (bottom - 1 - top)
        draw.line((left, y, left + _LEGEND_WIDTH, y), fill=_colour(low + share * (1 - low), low))
    for share, label in ((0.0, f"{low:g}"), (0.5, f"{(1 + low) / 2:g}"), (1.0, "1")):
        y = round(bottom - 1 - share * (bottom - 1 - top))
        draw.text((left + _LEGEND_WIDTH + 5, y), label, _INK, font, anchor="lm")


def _labelled(count: int) -> range:
    """Places of an axis that get a label: all of a few, else every second, fifth, tenth ..."""
    apart = next(gap for gap in (1, 2, 5, 10, 20, 50, 100, 1000) if count / gap <= _LABELS)
    return range(0, count, apart)


def scale_end(values: Sequence[float]) -> float:
    """The low end of the scale: `LOW`, or the tenth below the lowest value if that is less."""
    known = [value for value in values if not np.isnan(value)]
    return min(LOW, np.floor(10 * min(known, default=LOW)) / 10)


def _colour(value: float | None, low: float) -> tuple[int, int, int]:
    if value is None or np.isnan(value):
        return _ABSENT
    share = min(1.0, max(0.0, (value - low) / (1 - low)))
    red, green, blue = (_DIFFERS + share * (_AGREES - _DIFFERS)).round().astype(int).tolist()
    return red, green, blue
