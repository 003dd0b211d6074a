"""vLLM's warnings as lines of R3, without those that need no action."""

from __future__ import annotations

import logging
import os

from r3.runtime.terminal import say

# What a warning says -> why nobody has to act.
_NEEDS_NO_ACTION = {
    "JIT compilation during inference": "the kernels of R3's training are compiled in this process",
    "VLLM_ENABLE_V1_MULTIPROCESSING is set to False": "R3 restores the random state",
    "Using default MoE config": "no file is tuned for the sizes; results are the same",
}


class _Lines(logging.Handler):
    """Writes each message on a line of its own, with the name of the library."""

    def emit(self, record: logging.LogRecord) -> None:
        said = self.format(record)  # with the traceback, if there is one
        if not any(phrase in said for phrase in _NEEDS_NO_ACTION):
            say(f"vllm {record.levelname.lower()}: {said}", error=True)


def show_as_lines() -> None:
    """Give vLLM's logger this handler, unless the user configures its logging.

    vLLM must have been imported, which installs its own.
    """
    by_user = os.environ.get("VLLM_CONFIGURE_LOGGING") == "0"
    if not (by_user or os.environ.get("VLLM_LOGGING_CONFIG_PATH")):
        logging.getLogger("vllm").handlers[:] = [_Lines()]
