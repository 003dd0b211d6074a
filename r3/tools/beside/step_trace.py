"""A trace of one step: every operation of a rank with its time, under the phases of the step."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from r3.run.folder import RunDir


class StepTrace:
    """Records one step and writes it for https://ui.perfetto.dev; does nothing in other steps.

    Args:
        folder: of the run.
        step: the step to record; 0 = none.
        rank: of this process; every rank writes a file of its own.
    """

    def __init__(self, folder: RunDir, *, step: int, rank: int) -> None:
        self._folder, self._step, self._rank = folder, step, rank
        self._profiler: Any = None

    def open_step(self, step: int) -> None:
        """Start recording if `step` is the one."""
        if step == self._step:
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would print its own progress
            import torch

            self._profiler = torch.profiler.profile()  # CPU, and CUDA where there is a GPU
            self._profiler.start()

    def phase(self, name: str) -> AbstractContextManager[Any]:
        """Name what runs inside."""
        if self._profiler is None:
            return nullcontext()
        import torch

        return torch.profiler.record_function(f"phase: {name}")

    def close_step(self) -> None:
        """Write the trace of the step that ends, if it was recorded."""
        if self._profiler is None:
            return
        self._profiler.stop()
        path = self._folder.trace(self._step, self._rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._profiler.export_chrome_trace(str(path))
        self._profiler = None
