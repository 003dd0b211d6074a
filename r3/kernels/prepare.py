"""Compile the CPU kernels for a data type, or load them, so that the first step need not.

python -m r3.kernels.prepare      for every type, so that no run has to (`make setup`)
"""

from __future__ import annotations

from functools import cache

import torch

from r3.kernels import sampled_attention, sampled_experts, tiles
from r3.kernels.cache import compiling
from r3.kernels.switch import is_on

_LOOPS = {
    "sampled_attention": sampled_attention.prepare,
    "sampled_experts": sampled_experts.prepare,
}


@cache
def prepare(dtype: torch.dtype) -> None:
    """Compile or load every loop that is on, for numbers of a type.

    Called before `r3.runtime.device.settle`, so that no later search for garbage looks at the
    compiler's objects.
    """
    names = [name for name in _LOOPS if is_on(name)]
    with compiling("-".join([str(dtype).removeprefix("torch."), *names])):
        for name in names:
            _LOOPS[name](dtype)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for each in filter(tiles.can_compute, tiles.SIMILAR):
        prepare(each)
