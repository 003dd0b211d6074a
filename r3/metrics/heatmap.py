"""A picture of agreement per layer over the steps, in plain numpy: where, and when, live routing leaves the replayed one."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

LOW = 0.8
"""Agreement drawn in the darkest colour, with everything below it."""
STEPS = 64
"""A picture should show no more than so many of the newest steps."""
_AGREES, _DIFFERS = np.array([247.0, 247.0, 247.0]), np.array([165.0, 0.0, 38.0])
_ABSENT, _INK = 190, 40
_CELL_HEIGHT, _MIN_WIDTH = 8, 384


def heat_strip(history: Collection[Mapping[int, float]]) -> np.ndarray:
    """Agreement of each step (a row, the newest at the bottom) by layer (a column, the first at the left).

    White is 1, dark red is `LOW` or less, grey is a layer that a step lacks. The ticks above mark every tenth layer, the bar
    below runs from `LOW` to 1.

    Returns:
        An image `[height, width, 3]`, uint8.

    Raises:
        ValueError: there is nothing to draw.
    """
    layers = sorted(set().union(*history))
    if not layers:
        raise ValueError("no step has the agreement of any layer")
    values = np.array([[step.get(layer, np.nan) for layer in layers] for step in history])
    cell = max(4, _MIN_WIDTH // len(layers))
    cells = _colours(values).repeat(_CELL_HEIGHT, axis=0).repeat(cell, axis=1)
    width = cells.shape[1]
    ticks = np.full((4, width, 3), 255, dtype=np.uint8)
    for column, layer in enumerate(layers):
        if layer % 10 == 0:
            ticks[:, column * cell : column * cell + 2] = _INK
    line = np.full((2, width, 3), _INK, dtype=np.uint8)
    bar = _colours(np.linspace(LOW, 1.0, width)[None]).repeat(_CELL_HEIGHT, axis=0)
    return np.concatenate([ticks, cells, line, bar])


def _colours(values: np.ndarray) -> np.ndarray:
    share = np.clip((values - LOW) / (1 - LOW), 0.0, 1.0)[..., None]
    mixed = _DIFFERS + np.nan_to_num(share) * (_AGREES - _DIFFERS)
    return np.where(np.isnan(share), _ABSENT, mixed.round()).astype(np.uint8)
