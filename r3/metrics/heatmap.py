"""A heat map of routing agreement per layer and step: live routing against the replayed experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
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
        width, height = _WIDTH // self.columns, _HEIGHT // self.rows
        return max(4, min(_MAX_CELL, width)), max(4, min(_MAX_CELL, height))

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of the whole picture."""
        width, height = self.cell
        inside = max(height * self.rows, _MIN_HEIGHT)
        return _LEFT + max(width * self.columns, 200) + _RIGHT, _TOP + inside + _BOTTOM

    def middle(self, column: int, row: int) -> tuple[int, int]:
        """The pixel in the middle of a cell; row 0 is the lowest."""
        width, height = self.cell
        y = _TOP + height * (self.rows - 1 - row) + height // 2
        return _LEFT + width * column + width // 2, y


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
    values = np.array(
        [[by_layer.get(layer, np.nan) for _, by_layer in history] for layer in reversed(layers)]
    )
    low = scale_end(values)
    grid = Grid(columns=len(history), rows=len(layers))
    (whole_width, whole_height), (width, height) = grid.size, grid.cell
    picture = np.full((whole_height, whole_width, 3), 255, np.uint8)
    cells = _colours(values, low).repeat(height, 0).repeat(width, 1)
    bottom, right = _TOP + cells.shape[0], _LEFT + cells.shape[1]
    picture[_TOP:bottom, _LEFT:right] = cells
    scale = np.linspace(1.0, low, whole_height - _BOTTOM - _TOP)
    legend = whole_width - _RIGHT + 24
    picture[_TOP : _TOP + len(scale), legend : legend + _LEGEND_WIDTH] = _colours(scale, low)[
        :, None
    ]

    image = Image.fromarray(picture)
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(_FONT_SIZE)

    def write(x: int, y: int, text: str, anchor: str) -> None:
        draw.text((x, y), text, _INK, font, anchor=anchor)

    write(_LEFT, 8, "agreement of live with replayed routes", "la")
    write((_LEFT + right) // 2, bottom + 24, "step", "ma")
    write(4, (_TOP + bottom) // 2, "layer", "lm")
    for row in _labelled(len(layers)):
        write(_LEFT - 6, grid.middle(0, row)[1], str(layers[row]), "rm")
    for column in _labelled(len(history)):
        write(grid.middle(column, 0)[0], bottom + 6, str(history[column][0]), "ma")
    for share in (0.0, 0.5, 1.0):
        y = _TOP + round(share * (len(scale) - 1))
        write(legend + _LEGEND_WIDTH + 5, y, f"{1 - share * (1 - low):g}", "lm")
    return np.asarray(image)


def _labelled(count: int) -> range:
    """Places of an axis that get a label: all of a few, else every second, fifth, tenth ..."""
    apart = next(gap for gap in (1, 2, 5, 10, 20, 50, 100, 1000) if count / gap <= _LABELS)
    return range(0, count, apart)


def scale_end(values: ArrayLike) -> float:
    """The low end of the scale: `LOW`, or the tenth below the lowest value if that is less."""
    return float(min(LOW, np.floor(10 * np.nanmin(values, initial=1.0)) / 10))


def _colours(values: np.ndarray, low: float) -> np.ndarray:
    """Colours [..., 3] of agreement, uint8."""
    shares = np.clip((values - low) / (1 - low), 0, 1)[..., None]
    colours = np.where(np.isnan(shares), _ABSENT, _DIFFERS + shares * (_AGREES - _DIFFERS))
    return colours.round().astype(np.uint8)
