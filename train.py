"""r3: reinforcement learning of Mixture-of-Experts models with replayed routes (arXiv 2510.11370). The step, on one page.

    torchrun --nproc_per_node 2 train.py tiny                the embedded model, on two CPU ranks
    python train.py --help                                   presets and settings
    python train.py PRESET --dry-run --world-size 8          what would run, and where its memory goes

Every rank runs this program; it holds a Megatron-Core shard of the policy and a vLLM engine, and hands the memory from one
to the other. Deliberately absent: an orchestrator, a Trainer class, callbacks, a critic.
"""

from __future__ import annotations

import sys
import time

from r3.cli import parse as cli


def main() -> None:
    """Parse, build, loop, close."""
    # Help, dry runs and bad settings end here; so does, two lines on, bad data or a folder that cannot be resumed.
    began = time.perf_counter()
    invocation = cli.parse(sys.argv[1:])
    config = invocation.config
    from r3.run.start import begin, closing, header, require_one_start

    task, run_dir, start = begin(config, check=invocation.check)

    from r3.engine import Engine
    from r3.handover.memory import Residency, State
    from r3.handover.rollouts import distribute
    from r3.handover.weights import WeightStream, export, prove_sync, sync_weights
    from r3.metrics.meter import Meter
    from r3.metrics.reduce import Max
    from r3.policy import Policy
    from r3.policy.updates import train_on
    from r3.rollout import partial as carry
    from r3.rollout.evaluate import evaluate
    from r3.rollout.scored import score_all
    from r3.rollout.step import answers_of_step
    from r3.routing.ledger import reconcile
    from r3.run import checkpoint
    from r3.run.dumps import dump_rollouts, write_eval
    from r3.run.watchdog import Watchdog
    from r3.runtime.device import init_device, leave, seed_everything, settle
    from r3.runtime.mesh import build_mesh

    rollout, train = config.rollout, config.train
    device = init_device()
    seed_everything(train.seed, deterministic=config.debug.deterministic)
    mesh = build_mesh(device, config.parallel)
    require_one_start(config, task, start, mesh.world)
    # The engine first: vLLM sizes itself by the memory it finds free.
    engine = Engine(config, device, task.shape, task.tokenizer, max_model_len=task.max_model_len)
    policy = Policy(config, device, mesh, task.shape)
    weights = WeightStream(policy, device, mesh)
    residency = Residency(engine, policy, device, reward_model=task.reward_model)
    if start.found:
        checkpoint.load(start.found, policy, device, mesh, weights_only=config.eval.only)
    done = start.found.step if start.found else 0
    carried = carry.Carry()  # conversations that the step before left unfinished
    if start.found and rollout.step_token_budget:
        carried = carry.from_checkpoint(
            start.found.folder,
            task.prompts.prompts,
            engine=mesh.engine_dp.rank,
            engines=mesh.engine_dp.size,
            is_leader=engine.is_leader,
        )
    last = done if config.eval.only else train.steps
    settle()

    watchdog = Watchdog(
        device.rank, device.world_size, stall_s=config.debug.stall_s, run_dir=run_dir
    )
    rows = (
        None if config.eval.only else run_dir
    )  # such a run leaves answers, and no row among the training's
    meter = Meter(
        rows, mesh.world, config, on_phase=watchdog.beat, first_step=0 if config.eval.only else done
    )
    meter.header(header(config, task, mesh, device, start))

    def hand_over(policy_version: int) -> None:
        """sync: the engine takes the policy's weights; every use of the engine starts here, so none can be stale."""
        with meter.phase("sync"):
            residency.move(State.SYNC)
            sync_weights(weights, engine, device, mesh, policy_version=policy_version)
            residency.move(State.GENERATE)

    def evaluate_policy(policy_version: int) -> None:
        """Held-out accuracy of the policy after `version` steps, between two trainings."""
        hand_over(policy_version)
        for heldout in task.heldout:
            name, total = heldout.settings.name, len(heldout.prompts) * heldout.settings.samples
            with (
                meter.phase("evaluate"),
                meter.progress(total // mesh.engine_dp.size, name) as tick,
            ):
                found = evaluate(
                    engine, heldout, config, mesh, policy_version=policy_version, on_answer=tick
                )
            meter.add(found.metrics)
            if device.rank == 0:
                write_eval(run_dir, policy_version, name, found.rows)
        residency.move(State.TRAIN)

    with watchdog:
        if config.eval.only or (done == 0 and task.heldout):
            evaluate_policy(done)
            meter.close_step(done)
        for step in range(done + 1, last + 1):
            policy_version = step - 1  # the engine samples with the weights after this many steps

            # 1 sync
            hand_over(policy_version)
            if policy_version == done or every(policy_version, config.debug.prove_sync_every):
                prove_sync(engine, policy, task.prompts.prompts[:4], config, mesh)

            # 2 generate, 3 score: answers are judged while others are still being written
            total = rollout.prompts_per_step * rollout.group_size // mesh.engine_dp.size
            with meter.phase("generate"), meter.progress(total, f"step {step} generate") as tick:
                found = answers_of_step(
                    engine, task, config, mesh, step=step, carry=carried, on_answer=tick
                )
            carried = found.carry
            with meter.phase("score"):
                scored = score_all(found.answers, found.rewards, config)
                for part in found.metrics:
                    meter.add(part)
            residency.move(State.TRAIN)

            # 4 pack: rollouts go to the ranks that train on them, balanced by tokens
            with meter.phase("pack"):
                batches, ledger = distribute(
                    scored,
                    mesh,
                    task.shape,
                    num_updates=train.updates_per_step,
                    micro_batch_tokens=train.micro_batch_tokens,
                    captured=engine.capture,
                    on_missing=config.replay.on_missing,
                    min_coverage=config.replay.min_coverage,
                    policy_versions=range(
                        max(0, policy_version - rollout.max_staleness), policy_version + 1
                    ),
                    layers=policy.replay.layers,
                )
                meter.add(ledger)

            # 5 train: old log-probabilities where they are needed, then the updates, routes replayed in every pass
            with meter.phase("train"), meter.progress(len(batches), f"step {step} train") as tick:
                train_on(
                    policy,
                    batches,
                    found.rewards.rewards_R,
                    found.rewards.groups_R,
                    config,
                    step=step,
                    report=meter.add,
                    on_update=tick,
                )

            # 6 report
            meter.add({f"memory/{name}_gib": Max(gib) for name, gib in residency.used_gib.items()})
            meter.add({"memory/peak_gib": Max(max(residency.used_gib.values()))})
            if config.log.rollouts_every and (step == 1 or every(step, config.log.rollouts_every)):
                dump_rollouts(run_dir, step, scored, mesh.world)
            if task.heldout and (step == train.steps or every(step, config.eval.every)):
                evaluate_policy(step)
            reconcile(meter.close_step(step))  # every captured route was replayed, and once
            if step == train.steps or every(step, config.checkpoint.every):
                with meter.phase("checkpoint"):
                    keep = config.checkpoint.keep
                    files = carry.to_files(carried, mesh.engine_dp.rank, is_leader=engine.is_leader)
                    checkpoint.save(
                        run_dir.checkpoints, policy, device, mesh, step=step, keep=keep, files=files
                    )

        if (
            config.checkpoint.export
            and not config.eval.only
            and not run_dir.hf(train.steps).exists()
        ):
            with meter.phase("export"):
                folder = run_dir.hf(train.steps)
                export(
                    folder, weights, policy, device, mesh, like=config.model.path, step=train.steps
                )
    task.close()
    meter.close()
    if device.rank == 0:
        print(closing(config, run_dir, time.perf_counter() - began, last), flush=True)
    leave(0)


def every(step: int, period: int) -> bool:
    """Whether something that happens every `period` steps, or never (0), happens at this one."""
    return period > 0 and step % period == 0


if __name__ == "__main__":
    main()
