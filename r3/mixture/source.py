"""Sources of samples that report a pass rate per source of rows, and follow a curriculum."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from r3.algo.sums import reaches
from r3.config import Config
from r3.engine import Engine
from r3.metrics.reduce import Mean, Sum
from r3.mixture.order import Order, Taken, verdict
from r3.rollout.step import Collected, RolloutSource
from r3.rollout.task import Task
from r3.runtime.mesh import Mesh
from r3.runtime.terminal import say
from r3.types import Prompt, Sample

_FILE = "curriculum.json"  # in checkpoints


def source_names(labels: Sequence[str]) -> dict[str, str]:
    """Return the names that sources have in metrics, by their labels in prompt ids."""
    names: dict[str, str] = {}
    for label in labels:
        name = re.sub(r"[^A-Za-z0-9_.-]+", "_", label)
        while name in names.values():
            name += "_"
        names[label] = name
    return names


def followed(kind: type[RolloutSource]) -> type[RolloutSource]:
    """Return a class that gives steps the samples of `kind`, and follows their pass rates."""
    return type(f"Followed{kind.__name__}", (_Followed, kind), {})


class _Followed(RolloutSource):
    """Reports pass rates; with `data.curriculum` it also chooses the prompts."""

    def __init__(self, engine: Engine, task: Task, config: Config, mesh: Mesh) -> None:
        super().__init__(engine, task, config, mesh)
        self._names = source_names([label for label, _ in task.prompts.read])
        self._order: Order | None = None
        if config.data.curriculum:
            self._order = Order(task.prompts, config.train.seed)
        self._taken = Taken()  # of the step, over all its rounds
        self._said = False

    def state_dict(self) -> dict[str, bytes]:
        """Return files of this rank by name, those of its kind included."""
        if self._mesh.world.rank or not self._order:
            return super().state_dict()
        return {**super().state_dict(), _FILE: json.dumps(self._order.state_dict()).encode()}

    def load_state_dict(self, state: Mapping[str, bytes]) -> None:
        """Continue from the files of a checkpoint by name."""
        super().load_state_dict(state)
        if self._order:
            self._order.load_state_dict(json.loads(state[_FILE]))

    def _prompts(self, start: int, count: int) -> list[Prompt]:
        if not self._order:
            return super()._prompts(start, count)
        taken = self._order.take(count)
        self._taken.passed_over += taken.passed_over
        self._taken.taken_back += taken.taken_back
        return taken.prompts

    def _made(
        self,
        step: int,
        rounds: Any,
        samples: list[Sample],
        rewards: Any,
        *more: dict[str, Any],
        sampled: Sequence[Sample] | None = None,
        **how: Any,
    ) -> Collected:
        episodes = self._episodes(samples if sampled is None else sampled)
        more = (*more, self._of_sources(episodes), self._judged(step, episodes))
        return super()._made(step, rounds, samples, rewards, *more, sampled=sampled, **how)

    def _episodes(self, samples: Sequence[Sample]) -> list[tuple[str, float, bool]]:
        """Row, reward and whether it is right, of each episode of this rank."""
        by_key: dict[tuple[int, int], list[Sample]] = {}
        for sample in samples:
            by_key.setdefault(sample.rollout.key[:2], []).append(sample)
        deciding = self._config.reward.deciding
        episodes = []
        for sequences in by_key.values():
            last = sequences[-1]
            # A workflow that rewards calls shares its reward out over the sequences.
            own = sequences if last.rollout.own_reward else [last]
            reward = sum(sample.reward for sample in own)
            is_right = reaches(last.parts.get(deciding, reward))
            episodes.append((last.rollout.prompt_id, reward, is_right))
        return episodes

    def _of_sources(self, episodes: Sequence[tuple[str, float, bool]]) -> dict[str, Any]:
        """Partials of source/*."""
        by_source: dict[str, list[tuple[float, bool]]] = {}
        for row, reward, is_right in episodes:
            name = self._names[row.rpartition(":")[0]]
            by_source.setdefault(name, []).append((reward, is_right))
        metrics: dict[str, Any] = {}
        for name, scored in by_source.items():
            count = float(len(scored))
            metrics |= {
                f"source/{name}/reward": Mean(math.fsum(reward for reward, _ in scored), count),
                f"source/{name}/pass_rate": Mean(float(sum(right for _, right in scored)), count),
                f"source/{name}/samples": Sum(count),
            }
        return metrics

    def _judged(self, step: int, episodes: Sequence[tuple[str, float, bool]]) -> dict[str, Any]:
        """Judge the rows of the step; return partials of curriculum/*. All ranks must call."""
        if not self._order:
            return {}
        world, data = self._mesh.world, self._config.data
        everybody = world.all_gather_object([(row, right) for row, _, right in episodes])
        by_row: dict[str, list[bool]] = {}
        for row, right in (pair for part in everybody for pair in part):
            by_row.setdefault(row, []).append(right)
        low, high = data.curriculum
        verdicts = {
            row: verdict(sum(rights), len(rights), low, high)
            for row, rights in sorted(by_row.items())
        }
        taken, self._taken = self._taken, Taken()
        self._order.judge(verdicts, data.curriculum_rest)
        if taken.taken_back and not self._said and world.rank == 0:
            self._said = True
            say(
                f"step {step}: {taken.taken_back} prompts are rows that data.curriculum holds "
                "back, because too few other rows are left. curriculum/taken_back counts them. Use "
                "more rows, or wider bounds",
                error=True,
            )
        counts = {
            "held_easy": self._order.count("easy"),
            "held_hard": self._order.count("hard"),
            "passed_over": taken.passed_over,
            "taken_back": taken.taken_back,
        }
        # The same on all ranks.
        return {f"curriculum/{name}": Mean(float(n), 1.0) for name, n in counts.items()}
