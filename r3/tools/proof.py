"""The proof of a weight sync: the engine's weights, and what it decodes, are the policy's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from r3.data.template import Renderer
from r3.engine import Engine, Sampling, Transcript, Turn, sampling_seed
from r3.engine.proof import compare
from r3.runtime.mesh import Mesh
from r3.sync.rollouts import pack_for
from r3.sync.weights import SyncError, WeightStream
from r3.types import Prompt, Rollout

if TYPE_CHECKING:
    from r3.config import Config
    from r3.policy import Policy


def prove_weights(stream: WeightStream, engine: Engine, mesh: Mesh) -> int:
    """Compare every engine's weights with the policy's, element by element.

    Also compared is what an engine makes of its weights and reads in their place: packed experts
    and convolutions, and the two parts of latent attention that decoding multiplies by.

    All ranks must call, with the engine's weights awake. Nobody may write to the policy's weights
    meanwhile.

    Returns:
        Number of tensors compared on this rank.

    Raises:
        SyncError: on every rank: an engine holds other weights than the policy somewhere.
    """
    assert not engine.is_asleep, "the proof of weights reads an engine that is awake"
    comparison = compare(engine.llm, stream.read_blocks(), engine.shape)
    for rank, (different, uncompared) in enumerate(
        mesh.world.all_gather_object((comparison.different, comparison.uncompared))
    ):
        if different:
            raise SyncError(
                f"rank {rank}: after the weight sync to version {engine.policy_version} "
                f"{len(different)} tensors of the engine are not the policy's: "
                f"{', '.join(different[:8])}{', ...' if len(different) > 8 else ''}"
            )
        # Layers that reach the engine by its reload are laid out in ways that only it knows.
        if uncompared and not engine.reloaded_experts:
            raise SyncError(
                f"rank {rank}: parameters of the engine were compared with nothing: "
                f"{', '.join(uncompared[:8])}"
            )
    return comparison.equal


def prove_sync(
    engine: Engine,
    policy: Policy,
    prompts: Sequence[Prompt],
    config: Config,
    mesh: Mesh,
    *,
    max_tokens: int = 8,
) -> float:
    """Decode a few tokens and compare their log-probabilities with the policy's.

    All ranks must call, with the engine awake at the policy's version and equally many prompts.
    Routes are replayed if captured, so that a flipped expert is not taken for a wrong weight. With
    live routes (some are with replay.plausibility) a token of a near tie may differ by any amount
    (11 measured, of a right engine), so a quarter of the tokens may: a wrong weight moves most of
    them. No end token ends a response: the first token comes from the prefill of the prompt, and
    the others are decoded one at a time, by the kernels and CUDA graphs that a step uses. Weights
    under these can be older than those of the prefill (vLLM RFC 48312; NeMo-RL 2895).

    Returns:
        The largest |log-probability difference| over all ranks; with live routes, that of three
        quarters of a rank's tokens.

    Raises:
        SyncError: on every rank: the difference exceeds what rounding in the two types explains, so
            an engine has other weights.
    """
    rollouts = sample_single_turn(
        engine,
        prompts,
        seeds=[sampling_seed(config.train.seed, -2, prompt.id, 0) for prompt in prompts],
        policy_version=engine.policy_version,
        max_tokens=max_tokens,
        temperature=config.rollout.temperature,
        ends=False,
    )
    own = rollouts if engine.is_leader else []
    # All ranks score the tokens of the first engine; every engine is compared with the first.
    first = mesh.world.all_gather_object(own)[0]
    num_layers = len(policy.shape.moe_layers) if engine.capture else 0
    # One sequence each: never longer than a micro-batch of training, even with long prompts.
    micro_batches = [pack_for(mesh, policy.shape, {0: one}, num_layers=num_layers) for one in first]
    scores = policy.score(micro_batches, mode="replay" if engine.capture else "live")
    of_engine = [_difference(mine, theirs) for mine, theirs in zip(own, first, strict=False)]
    of_policy = []
    if policy.reports:
        columns = zip(
            *(scores.logprobs, scores.rollout_logprobs, scores.loss_mask, scores.positions),
            strict=True,
        )
        for rollout, (ours_N, theirs_N, mask_N, positions_N) in zip(first, columns, strict=True):
            apart_N = ((ours_N - theirs_N).abs() * mask_N).cpu().numpy()
            # Position t scores token t + 1. The first sampled token is the prefill's.
            decoded_N = positions_N.cpu().numpy() >= int(rollout.loss_mask_T.argmax())
            scored_N = mask_N.cpu().numpy() > 0
            of_policy.append((apart_N[scored_N & ~decoded_N], apart_N[scored_N & decoded_N]))
    # Implausible experts are replaced by live ones.
    share = 1.0 if engine.capture and not config.replay.plausibility else 0.75
    everybody = mesh.world.all_gather_object(
        np.maximum(_largest(of_engine, share), _largest(of_policy, share))
    )
    limit = sync_tolerance(config)
    for rank, (prefill, decoded) in enumerate(everybody):
        if prefill <= limit and decoded <= limit:  # nan must fail too
            continue
        raise SyncError(
            f"rank {rank}: after the weight sync to version {engine.policy_version} engine and "
            f"policy differ by {decoded:.3g} in the log-probability of a decoded token and by "
            f"{prefill:.3g} in that of a prompt's next token (limit {limit:g}): the engine does "
            "not have the policy's weights"
            + (
                ". Its prefill has them: what decoding reads was not renewed, a tensor made from "
                "the weights, or memory of CUDA graphs"
                if prefill <= limit
                else ""
            )
        )
    return float(np.max(everybody))


def _largest(differences: list[tuple[np.ndarray, np.ndarray]], share: float) -> np.ndarray:
    """Return the largest difference in a share of the tokens: of prefill's, and of decoded ones.

    0 where there are none, nan where one is nan.
    """
    columns = [np.concatenate(tokens) for tokens in zip(*differences, strict=True)]
    return np.array(
        [np.quantile(column, share, method="lower") if len(column) else 0.0 for column in columns]
        or [0.0, 0.0]
    )


def _difference(mine: Rollout, theirs: Rollout) -> tuple[np.ndarray, np.ndarray]:
    """Return the log-probability differences of two engines: of prefill's tokens, and of decoded.

    Only up to the first token that differs: rounding may lead two engines to different samples.
    """
    length = min(len(mine.tokens_T), len(theirs.tokens_T))
    differs = mine.tokens_T[:length] != theirs.tokens_T[:length]
    until = int(differs.argmax()) if differs.any() else length
    apart_T = abs(mine.logprobs_T[:until] - theirs.logprobs_T[:until])
    sampled = int(mine.loss_mask_T.argmax())
    return apart_T[sampled : sampled + 1], apart_T[sampled + 1 :]


@contextmanager
def turned(policy: Policy, stream: WeightStream) -> Iterator[None]:
    """Inside, the policy has other weights: the rows of each tensor are moved on by one.

    Where adapters train, only tensors that these change; over a quantised base, B of each adapter
    is 0.1 (with 1, rounding in bfloat16 reached the limit of the proof). The weights come back bit
    for bit. A step changes weights so little that rounding hides a part of the engine that stays as
    it was; this hides nothing.
    """
    if policy.makes_weights:
        factors = [adapter.b for chunk in policy.chunks for adapter in chunk.lora.adapters]
        kept = [factor.detach().clone() for factor in factors]
        try:
            for factor in factors:
                factor.detach().fill_(0.1)
            policy.merge_adapters()
            yield
        finally:
            for factor, values in zip(factors, kept, strict=True):
                factor.detach().copy_(values)
            policy.merge_adapters()
        return

    def turn(rows: int) -> None:
        for slot in policy.slots:
            if not stream.changing or not stream.changing.isdisjoint(slot.hf):
                slot.tensor.copy_(slot.tensor.roll(rows, 0))

    turn(1)
    try:
        yield
    finally:
        turn(-1)


def sync_tolerance(config: Config) -> float:
    """Return the largest |log-probability difference| that `prove_sync` accepts of a token.

    Two float32 stacks differ by rounding (1e-5 measured), half precision by flipped experts (0.06
    on average, up to 0.5 for single tokens). A wrong or missing tensor changes log-probabilities by
    1 and more.
    """
    return 1e-3 if config.in_float32 else 1.0


def sample_single_turn(
    engine: Engine,
    prompts: Sequence[Prompt],
    *,
    seeds: Sequence[int],
    policy_version: int,
    max_tokens: int,
    temperature: float = 1.0,
    ends: bool = True,
    on_rollout: Callable[[int, Rollout], None] = lambda _index, _rollout: None,
) -> list[Rollout]:
    """Sample one response to each prompt.

    All ranks of one engine must call with the same arguments; engines are independent. Routes are
    kept on the leader rank of each engine.

    Args:
        prompts: may name one prompt several times. Rollout i belongs to group i.
        seeds: one per prompt (`sampling_seed`), unused at temperature 0.
        policy_version: version of the weights that the engine must hold.
        max_tokens: maximum tokens per response.
        ends: whether an end token ends a response.
        on_rollout: called with the index and the rollout of each response that finishes.

    Returns:
        The rollouts in the order of the prompts.

    Raises:
        EngineStateError: the engine is asleep or holds other weights.
        RouteError: routes are missing or illegal.
    """
    renderer = Renderer(engine.tokenizer)
    sampling = Sampling(temperature=temperature, stop_tokens=renderer.ends if ends else ())
    rollouts: dict[int, Rollout] = {}
    capture = engine.capture_spec
    with engine.sampler(policy_version=policy_version) as sampler:
        for index, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
            sampler.add(
                Turn(
                    key=index,
                    tokens_T=prompt.tokens_T,
                    first_row=0,
                    seed=seed,
                    max_tokens=max_tokens,
                    sampling=sampling,
                )
            )
        while sampler.busy:
            for sampled in sampler.step():
                index, prompt = sampled.key, prompts[sampled.key]
                who = f"rollout {prompt.id}/0 of step {policy_version}"
                transcript = Transcript(capture, prompt.tokens_T, who=who)
                transcript.append_sample(sampled)
                rollouts[index] = transcript.rollout(
                    prompt,
                    group=index,
                    sample_index=0,
                    finish_reason=sampled.finish_reason,
                    response=renderer.message_text(sampled.tokens_T),
                )
                on_rollout(index, rollouts[index])
    return [rollouts[index] for index in range(len(prompts))]
