"""What a run says of the samples of its steps: no signal, limits, failures, collapsed routers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from r3.algo.advantage import Reward
from r3.algo.packing import MISSING
from r3.algo.sums import are_equal
from r3.config import Config
from r3.metrics.glossary import REFUSED
from r3.metrics.reduce import Mean
from r3.rollout.collect import is_cut, without_end
from r3.rollout.conversation_setup import ConversationSetup
from r3.rollout.round import RoundResult
from r3.rollout.step_rewards import groups_of, groups_with_signal
from r3.rollout.task import Task
from r3.runtime.mesh import Axis, Mesh
from r3.runtime.terminal import say
from r3.types import Rollout

_MANY_STEPS = 10  # steps in a row without signal after which the warning is repeated
_MANY_ROWS = 64


class StepNotes:
    """Compares the steps of a run with each other, so that each kind of message comes once."""

    def __init__(self, task: Task, config: Config, mesh: Mesh) -> None:
        self._task, self._config, self._mesh = task, config, mesh
        self._flat_steps, self._said_flat = 0, False
        self._said_limits: set[str] = set()
        self._said_constant = False
        self._dropped: dict[int, list[str]] = {}  # why, of the rounds of the last step
        self._most_dropped = 0  # samples of one step

    def signal(self, step: int, rewards: Sequence[Reward]) -> None:
        """Say once that a step had no signal, and again when it stays so."""
        algo = self._config.algo
        if self._config.has_teacher or self._config.train.objective != "rl":
            return
        # Others compare the rewards of the whole step, and a user's function may.
        in_groups = algo.advantage in ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline")
        flat = not groups_with_signal(rewards)
        if not in_groups:
            shaped = [reward.shaped for reward in rewards]
            flat = not any(reward.has_loss for reward in rewards) or are_equal(shaped)
        self._flat_steps = self._flat_steps + 1 if flat else 0
        again = self._flat_steps % _MANY_STEPS == 0
        if not flat or (self._said_flat and not again) or self._mesh.world.rank:
            return
        self._said_flat = True
        since = f", as in the {self._flat_steps - 1} steps before" if again else ""
        groups = len(groups_of(rewards))
        what = "have equal rewards"
        why = (
            "The questions are all solved or all out of reach, or the reward function gives one "
            "value. See reward/group_zero_std_frac, the samples (python -m r3.show), and "
            "algo.dynamic_sampling"
        )
        if in_groups and len({reward.key[:2] for reward in rewards}) == groups:
            what = "have a single sample"
            why = "The others were dropped (env/dropped, reward/dropped, rollout/dropped_by_budget)"
        if not any(reward.has_loss for reward in rewards):
            what = "have no token with loss"
            why = "All were truncated (algo.overlong_filter) or are empty"
        say(
            f"step {step}: all {groups} groups {what}{since}: rewards taught nothing. {why}",
            error=True,
        )

    def dropped(self, step: int, collected: RoundResult) -> str:
        """Say how many samples were dropped and why the first was, if more than before were.

        All ranks must call.

        Returns:
            Why the first one was dropped; "" if none was.
        """
        if self._config.env.on_error == self._config.reward.on_error == "stop":
            return ""
        world = self._mesh.world
        dropped = [text for part in world.all_gather_object(collected.dropped) for text in part]
        self._dropped = {step: [*self._dropped.get(step, ()), *dropped]}
        dropped = self._dropped[step]
        if len(dropped) >= 2 * self._most_dropped + 1:
            self._most_dropped = len(dropped)
            if world.rank == 0:
                count = f"{len(dropped)} samples were dropped"
                count += " so far" * self._config.has_rounds
                say(f"step {step}: {count}. The first: {dropped[0]}", error=True)
        return dropped[0] if dropped else ""

    def limits(self, step: int, collected: RoundResult) -> None:
        """Say once that no response ended, and once per cause that requests were refused.

        All ranks must call.
        """
        setup, world = self._task.conversation_setup, self._mesh.world
        cut = [is_cut(rollout, setup) for rollout in collected.rollouts]
        refused = Counter(
            {
                cause: int(collected.metrics[name].value)
                for cause, name in REFUSED.items()
                if name in collected.metrics
            }
        )
        everybody = world.all_gather_object((cut, refused))
        cut = [each for part, _ in everybody for each in part]
        counts = sum((part for _, part in everybody), Counter[str]())
        limit = f"rollout.max_response_tokens {self._config.rollout.max_response_tokens}"
        rollouts = collected.rollouts
        notes = limit_notes(cut, counts, self._said_limits, limit, setup, rollouts)
        for note in notes if world.rank == 0 else ():
            say(f"step {step}: {note}", error=True)

    def routes(self, step: int, rollouts: Sequence[Rollout]) -> dict[str, Any]:
        """Count layers that sent all tokens of the step to the same experts; say it once."""
        if not self._config.captures or not self._task.shape.moe_layers:
            return {}
        constant = constant_layers(
            rollouts, self._mesh.world, num_experts=self._task.shape.num_experts
        )
        if self._mesh.world.rank:
            return {}
        if constant and not self._said_constant:
            self._said_constant = True
            index, experts = constant[0]
            layer, others = self._task.shape.moe_layers[index], len(constant) - 1
            say(
                f"step {step}: layer {layer} sent all tokens of all rollouts to experts {experts}"
                f"{f', and so did {others} more' if others else ''}. The router "
                f"collapsed, or the capture of the layer does not work: if "
                f"routing/agreement_layer/{layer} is near 1, the policy's own router agrees",
                error=True,
            )
        return {"routing/constant_layers": Mean(float(len(constant)), 1.0)}


def limit_notes(
    cut: Sequence[bool],
    refused: Counter[str],
    said: set[str],
    limit: str,
    setup: ConversationSetup,
    rollouts: Sequence[Rollout],
) -> list[str]:
    """The notes that no response ended, and that calls of workflows gave no message.

    Args:
        cut: by response.
        refused: such calls by cause.
        said: what was said before, which is not said again; it gets what is new.
        rollouts: some of them.
    """
    causes = {
        "length": f"left no token to sample ({limit}, or the context; what comes between two "
        "messages of the model counts too)",
        "turns": "beyond env.max_turns",
        "invalid": "with an argument, a message or a field that cannot be used",
        "hung_up": "whose client hung up",
        "aborted": "that were aborted",
    }
    notes = []
    if new := [cause for cause in causes if refused[cause] and cause not in said]:
        told = ", ".join(f"{refused[cause]} {causes[cause]}" for cause in new)
        notes.append(
            f"calls of the model without a message: {told}. env/refused_* count them, and "
            "python -m r3.show names them per sample"
        )
    if cut and all(cut) and "cut" not in said:
        notes.append(without_end(len(cut), limit, setup, rollouts))
        new.append("cut")
    said.update(new)
    return notes


def constant_layers(
    rollouts: Sequence[Rollout], world: Axis, *, num_experts: int
) -> list[tuple[int, list[int]]]:
    """Find layers that sent all captured tokens of all ranks' rollouts to the same experts.

    The router collapsed, or its capture returns the same rows again and again. One rollout alone
    shows nothing: a router may well send a short text to few experts. All ranks must call.

    Returns:
        Index among the MoE layers and experts, ascending; nothing if few tokens were captured or
        every token goes to all experts.
    """
    everybody = world.all_gather_object(_constant_experts(rollouts))
    if sum(rows for _, rows in everybody) < _MANY_ROWS:
        return []
    experts = [of_rank for of_rank, rows in everybody if rows]
    if experts[0].shape[-1] >= num_experts:
        return []
    same = np.logical_and.reduce([(each == experts[0]).all(-1) for each in experts])
    constant = np.flatnonzero(same & (experts[0] != MISSING).all(-1))
    return [(int(layer), experts[0][layer].tolist()) for layer in constant]


def _constant_experts(rollouts: Sequence[Rollout]) -> tuple[np.ndarray, int]:
    """Experts that all captured tokens share per layer, sorted, [L, K], -1 where they differ; and
    the number of these tokens.
    """
    constant, count = np.full((0, 0), MISSING), 0
    for rollout in rollouts:
        routes = rollout.routed_experts
        routes = routes[(routes != MISSING).all(axis=(1, 2))]
        if not routes.size:
            continue
        if not count:
            constant = np.sort(routes[0], -1)
        count += len(routes)
        # In a working layer the first and the last row nearly always differ: few layers are left
        # for the comparison of all rows.
        for rows in (routes[[0, -1]], routes):
            open_layers = np.flatnonzero((constant != MISSING).all(-1))
            differs = (np.sort(rows[:, open_layers], -1) != constant[open_layers]).any(axis=(0, 2))
            constant[open_layers[differs]] = MISSING
    return constant, count
