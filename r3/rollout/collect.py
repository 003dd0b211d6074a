"""Sample a round of conversations with an engine, and compute metrics of its rollouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from r3 import extras
from r3.engine import Engine, Sampling
from r3.metrics.glossary import REFUSED
from r3.metrics.reduce import Mean, Sum, means
from r3.rewards.scorer import Scorer
from r3.rollout.conversation_setup import ConversationRules, ConversationSetup
from r3.rollout.round import Round, RoundResult
from r3.runtime.mesh import Mesh
from r3.types import Prompt, Rollout, Sample


@dataclass(frozen=True, kw_only=True)
class Collector:
    """Holds conversations about prompts and rewards them; built once, used for many rounds.

    Attributes:
        setup: environments, tokenizer and chat template.
        scorer: rewards each conversation when it ends, while the engine samples.
        sampling: how tokens are drawn; the strings and tokens that end a turn are added to it.
        run_seed: seed of the run.
        samples_per_prompt: conversations per prompt.
        max_response_tokens: maximum tokens of a conversation after its first messages, sampled
            and observed.
        token_budget: tokens that a conversation may sample per round before it is suspended; 0 is
            no budget.
        keep_failed: conversations that `on_error` would drop end with reward 0 instead.
    """

    engine: Engine
    mesh: Mesh
    setup: ConversationSetup
    scorer: Scorer
    sampling: Sampling
    run_seed: int
    samples_per_prompt: int
    max_response_tokens: int
    token_budget: int = 0
    keep_failed: bool = False

    def collect(
        self,
        prompts: Sequence[Prompt],
        *,
        policy_version: int,
        seed_step: int,
        first_group: int = 0,
        prompt_indices: Sequence[int] | None = None,
        resumed: Sequence[Any] = (),
        on_rollout: Callable[[], None] = lambda: None,
    ) -> RoundResult:
        """Hold one round of conversations, sampled with weights of `policy_version`.

        All ranks of one engine must call together; engines are independent. What is sampled
        depends only on the run's seed, `seed_step`, prompt, group, sample and turn.

        Args:
            prompts: all prompts of the round, the same on every rank. Engine i of n takes prompts
                i, i + n, ...
            seed_step: step that names the random streams of the new conversations.
            first_group: group of the first prompt.
            prompt_indices: prompts that this engine takes instead.
            resumed: suspended conversations that this engine resumes.
            on_rollout: called when a conversation has its reward, is suspended or is dropped.

        Raises:
            EngineStateError: the engine is asleep or holds other weights.
            EnvironmentFailed: an environment failed and `env.on_error` is "stop".
            RewardError: a reward function failed and `reward.on_error` is "stop".
        """
        engine = self.engine
        if prompt_indices is None:
            prompt_indices = range(self.mesh.engine_dp.rank, len(prompts), self.mesh.engine_dp.size)
        with ExitStack() as stack:
            sampler = stack.enter_context(engine.sampler(policy_version=policy_version))
            # Runs if the round fails: whatever stops a run, environments are closed.
            on_failure = stack.enter_context(ExitStack())
            on_failure.callback(self.setup.environments.close_all)
            # Environments and rewards exist on the leader. The other ranks of its engine add the
            # turns that it shares.
            asked = {first_group + index: prompts[index] for index in prompt_indices}
            leader = None
            if engine.is_leader:
                leader = (self.setup.rounds or Round)(
                    self._rules(),
                    self.scorer,
                    asked,
                    seed_step=seed_step,
                    samples_per_prompt=self.samples_per_prompt,
                    resumed=resumed,
                )
            judging = extras.questions(self.scorer.judge, engine.max_model_len)
            with_questions = judging.with_questions if judging else lambda *turns: turns
            num_sampled = 0
            remaining: int = engine.share(leader.size if leader else None)
            while remaining or sampler.busy:
                gone, (turns, finished) = engine.share(
                    (leader.take_abandoned(), with_questions(*leader.advance(sampler.busy)))
                    if leader
                    else None
                )
                sampler.abort(gone)
                for turn in turns:
                    sampler.add(turn)
                for _ in range(finished):
                    on_rollout()
                remaining -= finished
                if sampler.busy:
                    for sampled in sampler.step():
                        if leader and not (judging and judging.takes(sampled)):
                            num_sampled += len(sampled.tokens_T)
                            leader.receive_sample(sampled)
            result = leader.result() if leader else RoundResult()
            on_failure.pop_all()
            if engine.is_leader:
                result.metrics["engine/preemptions"] = Sum(value=float(sampler.preemptions))
                result.metrics["rollout/sampled_tokens"] = Sum(value=float(num_sampled))
            return result

    def _rules(self) -> ConversationRules:
        setup = self.setup
        return ConversationRules(
            setup=setup,
            sampling=replace(
                self.sampling,
                stop=setup.environments.stop,
                stop_tokens=setup.renderer.ends,
            ),
            capture=self.engine.capture_spec,
            run_seed=self.run_seed,
            max_response_tokens=self.max_response_tokens,
            max_model_len=self.engine.max_model_len,
            token_budget=self.token_budget,
            keep_failed=self.keep_failed,
            needs_reward=self.scorer.uses_environment,
        )


def is_cut(rollout: Rollout, setup: ConversationSetup) -> bool:
    """Whether the last message was cut, and not only without room for another one."""
    sampled = rollout.tokens_T[rollout.loss_mask_T > 0].tolist()
    return (
        rollout.is_truncated
        and not (sampled and sampled[-1] in setup.renderer.ends)
        and not any(stop in rollout.response for stop in setup.environments.stop)
    )


def without_end(
    count: int, limit: str, setup: ConversationSetup, rollouts: Sequence[Rollout] = ()
) -> str:
    """The note that none of `count` responses, such as `rollouts`, ended within a limit."""
    sampled = {token for each in rollouts for token in each.tokens_T[each.loss_mask_T > 0]}
    fix = ", or correct eos_token_id in generation_config.json if the model ends otherwise"
    return (
        f"none of {count} responses ended within {limit}. A turn ends with "
        f"{' or '.join(setup.renderer.end_texts)}. See the samples (python -m r3.show): raise the "
        f"limit{'' if sampled & {*setup.renderer.ends} else fix}"  # earlier turns may have ended
    )


def rollout_metrics(samples: Sequence[Sample]) -> dict[str, Any]:
    """Partials of reward/COMPONENT/*, rollout/* and users' metrics of this rank's samples."""
    rollouts, count = [sample.rollout for sample in samples], float(len(samples))
    # The sequences of an episode have the parts of one call.
    parts_of = {sample.rollout.key[:2]: sample.parts for sample in samples}
    by_component: dict[str, list[float]] = {}
    for parts in parts_of.values():
        for name, part in parts.items():
            by_component.setdefault(name, []).append(part)
    return {
        **{
            f"reward/{name}/mean": Mean(total=sum(values), count=float(len(values)))
            for name, values in by_component.items()
        },
        "rollout/response_tokens_mean": Mean(
            total=float(sum(rollout.num_response_tokens for rollout in rollouts)), count=count
        ),
        "rollout/truncated_frac": Mean(
            total=float(sum(rollout.is_truncated for rollout in rollouts)), count=count
        ),
        "rollout/tokens": Sum(value=float(sum(len(rollout.tokens_T) for rollout in rollouts))),
        **means((rollout.metrics for rollout in rollouts), without=REFUSED.values()),
    }
