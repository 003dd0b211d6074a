"""Run a program in a process that finds no vllm: `python -m tests.without_engine train.py ...`.

Also `-m MODULE ...` and `-c CODE`.
"""

import importlib
import runpy
import sys
from importlib.abc import MetaPathFinder
from typing import Any


class NoEngine(MetaPathFinder):
    """Says that vllm is not installed."""

    def find_spec(self, name: str, *_: Any) -> None:
        if name.partition(".")[0] == "vllm":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def preload() -> None:
    """Import what such programs import."""
    sys.meta_path.insert(0, NoEngine())
    import torch

    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    for module in ("r3.run.session", "r3.rescore", "benchmarks.gpu"):
        importlib.import_module(module)


if __name__ == "__main__":
    sys.meta_path.insert(0, NoEngine())
    sys.argv = sys.argv[1:]
    if sys.argv[0] == "-c":
        exec(sys.argv[1])
    elif sys.argv[0] == "-m":
        sys.argv = sys.argv[1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
