"""TensorBoard: a run's curves, histograms, samples, and a heat map of routing agreement."""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from PIL import Image, ImageDraw, ImageFont

from r3.metrics.glossary import LAYER_AGREEMENT
from r3.metrics.reduce import LOG10_EDGES

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


class Events:
    """TensorBoard's event files of a run.

    Args:
        folder: where they are.
        steps_done: steps of the checkpoint that the run resumes from. What the killed run wrote
            after them is hidden.
        eval_names: held-out sets.
        say: writes a line on the console.
    """

    def __init__(
        self, folder: Path, steps_done: int, eval_names: Sequence[str], say: Callable[[str], None]
    ) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._say = say
        purge_step = steps_done + 1 if steps_done else None
        self._writer: Any = SummaryWriter(str(folder), purge_step=purge_step)
        self._excepthook, threading.excepthook = threading.excepthook, self._end_of_thread
        self._writer.add_custom_scalars(tensorboard_layout(eval_names))
        self._agreement: deque[tuple[int, dict[int, float]]] = deque(maxlen=STEPS)

    def log(
        self, row: Mapping[str, float], step: int, histograms: Mapping[str, np.ndarray]
    ) -> None:
        """Write the metrics of a step."""
        self._write(lambda writer: self._log(writer, row, step, histograms))

    def log_samples(self, texts: Mapping[str, str], step: int) -> None:
        """Write samples as markdown, by a name such as "best"."""

        def write(writer: Any) -> None:
            for name, text in texts.items():
                writer.add_text(f"samples/{name}", text, global_step=step)

        self._write(write)

    def close(self, *, failed: bool) -> None:
        """Write out what is left."""
        self._write(lambda writer: writer.close())
        if threading.excepthook == self._end_of_thread:
            threading.excepthook = self._excepthook

    def _write(self, call: Callable[[Any], None]) -> None:
        """TensorBoard's writer cannot continue after a full disk; the run can."""
        if self._writer is not None:
            try:
                call(self._writer)
            except OSError as error:
                self._say(f"TensorBoard's events end here: {error}")
                self._writer = None

    def _log(
        self,
        writer: Any,
        row: Mapping[str, float],
        step: int,
        histograms: Mapping[str, np.ndarray],
    ) -> None:
        by_layer = {}
        for key, value in row.items():
            # A picture instead of as many curves as layers; the report has one of the load.
            if "_layer/" not in key:
                writer.add_scalar(key, value, global_step=step)
            elif key.startswith(LAYER_AGREEMENT):
                by_layer[int(key.removeprefix(LAYER_AGREEMENT))] = value
        if by_layer:
            self._agreement.append((step, by_layer))
            tag, picture = LAYER_AGREEMENT.rstrip("/"), heat_strip(self._agreement)
            writer.add_image(tag, picture, global_step=step, dataformats="HWC")
        for key, values in histograms.items():
            writer.add_histogram(key, values, global_step=step, bins=LOG10_EDGES)
        writer.flush()

    def _end_of_thread(self, args: threading.ExceptHookArgs) -> None:
        """TensorBoard's thread raises the error in `_log`, too: no traceback beside it."""
        module = type(args.thread).__module__
        if not (module.startswith("tensorboard.") and issubclass(args.exc_type, OSError)):
            self._excepthook(args)


def tensorboard_layout(eval_names: Sequence[str]) -> dict[str, dict[str, list[Any]]]:
    """TensorBoard's custom scalars: the page to watch, then what replay is worth in this very
    run.
    """
    pages = {
        "1 health": {
            "reward and evaluation": [
                "reward/mean",
                *(f"eval/{name}/{what}" for name in eval_names for what in ("accuracy", "reward")),
            ],
            "mismatch k3": ["mismatch/k3"],
            "mismatch tail": ["mismatch/f2", "mismatch/abs_p99", "mismatch/abs_max"],
            "routes": ["routing/agreement", "routing/coverage"],
            "importance-weight ESS": ["mismatch/ess"],
            "gradient norms": ["optim/grad_norm", "optim/router_grad_norm"],
            "entropy": ["policy/entropy"],
            "response length": ["rollout/response_tokens_mean"],
        },
        "2 replay against live routes": {
            "k3": ["mismatch/k3_replay", "mismatch/k3_live"],
            "k3, live / replayed": ["mismatch/k3_ratio"],
            "f2": ["mismatch/f2_replay", "mismatch/f2_live"],
            "largest difference": ["mismatch/abs_max_replay", "mismatch/abs_max_live"],
        },
    }
    # TensorBoard takes a tag for the beginning of a regular expression's match: mismatch/f2 would
    # draw f2_live too.
    return {
        page: {
            chart: ["Multiline", [f"^{re.escape(tag)}$" for tag in tags]]
            for chart, tags in charts.items()
        }
        for page, charts in pages.items()
    }


def sample_markdown(row: Mapping[str, Any]) -> str:
    """A row of a rollout dump as markdown: facts, each message, the reference answer."""
    facts = (
        f"reward {row['reward']:.4g}, advantage {row['advantage']:+.3f}, "
        f"{row['response_tokens']} sampled tokens, "
        f"finish {row['finish_reason']}, {row['prompt_id']} sample {row['sample_index']}"
        + (f" sequence {row['sequence']}" if row.get("sequence") else "")
    )
    parts = [(str(message["role"]), _said(message)) for message in row["messages"]]
    if row.get("reference"):
        parts.append(("reference answer", row["reference"]))
    # Indented by four, a text is shown as it is: nothing in it is taken for markdown or HTML.
    blocks = [
        f"**{title}**\n\n" + "\n".join(f"    {line}" for line in text.splitlines() or [""])
        for title, text in parts
    ]
    return "\n\n".join([facts, *blocks])


def _said(message: Mapping[str, Any]) -> str:
    calls = [str(call.get("function", call)) for call in message.get("tool_calls") or ()]
    return "\n".join(filter(None, [str(message.get("content") or ""), *calls]))


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
