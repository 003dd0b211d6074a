"""Partial rollouts: conversations that a step's token budget interrupts continue in the next step.

With `rollout.step_token_budget` a conversation may sample so many tokens per step, so that a few
long responses do not delay the whole step (Kimi k1.5, arXiv 2501.12599, section 2.6.2). The budget
belongs to each conversation, so what is sampled depends neither on the layout nor on speed. A
group is trained on when all its conversations are finished; until then its finished conversations
are kept. Groups with suspended conversations take the place of new prompts, so every step has as
many conversations in flight. The number of groups that are trained on differs between steps.

A group may wait until its oldest tokens are `rollout.max_staleness` steps old. Then its suspended
conversations are dropped and the others are trained on. With 0 every interrupted conversation is
dropped at once.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from r3.config import Config
from r3.engine import Engine
from r3.metrics.reduce import Mean, Sum
from r3.partial import budgeted
from r3.partial.budgeted import SuspendedConversation
from r3.partial.refill import RefillingSource
from r3.rollout.round import RoundResult
from r3.rollout.step import BudgetError, Collected
from r3.rollout.step_rewards import gather_rewards
from r3.rollout.task import Task
from r3.runtime.mesh import Mesh
from r3.types import Prompt, Rollout, Sample

_FILES = "partial_rollouts_"
_DROPPED = "rollout/dropped_by_budget"


@dataclass(frozen=True, kw_only=True)
class PartialRollouts:
    """What one step leaves to the next, of this rank's engine; empty on ranks that do not lead one.

    Attributes:
        suspended: interrupted conversations.
        finished: the finished conversations of their groups.
        prompts_taken: prompts taken from the data set so far, on all ranks.
    """

    suspended: tuple[SuspendedConversation, ...] = ()
    finished: tuple[Sample, ...] = ()
    prompts_taken: int = 0

    @property
    def groups(self) -> list[int]:
        """Numbers of the groups with suspended conversations, ascending."""
        return sorted({conversation.rollout.group for conversation in self.suspended})

    def of_groups(self, groups: Collection[int]) -> PartialRollouts:
        """Return what there is of some groups."""
        return replace(
            self,
            suspended=tuple(each for each in self.suspended if each.rollout.group in groups),
            finished=tuple(each for each in self.finished if each.rollout.group in groups),
        )

    def renumbered(self, number_of: Mapping[int, int]) -> PartialRollouts:
        """Return the same with other numbers of groups."""

        def moved(carried: Any) -> Any:  # a sample, or a suspended conversation
            number = number_of[carried.rollout.group]
            return replace(carried, rollout=replace(carried.rollout, group=number))

        return replace(
            self,
            suspended=tuple(map(moved, self.suspended)),
            finished=tuple(map(moved, self.finished)),
        )


def assign_engines(loads: Sequence[int], count: int) -> list[int]:
    """Return the engine of each of `count` new prompts: always the first with the fewest groups."""
    loads = list(loads)
    engines = []
    for _ in range(count):
        engines.append(min(range(len(loads)), key=loads.__getitem__))
        loads[engines[-1]] += 1
    return engines


def resumable(
    suspended: Sequence[SuspendedConversation], *, step: int, max_staleness: int
) -> tuple[SuspendedConversation, ...]:
    """Return the conversations of `step` that are young enough for the next step.

    The next step samples with the weights after `step` steps.
    """
    return tuple(each for each in suspended if step - each.rollout.policy_version <= max_staleness)


# --- checkpoints --------------------------------------------------------------------------------


def state_dict(partial: PartialRollouts, engine: int, *, is_leader: bool) -> dict[str, bytes]:
    """Return the file of this rank's engine by name, a pickle; none without a token budget."""
    if not is_leader or not partial.prompts_taken:
        return {}
    return {f"{_FILES}{engine:05d}.bin": pickle.dumps(partial)}


