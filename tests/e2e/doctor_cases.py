"""Faults in the real path of routes, and the result of the doctor's known-answer test for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from r3.algo import packing
from r3.models.shape import ModelShape
from r3.policy import Policy
from r3.routing import Replay, RouterTap
from r3.runtime.device import Device
from r3.runtime.mesh import build_mesh
from r3.sync import rollouts as exchange
from r3.tools import CheckFailed, coded_experts, read_back_coded_routes
from r3.types import RouteError
from tests.errors import message_of
from tests.tiny import tiny_config
from tests.wrong_routes import patched, rows_lost, samples_swapped


def _rolled(axis: int) -> Callable[[Any], Any]:
    """What loads routes late by a token (axis 0), or into the next layer (axis 1)."""

    def wrap(load: Any) -> Any:
        def faulty(self: Replay, routes_NLK: Any, *rest: Any, **facts: Any) -> None:
            load(self, routes_NLK.roll(1, axis), *rest, **facts)

        return faulty

    return wrap


def _packed_backwards(pack: Any) -> Any:
    """Tokens are packed in one order, routes in the other."""

    def faulty(rollouts: Any, *args: Any, **kwargs: Any) -> Any:
        micro_batch = pack(rollouts, *args, **kwargs)
        if not rollouts:
            return micro_batch
        back = pack(rollouts[::-1], *args, **kwargs)
        return replace(micro_batch, routed_experts_NLK=back.routed_experts_NLK)

    return faulty


def _live(get_replay_topk: Any) -> Any:
    """The router asks for routes, ignores them and routes live, as a fused router does."""

    def faulty(self: RouterTap, *given: Any) -> Any:
        get_replay_topk(self, *given)
        self.sizes = None  # otherwise the dispatcher refuses what was not planned
        *routed, compute = given
        return compute(*routed)

    return faulty


def faults(device: Device, *, ep: int) -> dict[str, str]:
    """Return the result of `read_back_coded_routes` without and with each fault."""
    config = tiny_config(parallel={"ep": ep}, model={"recompute": "full"})
    mesh = build_mesh(device, config.parallel)
    policy = Policy(config, device, mesh, ModelShape.read(config.model.path))
    found: dict[str, str] = {}

    def ask(name: str) -> None:
        def check() -> None:
            found[name] = read_back_coded_routes(policy, mesh, config)

        message = message_of(check, CheckFailed, RouteError)
        found.setdefault(name, message)

    on_rank_1 = _rolled(0) if device.rank == 1 else lambda load: load
    swapped = lambda decode: lambda message: samples_swapped(decode(message))  # noqa: E731
    ask("sound")
    for name, owner, attribute, wrap in (
        ("rows shifted", Replay, "load", _rolled(0)),
        ("layers swapped", Replay, "load", _rolled(1)),
        ("rows lost", Replay, "load", rows_lost),
        ("on one rank", Replay, "load", on_rank_1),
        ("samples swapped", exchange, "decode", swapped),
        ("packed backwards", packing, "pack", _packed_backwards),
        ("routed live", RouterTap, "get_replay_topk", _live),
    ):
        with patched(owner, attribute, wrap):
            ask(name)
    ask("sound again")
    return found


def codes() -> dict[str, float]:
    """Shares of slots whose code equals that of another token, layer or rollout by chance."""
    shape = ModelShape.read(tiny_config().model.path)
    rollouts, positions = (
        x.reshape(-1) for x in np.meshgrid(np.arange(20), np.arange(50), indexing="ij")
    )
    code = np.sort(coded_experts(rollouts, positions, shape), axis=-1)
    grid = code.reshape(20, 50, *code.shape[1:])
    return {
        "distinct": float((np.diff(code, axis=-1) > 0).all()),
        "legal": float(code.min() >= 0 and code.max() < shape.num_experts),
        "next token": float((grid[:, 1:] == grid[:, :-1]).all(-1).mean()),
        "next rollout": float((grid[1:] == grid[:-1]).all(-1).mean()),
        "next layer": float((grid[:, :, 1:] == grid[:, :, :-1]).all(-1).mean()),
    }
