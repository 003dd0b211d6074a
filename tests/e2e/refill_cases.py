"""Steps with dynamic sampling."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from r3.algo.advantage import advantages_of
from r3.config import Config
from r3.rewards.scorer import Scorer
from r3.rollout import NoSignalError, rollout_source
from r3.run import CheckpointFiles
from r3.runtime.device import Device
from r3.tools import trained_samples
from r3.types import Prompt, Rollout
from r3.user_code import advantage_of
from tests.errors import message_of
from tests.talkers import Talker, values
from tests.tiny import tiny_config

NUM_PROMPTS = 150


def refills(device: Device) -> SimpleNamespace:
    """Steps with dynamic sampling; rewards differ for every third prompt only.

    Returns:
        Steps by number: three in a row, the third from a checkpoint, with one refill, and without
        dynamic sampling.
        drawn: prompts of the three steps in a row that this rank rewarded, once per response.
        nothing: message of a step in which all rewards are equal.
    """
    config = tiny_config(
        engine={"max_model_len": 160, "kv_cache_gib": 0.0625},
        rollout={"prompts_per_step": 6, "group_size": 2},
        algo={"dynamic_sampling": 12},
    )
    talker = Talker(device, config)
    # An epoch is longer than the three steps, and so short that independent draws would repeat.
    prompts = replace(talker.task.prompts, prompts=talker.task.prompts.prompts[:NUM_PROMPTS])
    drawn: list[str] = []

    def scorer(rollout: Rollout, prompt: Prompt) -> float:
        drawn.append(prompt.id)
        return float(rollout.sample_index) if int(prompt.id.rpartition(":")[2]) % 3 == 0 else 1.0

    def steps(
        config: Config,
        scorer: Callable[[Rollout, Prompt], float],
        *wanted: int,
        checkpoint: Path | None = None,
    ) -> dict[str, SimpleNamespace]:
        """Make steps; the checkpoint is read before the first, and written before the last.

        Returns:
            One step by "PROMPT GROUP SAMPLE"; counts are None without dynamic sampling.
        """
        results: dict[str, SimpleNamespace] = {}
        task = replace(talker.task, prompts=prompts, scorer=Scorer.of_function(scorer))
        source = rollout_source(talker.engine, task, config, talker.mesh)
        for step in wanted:
            if checkpoint and step == wanted[0] > 1:
                source.load_state_dict(CheckpointFiles(checkpoint))
            elif checkpoint and step == wanted[-1]:
                for name, content in source.state_dict().items():
                    (checkpoint / name).write_bytes(content)
            talker.engine.policy_version = step - 1
            samples, rewards, reported = source.collect(step)
            advantages_R = advantages_of(rewards, advantage_of(config.algo))
            trained = trained_samples(samples, rewards, advantages_R, filters=False)
            places = {each.key: place for place, each in enumerate(rewards)}
            metrics = values({name: part for parts in reported for name, part in parts.items()})
            results[str(step)] = SimpleNamespace(
                sampled={
                    f"{each.prompt_id} {each.group} {each.sample_index}": each.tokens_T.tolist()
                    for each in (sample.rollout for sample in samples)
                },
                advantages=[item.advantage for item in trained],
                indices=[places[item.rollout.key] for item in trained],
                rounds=metrics.get("rollout/rounds"),
                groups_trained=metrics.get("rollout/groups_trained"),
                groups_sampled=metrics.get("rollout/groups_sampled"),
            )
        return results

    one, off = (
        replace(config, algo=replace(config.algo, dynamic_sampling=rounds)) for rounds in (1, 0)
    )
    folder = talker.mesh.world.all_gather_object(tempfile.mkdtemp())[0]
    checkpoint = Path(folder)
    run = steps(config, scorer, 1, 2, 3, checkpoint=checkpoint)
    in_a_row = drawn.copy()
    return SimpleNamespace(
        run=run,
        drawn=in_a_row,
        resumed=steps(config, scorer, 3, checkpoint=checkpoint),
        capped=steps(one, scorer, 1),
        off=steps(off, scorer, 1),
        nothing=message_of(lambda: steps(one, lambda _rollout, _prompt: 1.0, 1), NoSignalError),
    )