def from_state_dict(
    state: Mapping[str, bytes], *, engine: int, engines: int, is_leader: bool
) -> PartialRollouts:
    """Return what this rank's engine continues with; nothing if the checkpoint has no such files.

    An engine reads its own file. If the checkpoint was written by another number of engines, the
    groups of all files are shared out.

    Args:
        state: the files of a checkpoint by name.
        engine: number of this rank's engine among `engines`.
    """
    files = sorted(name for name in state if name.startswith(_FILES))
    if not files:
        return PartialRollouts()
    own = files[engine : engine + 1] if len(files) == engines else files
    parts = [_read(state[name]) for name in own]
    if not is_leader:
        return PartialRollouts(prompts_taken=parts[0].prompts_taken)
    everything = PartialRollouts(
        suspended=tuple(each for part in parts for each in part.suspended),
        finished=tuple(each for part in parts for each in part.finished),
        prompts_taken=parts[0].prompts_taken,
    )
    if own is not files:
        return everything
    return everything.of_groups(everything.groups[engine::engines])


class _Before:
    """A list of samples as R3 wrote it before 2026-12: rollouts, rewards and parts side by side."""

    rollouts: list[Any]
    rewards: list[float]
    parts: dict[tuple[int, int], Mapping[str, float]]

    def samples(self) -> tuple[Sample, ...]:
        pairs = zip(self.rollouts, self.rewards, strict=True)
        return tuple(
            Sample(rollout=rollout, reward=reward, parts=self.parts.get(rollout.key[:2], {}))
            for rollout, reward in pairs
        )


class _Unpickler(pickle.Unpickler):
    """Reads also what R3 wrote before 2026-12, when the classes were in other modules."""

    def find_class(self, module: str, name: str) -> Any:
        match module, name:
            case "r3.rollout.partial", "PartialRollouts":
                return PartialRollouts
            case "r3.rollout.conversation" | "r3.partial.episode", _:
                return getattr(budgeted, name)
            case "r3.rollout.collected_rollouts", "CollectedRollouts":
                return _Before
        return super().find_class(module, name)


def _read(content: bytes) -> PartialRollouts:
    partial: PartialRollouts = _Unpickler(io.BytesIO(content)).load()
    if isinstance(partial.finished, _Before):
        partial = replace(partial, finished=partial.finished.samples())
    held: tuple[Any, ...] = (*partial.suspended, *partial.finished)
    for rollout in (carried.rollout for carried in held):
        if not hasattr(rollout, "sampling_mask"):  # R3 before 2026-12 had none
            object.__setattr__(rollout, "sampling_mask", None)
    return partial


def num_stale_tokens(rollout: Rollout, policy_version: int) -> int:
    """Count the tokens of a rollout that versions older than this one sampled."""
    first = next(
        (token for token, sampler in rollout.segments if sampler >= policy_version),
        len(rollout.tokens_T),
    )
    if not rollout.segments and rollout.policy_version >= policy_version:
        return 0
    return int(rollout.loss_mask_T[:first].sum())


# --- steps --------------------------------------------------------------------------------------


