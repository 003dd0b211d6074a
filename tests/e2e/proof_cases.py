"""An engine that keeps something of its old weights after a sync, and what the proof says."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from r3 import assets
from r3.engine.direct_weights import DERIVED
from r3.runtime.device import Device
from r3.sync import State, SyncError
from r3.tools import prove_sync, turned
from tests.engines import World, held_tensors, net_of
from tests.errors import message_of
from tests.policies import weights_of
from tests.processor import emulate_avx512_bf16
from tests.tiny import tiny_config


def kept_tensors(device: Device, *, model: str, dtype: str) -> SimpleNamespace:
    """Sync, change the policy, sync again, and put back each kind of tensor that is made of others.

    Of each kind, those of all layers are put back at once.

    Returns:
        Messages of both proofs after tensors of the engine were put back, by their names.
        sound: largest log-probability difference when nothing was.
        turned: the same with the policy's rows moved on.
        back: whether the policy's weights came back bit for bit.
    """
    if dtype == "bfloat16":
        emulate_avx512_bf16()
    half = {"dtype": dtype}
    world = World(device, tiny_config(model, model=half, engine=half))
    engine, policy = world.engine, world.policy
    world.sync(0)
    net = net_of(engine)
    old = {kind: [get().clone() for get, _ in places(net, kind)] for kind in kinds(net)}
    world.residency.move(State.TRAIN)
    world.perturb()
    world.sync(1)
    world.prove_weights()
    found = SimpleNamespace(weights={}, decoded={}, sound=world.proof())
    for kind, tensors in old.items():
        kept = [get().clone() for get, _ in places(net, kind)]
        for tensor, (_, put) in zip(tensors, places(net, kind), strict=True):
            put(tensor)
        engine.reset_cache()
        found.weights[kind] = world.proof_of_weights()
        found.decoded[kind] = message_of(world.proof, SyncError)
        for tensor, (_, put) in zip(kept, places(net, kind), strict=True):
            put(tensor)
        engine.reset_cache()
    before = weights_of(policy)
    with turned(policy, world.stream):
        moved = [not torch.equal(a, s.tensor) for a, s in zip(before, policy.slots, strict=True)]
        assert sum(moved) > len(moved) / 2, "most tensors have rows that differ"
        world.residency.move(State.TRAIN)
        world.sync(2)
        world.prove_weights()
        found.turned = world.proof()
    found.back = all(torch.equal(a, s.tensor) for a, s in zip(before, policy.slots, strict=True))
    return found


def live_routes(device: Device, *, dtype: str, **replay: Any) -> tuple[float, str]:
    """Prove a sync of a model with near ties whose routes are not replayed as they were captured.

    Returns:
        The proof's figure after the sync, and its message after the policy changed alone.
    """
    half = {"dtype": dtype}
    config = tiny_config(assets.TINY_MOE_TIES, model=half, engine=half, replay=replay)
    world = World(device, config)
    prompts = world.task.prompts.prompts[:32]
    world.sync(0)
    assert bool(world.engine.capture) == ("plausibility" in replay)

    def proof() -> float:
        return prove_sync(world.engine, world.policy, prompts, config, world.mesh)

    sound = proof()
    if dtype == "float32":
        world.perturb()
        return sound, message_of(proof, SyncError)
    with turned(world.policy, world.stream):
        return sound, message_of(proof, SyncError)


def quantised(device: Device, *, base: str) -> SimpleNamespace:
    """Prove syncs of adapters over a quantised base, with other adapters between them.

    Returns:
        sound: the proof's figure after each of three syncs.
        message: of the proof before the other adapters are synced.
        moved, back: whether the engine's weights changed with the second sync, and came back.
    """
    half = {"dtype": "bfloat16"}
    model = {"base": base, **half}
    world = World(device, tiny_config(model=model, engine=half, lora={"rank": 4}))

    def synced(version: int) -> tuple[float, dict[str, str]]:
        if version:
            world.residency.move(State.TRAIN)
        world.sync(version)
        assert world.prove_weights() > 0
        return world.proof(), held_tensors(world.engine)

    first = synced(0)
    with turned(world.policy, world.stream):
        message = message_of(world.proof, SyncError)
        second = synced(1)
    third = synced(2)
    sound = [first[0], second[0], third[0]]
    moved, back = first[1] != second[1], first[1] == third[1]
    return SimpleNamespace(sound=sound, message=message, moved=moved, back=back)


def kinds(net: Any) -> list[str]:
    """Kinds of tensors of an engine that are made of others, or packed."""
    return [kind for kind in (*DERIVED, "experts", "packed", "unpacked") if places(net, kind)]


Place = tuple[Callable[[], torch.Tensor], Callable[[torch.Tensor], None]]


def places(net: Any, kind: str) -> list[Place]:
    """How the tensors of a kind are read and written, in the order of the layers."""

    def of(module: Any, leaf: str) -> Place:
        def put(tensor: torch.Tensor) -> None:
            if kind in DERIVED:  # a view of the weight that it is made of
                getattr(module, leaf).data = tensor
            else:
                getattr(module, leaf).data.copy_(tensor)

        return lambda: getattr(module, leaf).data, put

    found = []
    for module in net.modules():
        own = dict(module.named_parameters(recurse=False))
        if kind in DERIVED and kind in own:
            found.append(of(module, kind))
        if kind == "experts" and "w13_weight" in own:
            found.append(of(module, "w13_weight"))
        if hasattr(module, "_cpu_unpacked_conv_weight"):
            leaf = {"packed": "weight", "unpacked": "_cpu_unpacked_conv_weight"}.get(kind)
            found += [of(module, leaf)] if leaf else []
    return found
