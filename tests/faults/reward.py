"""A reward function as users write them, which makes a fault when a file asks for it.

It keeps a pool that nobody closes. `R3_FAULTS` names the folder of the run; the file RUN.regex.1
beside it asks for the fault `regex` on rank 1, once, and RUN.changes for changes in every call.
"""

from __future__ import annotations

import locale
import multiprocessing
import os
import random
import re
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

POOL = ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork"))


def score(response: str) -> float:
    """In a process of the pool."""
    return float(len(response) % 7)


def regex() -> None:
    """Hold the interpreter's lock for ever."""
    re.match(r"(a+)+$", "a" * 40 + "b")


def changes() -> None:
    """Change what a process has one of, and take numbers from the global generators."""
    import numpy as np
    import torch

    random.seed(random.random())
    np.random.seed(int(np.random.random() * 1000))
    torch.manual_seed(int(torch.rand(()) * 1000))
    torch.set_default_dtype(torch.bfloat16)
    torch.set_grad_enabled(False)
    np.seterr(all="raise")  # of this thread
    os.chdir("/")
    locale.setlocale(locale.LC_ALL, "C.UTF-8")
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (as of a grader that forgets it)


def reward(response: str, prompt: object) -> float:
    run, rank = os.environ["R3_FAULTS"], os.environ.get("RANK")
    if Path(f"{run}.changes").exists():
        changes()
    asked = Path(f"{run}.regex.{rank}")
    if asked.exists():
        asked.unlink()
        regex()
    return POOL.submit(score, response).result()
