"""R3: reinforcement learning for Mixture-of-Experts language models with Rollout Routing Replay
(arXiv 2510.11370).
"""

import os
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from r3.launch.api import Result, RunError, train

__all__ = ["Result", "RunError", "__version__", "train"]
__version__ = "0.1.0"

# Read once, when torch or tokenizers are first imported, which is always after this package.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def names_of(package: str, /, **homes: str) -> Callable[[str], Any]:
    """Return a package's `__getattr__`, which imports public names when they are asked for.

    Args:
        package: name of the package.
        homes: by module of the package, the names that it gives to others, separated by spaces.
    """
    home_of = {name: home for home, names in homes.items() for name in names.split()}

    def get(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{home_of[name]}"), name)

    return get


__getattr__ = names_of(__name__, **{"launch.api": "Result RunError train"})
