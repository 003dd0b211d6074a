"""E4 and E7: passes of one policy, old and new, live and replayed, and what they report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from r3.config import Config
from r3.metrics.mismatch import mismatch
from r3.metrics.reduce import Mean
from r3.models.shape import ModelShape
from r3.policy import Policy
from r3.policy.updates import train_on
from r3.routing.replay import routing_metrics
from r3.runtime.device import Device
from r3.runtime.mesh import Mesh, build_mesh
from r3.types import Batch
from tests.ranks.cases import batches_of, build
from tests.tiny import tiny_config


def policy_of(device: Device, mesh: Mesh, config: Config) -> Policy:

    return Policy(config, device, mesh, ModelShape.read(config.model.path))


def consistency(device: Device, *, model: str, ep: int) -> dict[str, Any]:
    """E7: ratios of the first update to the old pass, with replay in both, in one only, and with
    recorded routes (R2).
    """
    from r3.policy import policy as module

    mesh, policy = build(device, tiny_config(model, parallel={"ep": ep}))
    (batch,) = batches_of(mesh, policy.shape, micro_batch_tokens=96)
    ratios: list[torch.Tensor] = []
    real = module.policy_loss

    def watched(
        config: Any, batch: Any, tokens: Any, cp: Any, logprobs_N: Any, old_N: Any, *rest: Any
    ) -> Any:
        ratios.append((logprobs_N.detach() - old_N).exp()[tokens.loss_mask_N > 0])
        return real(config, batch, tokens, cp, logprobs_N, old_N, *rest)

    module.policy_loss = watched
    found: dict[str, Any] = {}
    for old_mode in ("replay", "live", "record"):
        scores = policy.score(batch.micro_batches, mode=old_mode)
        recorded = scores.ledger.recorded if old_mode == "record" else None
        ratios.clear()
        metrics = policy.forward_backward(
            batch, old_logprobs=scores.logprobs, recorded_routes=recorded
        )
        ratio = torch.cat(ratios)
        found[old_mode] = {
            "tokens": len(ratio),
            "off_by": float((ratio - 1).abs().max()),
            "clipped": metrics["loss/clip_frac"].total,
            "agreed": metrics["routing/agreement"].total,
            "slots": metrics["routing/agreement"].count,
        }
    # Several updates on routes recorded before the first: the router moves away from them, the
    # forward stays on them.
    recorded = policy.score(batch.micro_batches, mode="record").ledger.recorded
    agreement, stayed = [], []
    for _ in range(4):
        metrics = policy.update(batch, total_updates=100, recorded_routes=recorded).metrics
        agreement.append(metrics["routing/agreement"].total / metrics["routing/agreement"].count)
        stayed.append(_stays_on(policy, batch, recorded))
    module.policy_loss = real
    return {"old_pass": found, "agreement": agreement, "stayed": stayed}


def _stays_on(policy: Policy, batch: Batch, recorded: Sequence[torch.Tensor]) -> bool:
    """Whether a forward with these routes sends every token where they say."""
    with read_back(policy) as maps:
        policy.score(batch.micro_batches, mode="replay", recorded_routes=recorded)
    layers = [layer for layer in policy.replay.moe_layers if layer in policy.replay.taps]
    return all(
        torch.equal(
            maps[layer][i],
            torch.zeros_like(maps[layer][i]).scatter(1, routes_NLK[:, position].long(), True),
        )
        for position, layer in enumerate(layers)
        for i, routes_NLK in enumerate(recorded)
    )


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


@contextmanager
def read_back(policy: Policy, *, backward: bool = False) -> Iterator[dict[int, list[torch.Tensor]]]:
    """Inside, the routing maps `[N, E]` that leave every router, per layer in order; `backward`: of
    recomputations only.
    """
    maps: dict[int, list[torch.Tensor]] = {layer: [] for layer in policy.replay.taps}
    routers = {
        layer.layer_number - 1: layer.mlp.router
        for chunk in policy.chunks
        for layer in chunk.decoder.layers
        if hasattr(layer.mlp, "router")
    }

    def keep(layer: int) -> Callable[[Any, Any, Any], None]:
        def hook(_module: Any, _args: Any, out: Any) -> None:
            if in_backward() == backward:
                maps[layer].append(out[1].cpu())

        return hook

    hooks = [router.register_forward_hook(keep(layer)) for layer, router in routers.items()]
    try:
        yield maps
    finally:
        for hook in hooks:
            hook.remove()


def modes(device: Device, *, model: str) -> dict[str, Any]:
    """Keys and values that steps report in every replay mode, with the reference replayed or not;
    then an accident.
    """
    config = tiny_config(
        model, model={"recompute": "full"}, algo={"kl_coef": 0.1}, train={"lr": 0.02}
    )
    mesh = build_mesh(device, config.parallel)
    nothing_R = torch.zeros(0)
    found: dict[str, Any] = {}
    for name, replay, updates in (
        ("off", {"mode": "off"}, 2),
        ("r2", {"mode": "r2"}, 2),
        ("r3", {"mode": "r3"}, 2),
        ("r3, one update", {"mode": "r3", "reference": True}, 1),
    ):
        setting = replace(
            config,
            replay=replace(config.replay, **replay),
            train=replace(config.train, updates_per_step=updates),
        )
        policy = policy_of(device, mesh, setting)
        batches = batches_of(mesh, policy.shape, micro_batch_tokens=96, num_updates=updates)
        flat = [micro_batch for batch in batches for micro_batch in batch.micro_batches]
        before = policy.score(flat, mode="replay").ledger
        live, replay_arm = (policy.score(flat[1:2], mode=mode) for mode in ("live", "replay"))
        k3 = [
            mismatch(*(torch.cat(c) for c in (s.logprobs, s.rollout_logprobs, s.loss_mask)))["k3"]
            for s in (live, replay_arm)
        ]
        parts: dict[str, list[Any]] = {}

        def report(metrics: Any, parts: dict[str, list[Any]] = parts) -> None:
            for key, part in metrics.items():
                parts.setdefault(key, []).append(part)

        scored: list[tuple[str, int]] = []
        real = policy.score

        def counting(
            micro_batches: Any, *, mode: Any, real: Any = real, scored: Any = scored, **rest: Any
        ) -> Any:
            scored.append((mode, len(micro_batches)))
            return real(micro_batches, mode=mode, **rest)

        policy.score = counting  # type: ignore[method-assign]  # the real one, counted
        train_on(
            policy, batches, nothing_R.double(), nothing_R.long(), setting, step=2, report=report
        )
        policy.score = real  # type: ignore[method-assign]
        found[name] = {
            "scored": scored,
            "sizes": [len(batch.micro_batches) for batch in batches],
            "row": {key: type(some[0]).reduce(some) for key, some in parts.items()},
            "slots": {
                key: sum(part.count for part in some)
                for key, some in parts.items()
                if key == "routing/agreement"
            },
            "agreement": Mean.reduce([routing_metrics(before)["routing/agreement"]]),
            "all_slots": sum(before.rows),
            "k3_ratio": k3[0].total / k3[1].total,
        }
    found["accident"] = _accident(policy, batches[0])
    return found


def _accident(policy: Policy, batch: Batch) -> dict[str, Any]:
    """A forward of an update raises in its second micro-batch, checkpointed: what the passes after
    it see of that.
    """
    before = policy.score(batch.micro_batches, mode="live").logprobs
    last = max(policy.replay.taps)
    calls = []

    def fail(_module: Any, _args: Any, _out: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise OSError("in the middle of a schedule")

    router = next(
        layer.mlp.router
        for layer in policy.chunks[0].decoder.layers
        if layer.layer_number - 1 == last
    )
    hook = router.register_forward_hook(fail)
    try:
        policy.forward_backward(batch)
        said = "nothing was raised"
    except OSError as error:
        said = str(error)
    hook.remove()
    tap = policy.replay.taps[last]
    state = (tap.mode, tap.training, tap.forwards, tap.leftovers(), tap.counts, policy.replay.mode)
    after = policy.score(batch.micro_batches, mode="live").logprobs
    return {
        "said": said,
        "state": state,
        "same": all(torch.equal(one, other) for one, other in zip(before, after, strict=True)),
        "update": policy.update(batch, total_updates=10).grad_norm,
    }
