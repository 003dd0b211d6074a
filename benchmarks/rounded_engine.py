"""Run train.py with an engine that rounds activations, as a rollout in eight bits or fewer does.

    MANTISSA_BITS=3 .venv/bin/python -m benchmarks.rounded_engine tiny --parallel.ep 1

The inputs of attention, of its output product and of the MoE block, router included, are rounded to
that many bits of mantissa per value (e4m3 has 3, e5m2 has 2). Weights stay as the policy sent them.
The engine rounds while it samples training rollouts, not while it is evaluated or compared with the
policy after a sync.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

import train
from benchmarks.rounding import rounded
from r3.engine import Engine
from r3.rollout import heldout
from r3.tools import proof

BITS = int(os.environ["MANTISSA_BITS"])
ROUNDED = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp", "block_sparse_moe")  # the last: Mixtral


class Rounding:
    """Forward pre-hooks of one engine; `on` while it samples what is trained on."""

    on = True

    @classmethod
    def before(cls, _module: Any, args: Any, kwargs: Any) -> Any:
        """Round every floating-point tensor among the arguments."""
        if not cls.on:
            return None
        return tuple(map(of_engine, args)), {
            name: of_engine(value) for name, value in kwargs.items()
        }

    @classmethod
    def silent(cls, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` without rounding."""

        def exact(*args: Any, **kwargs: Any) -> Any:
            cls.on = False
            try:
                return function(*args, **kwargs)
            finally:
                cls.on = True

        return exact


def of_engine(value: Any) -> Any:
    """Round a tensor of floats; other arguments stay."""
    if not (isinstance(value, torch.Tensor) and value.is_floating_point()):
        return value
    return rounded(value, BITS)


def install(worker: Any) -> int:
    """Hook the modules of the engine's model. Returns their number; runs where the model is."""
    modules = [
        module
        for name, module in worker.model_runner.get_model().named_modules()
        if name.endswith(ROUNDED)
    ]
    for module in modules:
        module.register_forward_pre_hook(Rounding.before, with_kwargs=True)
    return len(modules)


def build(engine: Engine, *args: Any, **kwargs: Any) -> None:
    """Build as always, then hook."""
    _build(engine, *args, **kwargs)
    hooked = engine.llm.collective_rpc(install)
    expected = 3 * len(engine.shape.moe_layers)  # every layer of these models is MoE
    assert hooked == [expected], f"{hooked} modules hooked, {expected} expected"


if __name__ == "__main__":
    _build, Engine.__init__ = Engine.__init__, build  # type: ignore[method-assign]
    heldout.evaluate = Rounding.silent(heldout.evaluate)
    proof.prove_sync = Rounding.silent(proof.prove_sync)
    train.main()
