"""The engine as an oracle for a dump: its tokens decoded again, and where engine and policy part.

The engine decodes the tokens of the dump one at a time, as it decoded them when they were sampled:
each is put in the place of the one that it samples. It returns their log-probabilities and the
experts that it chose. The policy replays these experts. What is left of the difference then comes
from weights or arithmetic, and its place (layer, position, experts) tells which.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from r3.config import Config, with_values
from r3.data.template import load_tokenizer
from r3.engine import Engine, Sampling, Transcript, Turn
from r3.engine.proof import compare
from r3.models.shape import ModelShape
from r3.policy import Policy, TokenScores
from r3.routing import Mode
from r3.runtime.device import Device
from r3.runtime.mesh import Mesh
from r3.sync import Residency, State
from r3.sync.rollouts import PackingSpec
from r3.sync.weights import WeightStream, sync_weights
from r3.tools.mismatch.parting import Forced, Parting
from r3.tools.passes import shared_batch
from r3.types import Batch, MicroBatch, Rollout


def build_engine(
    config: Config, device: Device, shape: ModelShape, rollouts: Sequence[Rollout], folder: str
) -> Engine:
    """Build an engine for a dump, asleep. All ranks must call, before the policy is built.

    Args:
        folder: a Hugging Face folder whose weights it loads; empty: it waits for the policy's.
    """
    if folder:  # a deeper sleep would drop its weights
        config = with_values(config, {"engine.sleep_level": 1})
        shape = ModelShape.read(folder)
    return Engine(
        config,
        device,
        shape,
        load_tokenizer(shape.source),
        max_model_len=max(len(rollout.tokens_T) for rollout in rollouts),
        from_disk=bool(folder),
    )


def decode(
    engine: Engine,
    policy: Policy,
    rollouts: Sequence[Rollout],
    device: Device,
    mesh: Mesh,
    *,
    from_disk: bool,
) -> tuple[list[Forced], list[str]]:
    """Decode a dump by an engine that sleeps; it sleeps again afterwards. All ranks must call.

    Args:
        from_disk: the engine has weights of its own.

    Returns:
        What the engine returned, and names of its tensors that are not the policy's.
    """
    residency, stream = Residency(engine, policy, device), WeightStream(policy, device, mesh)
    version = rollouts[0].policy_version
    residency.move(State.SYNC)
    if from_disk:
        engine.policy_version = version
        engine.reset_cache()
    else:
        sync_weights(stream, engine, device, mesh, policy_version=version)
    residency.move(State.GENERATE)
    different = compare(engine.llm, stream.read_blocks(), engine.shape).different
    temperature = policy.config.rollout.temperature
    forced = forced_decoding(engine, rollouts, mesh, temperature=temperature)
    residency.move(State.TRAIN)
    return forced, different


@contextmanager
def _forcing(engine: Engine, tokens: Mapping[int, Sequence[int]]) -> Iterator[None]:
    """Inside, requests sample the tokens that are given for their keys.

    vLLM's sampler computes its log-probabilities as ever; the token that it drew is replaced before
    they are read off. The place of a row's token is the number of tokens that the request has.
    """
    (runner,) = engine.llm.collective_rpc(lambda worker: worker.model_runner)
    sampler, batch = runner.sampler, runner.input_batch
    draw = sampler.sample

    def forced_sample(*args: Any, **more: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        drawn, logprobs = draw(*args, **more)
        for row, name in enumerate(batch.req_ids[: len(drawn)]):
            wanted = tokens[int(name.partition("-")[0])]
            place = int(batch.num_tokens_no_spec[row])
            if place < len(wanted):  # with async scheduling a step more is drawn, and dropped
                drawn[row] = wanted[place]
        return drawn, logprobs

    sampler.sample = forced_sample
    try:
        yield
    finally:
        del sampler.sample


def forced_decoding(
    engine: Engine, rollouts: Sequence[Rollout], mesh: Mesh, *, temperature: float
) -> list[Forced]:
    """Decode the tokens of rollouts again, after their prompts. All ranks must call.

    Observations between sampled tokens are decoded too; nobody reads their log-probabilities.

    Args:
        engine: awake.
        rollouts: the same on all ranks; each engine decodes its share.
        mesh: the layout of the ranks.
        temperature: of the log-probabilities.

    Returns:
        One for each rollout, on all ranks.

    Raises:
        RouteError: the engine returned no routes, or too few.
    """
    share = range(mesh.engine_dp.rank, len(rollouts), mesh.engine_dp.size)
    starts = {i: int(rollouts[i].loss_mask_T.argmax()) for i in share}
    tokens = {i: rollouts[i].tokens_T.tolist() for i in share}
    sampling = Sampling(temperature=temperature)  # nothing ends a turn but its length
    forced: dict[int, Forced] = {}
    with _forcing(engine, tokens), engine.sampler(policy_version=engine.policy_version) as sampler:
        for i in share:
            sampler.add(
                Turn(
                    key=i,
                    tokens_T=tokens[i][: starts[i]],
                    first_row=0,
                    seed=i,
                    max_tokens=len(tokens[i]) - starts[i],
                    sampling=sampling,
                )
            )
        while sampler.busy:
            for sampled in sampler.step():
                i = sampled.key
                assert tokens[i][starts[i] :] == sampled.tokens_T, f"{rollouts[i].name}: not forced"
                name = f"rollout {rollouts[i].name}"
                transcript = Transcript(engine.capture_spec, tokens[i][: starts[i]], who=name)
                transcript.append_sample(sampled)
                logprobs_T = np.array(transcript.logprobs, np.float32)
                forced[i] = Forced(logprobs_T=logprobs_T, routed_experts=transcript.rows())
    own = forced if engine.is_leader else {}
    everything = {i: each for part in mesh.world.all_gather_object(own) for i, each in part.items()}
    return [everything[i] for i in range(len(rollouts))]


def by_rollout(
    rollouts: Sequence[Rollout],
    micro_batches: Sequence[MicroBatch],
    passes: Mapping[str, TokenScores],
    mesh: Mesh,
) -> list[dict[str, np.ndarray]]:
    """Return the scores of every rollout, on all ranks. All ranks must call.

    `logprobs_PASS` [T] are 0 where nothing was sampled; `routes_PASS` [T-1, L, K] are the experts
    that the routers chose in a pass that recorded them.

    Args:
        rollouts: the same on every rank.
        micro_batches: what this rank scored; whole sequences, so no tensor, pipeline or context
            parallelism.
        passes: what `policy.score` returned, by name.
    """
    own: dict[int, dict[str, np.ndarray]] = {}
    for number, micro_batch in enumerate(micro_batches):
        starts = micro_batch.cu_seqlens[:-1]
        for index, start in zip(micro_batch.rollout_ids, starts, strict=True):
            if index < 0:
                continue
            mask_T = rollouts[index].loss_mask_T
            rows = slice(start, start + len(mask_T) - 1)
            own[index] = {}
            for label, scores in passes.items():
                # Position t scores token t + 1; the first token has no score.
                logprobs = np.append(np.float32(0), scores.logprobs[number][rows].cpu().numpy())
                own[index][f"logprobs_{label}"] = logprobs.astype(np.float32) * mask_T
                if scores.ledger.recorded:
                    routes = scores.ledger.recorded[number][rows]
                    own[index][f"routes_{label}"] = routes.cpu().numpy()
    everything = {i: a for part in mesh.world.all_gather_object(own) for i, a in part.items()}
    assert everything.keys() == set(range(len(rollouts))), (
        f"scores of {len(everything)} rollouts, the dump has {len(rollouts)}"
    )
    return [everything[i] for i in range(len(rollouts))]


def packed(
    rollouts: Sequence[Rollout], policy: Policy, mesh: Mesh, *, tokens: int, captured: bool
) -> Batch:
    """Pack rollouts that all ranks have, each rank its share. All ranks must call.

    Args:
        tokens: most in a micro-batch.
        captured: whether they have routes.
    """
    spec = PackingSpec(
        micro_batch_tokens=tokens,
        layers=policy.replay.layers,
        captured=captured,
        on_missing="live",
    )
    return shared_batch(rollouts, mesh, policy.shape, spec)


def sides(
    policy: Policy,
    rollouts: Sequence[Rollout],
    forced: Sequence[Forced],
    mesh: Mesh,
    *,
    tokens: int,
    different: Sequence[str] = (),
) -> Parting:
    """Score rollouts with the engine's routes and with live ones, and put all side by side.

    All ranks must call. Arguments as of `packed` and `Parting`.
    """
    pairs = zip(rollouts, forced, strict=True)
    changed = [replace(one, routed_experts=decoded.routed_experts) for one, decoded in pairs]
    captured = forced[0].routed_experts.shape[1] > 0
    batch = packed(changed, policy, mesh, tokens=tokens, captured=captured)
    modes: dict[str, Mode] = (
        {"replay": "replay", "live": "record"} if captured else {"live": "live"}
    )
    passes = {name: policy.score(batch, mode=mode) for name, mode in modes.items()}
    scores = by_rollout(rollouts, batch, passes, mesh)
    return Parting.of(
        rollouts,
        forced,
        [scored["logprobs_replay" if captured else "logprobs_live"] for scored in scores],
        [
            scored.get("routes_live", one.routed_experts)
            for scored, one in zip(scores, changed, strict=True)
        ],
        policy.shape,
        different,
    )