class PartialSource(RefillingSource):
    """Gives each step the samples that it trains on, and keeps partial rollouts between steps."""

    def __init__(self, engine: Engine, task: Task, config: Config, mesh: Mesh) -> None:
        super().__init__(engine, task, config, mesh)
        self._is_leader = engine.is_leader
        self._partial = PartialRollouts()

    def state_dict(self) -> dict[str, bytes]:
        """Return files of this rank by name: partial rollouts, or the place in the data."""
        own = state_dict(self._partial, self._mesh.engine_dp.rank, is_leader=self._is_leader)
        return super().state_dict() | own

    def load_state_dict(self, state: Mapping[str, bytes]) -> None:
        """Continue with the partial rollouts and the place in the data of a checkpoint."""
        super().load_state_dict(state)
        self._partial = from_state_dict(
            state,
            engine=self._mesh.engine_dp.rank,
            engines=self._mesh.engine_dp.size,
            is_leader=self._is_leader,
        )

    def _round(
        self, step: int, prompts: Sequence[Prompt], on_rollout: Callable[[], None], **where: Any
    ) -> tuple[RoundResult, str]:
        result, failure = super()._round(step, prompts, on_rollout, **where)
        if self._config.algo.dynamic_sampling:  # its rounds resume nothing
            result.metrics[_DROPPED] = Sum(float(self._drop(result.suspended)))
        return result, failure

    def _drop(
        self, suspended: Sequence[SuspendedConversation], kept: Sequence[SuspendedConversation] = ()
    ) -> int:
        """Close the environments of conversations that no step resumes; return their number."""
        dropped = [each for each in suspended if not any(each is other for other in kept)]
        for conversation in dropped:
            self._task.conversation_setup.environments.discard(conversation.environment)
        return len(dropped)

    def _one_step(self, step: int, on_rollout: Callable[[], None]) -> Collected:
        """Resume partial rollouts, fill up with new prompts, and train on complete groups.

        If too few groups finish for the updates of the step, its conversations get the budget
        again.
        """
        if self._config.algo.dynamic_sampling:
            return super()._one_step(step, on_rollout)
        config, mesh, rollout = self._config, self._mesh, self._config.rollout
        gathered = mesh.world.all_gather_object((mesh.engine_dp.rank, self._partial.groups))
        waiting = sorted(group for _, groups in gathered for group in groups)
        partial = self._partial.renumbered({group: i for i, group in enumerate(waiting)})
        loads = [0] * mesh.engine_dp.size
        for engine, groups in gathered:
            loads[engine] += len(groups)
        count = rollout.prompts_per_step - len(waiting)
        prompts = self._prompts(partial.prompts_taken, count)
        engines = assign_engines(loads, count)
        indices = [i for i, engine in enumerate(engines) if engine == mesh.engine_dp.rank]
        suspended, finished, rounds, dropped = partial.suspended, partial.finished, [], 0
        while True:
            collected, _ = self._round(
                step,
                prompts,
                on_rollout,
                first_group=len(waiting),
                prompt_indices=indices,
                resumed=suspended,
            )
            rounds.append(collected)
            suspended = resumable(
                collected.suspended, step=step, max_staleness=rollout.max_staleness
            )
            dropped += self._drop(collected.suspended, suspended)
            finished = (*finished, *collected.samples)
            remaining = PartialRollouts(
                suspended=suspended, finished=finished, prompts_taken=partial.prompts_taken + count
            )
            states = mesh.world.all_gather_object(
                ({sample.rollout.group for sample in finished}, remaining.groups)
            )
            unfinished = {group for _, groups in states for group in groups}
            complete = {group for groups, _ in states for group in groups} - unfinished
            if len(complete) >= config.train.updates_per_step:
                break
            if not unfinished:
                raise BudgetError(
                    f"step {step}: {len(complete)} groups finished within "
                    f"rollout.step_token_budget = {rollout.step_token_budget} tokens, and "
                    f"train.updates_per_step = {config.train.updates_per_step} needs as many "
                    "groups.\n  Raise the budget, or set rollout.max_staleness above 0 so that "
                    "later steps continue the conversations."
                )
            prompts, indices = [], []
        self._partial = remaining.of_groups(remaining.groups)
        samples = [sample for sample in finished if sample.rollout.group in complete]
        samples.sort(key=lambda sample: sample.rollout.key)
        rewards = gather_rewards(samples, mesh.world, config)
        stale = sum(num_stale_tokens(sample.rollout, step - 1) for sample in samples)
        sampled = sum(sample.rollout.num_response_tokens for sample in samples)
        of_step = {
            "rollout/carried": Sum(float(len(suspended))),
            _DROPPED: Sum(float(dropped)),
            "rollout/stale_tokens_frac": Mean(total=float(stale), count=float(sampled)),
        }
        return self._made(step, rounds, samples, rewards, of_step)
