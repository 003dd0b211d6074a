"""Run train.py with noisy routers in the engine, for experiment E12 of `mismatch.py`.

    ROUTER_NOISE=0.5 .venv/bin/python -m benchmarks.noisy_engine tiny --parallel.ep 1

Seeded normal noise of that standard deviation is added to the engine's router logits while it
samples training answers, not while it is evaluated or compared with the policy. Small models have
decided routers and little mismatch; large ones in eight bits have much.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

import train
from r3.engine import Engine
from r3.rollout import heldout
from r3.tools import proof

SCALE = float(os.environ["ROUTER_NOISE"])


class Noise:
    """The noise of one engine; `on` while it samples what is trained on."""

    on = True
    generator = torch.Generator().manual_seed(0)

    @classmethod
    def add(cls, _module: Any, _args: Any, output: Any) -> Any:
        """Forward hook of a router's linear layer, whose output is (logits, bias)."""
        if not cls.on:
            return output
        logits, *rest = output
        noise = torch.randn(logits.shape, generator=cls.generator) * SCALE
        return (logits + noise.to(logits.dtype), *rest)

    @classmethod
    def silent(cls, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` with the noise off."""

        def quiet(*args: Any, **kwargs: Any) -> Any:
            cls.on = False
            try:
                return function(*args, **kwargs)
            finally:
                cls.on = True

        return quiet


def install(worker: Any) -> int:
    """Hook every router of the engine's model; runs where the model is. Returns how many there
    are.
    """
    gates = [
        module
        for name, module in worker.model_runner.get_model().named_modules()
        if name.endswith("mlp.gate")
    ]
    for gate in gates:
        gate.register_forward_hook(Noise.add)
    return len(gates)


def build(engine: Engine, *args: Any, **kwargs: Any) -> None:
    """Build as always, then hook."""
    _build(engine, *args, **kwargs)
    hooked = engine.llm.collective_rpc(install)
    assert hooked == [len(engine.shape.moe_layers)], f"{hooked} routers hooked"


if __name__ == "__main__":
    _build, Engine.__init__ = Engine.__init__, build  # type: ignore[method-assign]
    heldout.evaluate = Noise.silent(heldout.evaluate)
    proof.prove_sync = Noise.silent(proof.prove_sync)
    train.main()
