"""R3: reinforcement learning for Mixture-of-Experts language models with Rollout Routing Replay
(arXiv 2510.11370).
"""

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from r3.launch.api import Result, RunError, train

__all__ = ["Result", "RunError", "__version__", "train"]
__version__ = "0.1.0"

# Read once, when torch or tokenizers are first imported, which is always after this package.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def __getattr__(name: str) -> Any:
    """`from r3 import train` works, and `import r3` alone stays immediate."""
    if name in ("Result", "RunError", "train"):
        from r3.launch import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
