"""R3: reinforcement learning for Mixture-of-Experts models with replayed routes; the training loop.

    torchrun --nproc_per_node 2 train.py tiny          train the embedded model on two CPU ranks
    python train.py --help                             list presets and settings
    python train.py PRESET --dry-run --world-size 8    print layout, batch and memory; run nothing

Every rank runs this program. Each rank holds a Megatron-Core shard of the policy and a vLLM
engine, which take turns with the memory of the device. There is no orchestrator, no Trainer
class, no callback and no critic. The method is described in arXiv 2510.11370.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from r3 import extras
from r3.cli import parse as cli
from r3.metrics.console import stage
from r3.runtime.process import importing
from r3.runtime.terminal import own_streams

if TYPE_CHECKING:
    from r3.run.session import Session


def train(run: Session) -> None:
    """Make all steps that the checkpoint does not have, then export the weights."""
    import torch

    from r3.algo.advantage import advantages_of, less_kl
    from r3.algo.packing import with_advantages
    from r3.policy.objective import policy_loss
    from r3.policy.updates import earlier_passes, train_on
    from r3.rollout.step import rollout_source
    from r3.routing.ledger import reconcile
    from r3.run.due import Saver, evaluate_alone, evaluate_if_due, export_last
    from r3.sync.rollouts import PackingSpec, distribute
    from r3.user_code.algorithm import advantage_of

    config, task, policy, meter = run.config, run.task, run.policy, run.meter
    if config.eval.only:
        evaluate_alone(run)
        return
    source = None
    if config.train.objective != "sft":  # which learns rows: nothing is sampled
        source = rollout_source(run.engine, task, config, run.mesh)
        run.checkpointer.attach(source, run.opened.checkpoint)
    if not run.opened.checkpoint and evaluate_if_due(run, 0):
        meter.close_step(0)
    saver = Saver(run)
    advantage = advantage_of(config.algo)

    for step in range(run.steps_done + 1, saver.last_step + 1):
        meter.open_step(step)
        version = step - 1  # the engine samples with the weights after this many steps
        if source:
            # 1 sync: the engine takes the policy's weights
            run.sync(version)

            # 2 generate: finished conversations are rewarded while others are still sampled
            bar = meter.progress(source.size, f"step {step} generate")
            with meter.phase("generate"), bar as tick:
                samples, rewards, parts = source.collect(step, on_rollout=tick)
            run.release_engine()
        else:
            samples, parts = extras.rows_of_step(task, config, run.mesh.world, step)
            rewards = []
        for metrics in parts:
            meter.add(metrics)

        # 3 pack: rollouts go to the ranks that train on them, balanced by tokens
        with meter.phase("pack"):
            spec = PackingSpec.of_step(config, policy.replay.layers, version)
            batches, metrics = distribute(samples, run.mesh, task.shape, spec)
            meter.add(metrics)

        # 4 score: log-probabilities of the old policy if needed, of reference and teacher
        with meter.phase("train"):
            passes, kl = earlier_passes(
                policy, batches, config, report=meter.add, sampled=bool(source)
            )

        # 5 advantages, from the rewards of all ranks; rows that are learned have 1
        with meter.phase("score"):
            rewards = less_kl(rewards, kl, config.algo.kl_coef)
            advantages_R = torch.ones(config.rollout.prompts_per_step)
            if source:
                advantages_R = advantages_of(rewards, advantage)
            batches = [with_advantages(batch, advantages_R) for batch in batches]

        # 6 train: the updates; routes are replayed in all
        count = config.train.epochs_per_step * sum(map(len, batches))
        with meter.phase("train"), meter.progress(count, f"step {step} train") as tick:
            train_on(
                policy,
                batches,
                passes,
                config,
                loss=policy_loss,
                step=step,
                report=meter.add,
                sampled=bool(source),
                on_micro_batch=tick,
            )

        # 7 report
        meter.add(run.residency.metrics())
        if source:
            extras.record_samples(run, step, samples, rewards, advantages_R)
        evaluate_if_due(run, step)
        # every captured route was replayed exactly once in each epoch
        reconcile(meter.close_step(step), epochs=config.train.epochs_per_step)
        saver.after_step(step)
        if step == saver.last_step:  # train.patience may end the run early
            break

    export_last(run, saver.last_step)


def main() -> None:
    """Parse, build, loop, close."""
    own_streams()
    with cli.interruptible():
        invocation = cli.parse(sys.argv[1:])  # ends here for help, dry runs and wrong settings
        if extras.result().says_finished(invocation):
            return
        with stage("importing torch"), importing():
            from r3.run.prepare import prepare, refusing

        with refusing():  # ends here for wrong data and folders that cannot be resumed
            prepared = prepare(invocation)
        if prepared is None:  # it was only to be checked
            return
        with stage("importing Megatron-Core"), importing():
            from r3.run.session import begin, ending

    with ending(prepared), begin(prepared) as run:
        train(run)


if __name__ == "__main__":
    main()
