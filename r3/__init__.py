"""R3: reinforcement learning for Mixture-of-Experts language models with Rollout Routing Replay
(arXiv 2510.11370).
"""

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from r3.api import train

__all__ = ["__version__", "train"]
__version__ = "0.1.0"

# Read once, when torch or tokenizers are first imported, which is always after this package.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def __getattr__(name: str) -> Any:
    """`from r3 import train` works, and `import r3` alone stays immediate."""
    if name == "train":
        from r3.api import train

        return train
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
