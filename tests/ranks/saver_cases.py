"""The end of steps with real weights: what is saved, kept and exported, and when a run ends."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from r3.config import Config, with_values
from r3.metrics import Mean, Meter
from r3.models import read_small_files
from r3.policy import Policy
from r3.run import (
    Checkpointer,
    Opened,
    Phases,
    RunDir,
    Saver,
    Session,
    StopRequest,
    export_last,
    step_folders,
)
from r3.runtime.device import Device
from r3.sync import WeightStream
from tests.policies import build_with_batch, one_update
from tests.tiny import tiny_config

METRIC = "eval/heldout/accuracy"


def attempts(
    device: Device, *, model: str, out: str, parallel: dict[str, int]
) -> list[SimpleNamespace]:
    """A run of which every second step is evaluated, stopped after step 4 and resumed twice."""
    config = with_values(
        tiny_config(model, parallel=parallel, train={"steps": 20, "lr": 1e-3}),
        {
            **{"checkpoint.keep_best": METRIC, "checkpoint.keep": 1, "checkpoint.every": 3},
            **{"checkpoint.export_every": 3, "train.patience": 2, "log.tensorboard": False},
        },
    )
    _, policy, batch = build_with_batch(device, config)
    one_update(policy, batch, total_updates=20)  # the optimizer has a state to save
    run_dir = RunDir(Path(out))
    if device.rank == 0:
        run_dir.path.mkdir(exist_ok=True)
        # The first export finds a file where its folder should be.
        run_dir.hf(3).parent.mkdir()
        run_dir.hf(3).with_name(".step_000003.partial").write_text("")
    dist.barrier()
    values = {2: 0.3, 4: 0.5, 6: 0.4, 8: 0.5, 10: 0.9}
    found = []
    for stops_after, patience in ((4, 2), (99, 2), (99, 3)):
        if device.rank == 0 and len(found) == 1:
            run_dir.metrics.unlink()  # the second attempt knows the best from its checkpoint
        now = with_values(config, {"train.patience": patience})
        found.append(_attempt(now, policy, run_dir, values, stops_after))
        if device.rank == 0:
            run_dir.hf(3).with_name(".step_000003.partial").unlink(missing_ok=True)
        dist.barrier()
    return found


def _attempt(
    config: Config, policy: Policy, run_dir: RunDir, values: dict[int, float], stops_after: int
) -> SimpleNamespace:
    """Start or resume a run, and make steps whose evaluations have these values.

    Returns:
        What the attempt leaves.
        steps: that it made.
        kept: steps of the checkpoints, and the names that `best` and `latest` point to.
        exports: in hf/.
    """
    step, latest = (step_folders(run_dir.checkpoints) or [(0, None)])[-1]
    nothing: Any = None  # no step is made here
    device, mesh = policy.device, policy.mesh
    run = Session(
        config=config,
        task=nothing,
        device=device,
        mesh=mesh,
        built_engine=None,
        policy=policy,
        weights=WeightStream(policy, device, mesh),
        residency=nothing,
        meter=Meter(run_dir, mesh.world, config, first_step=step),
        phases=Phases(None, ()),
        folder=run_dir,
        stop=StopRequest(run_dir.first_failure),
        opened=Opened(checkpoint=latest, step=step),
        checkpointer=Checkpointer(run_dir.checkpoints, keep=config.checkpoint.keep),
        small_files=read_small_files(config.model.path),
    )
    made = []
    with run.meter, run.checkpointer:
        saver = Saver(run)
        for step in range(run.steps_done + 1, saver.last_step + 1):
            if step in values:
                run.meter.add({METRIC: Mean(values[step], 1.0)})
            run.meter.close_step(step)
            made.append(step)
            saver.after_step(step)
            if step in (saver.last_step, stops_after):
                break
        if made[-1:] != [stops_after]:
            export_last(run, saver.last_step)
    dist.barrier()
    links = [run_dir.checkpoints / name for name in ("best", "latest")]
    return SimpleNamespace(
        steps=made,
        kept=[step for step, _ in step_folders(run_dir.checkpoints)],
        best=links[0].resolve().name,
        latest=links[1].resolve().name,
        exports=sorted(path.name for path in run_dir.hf(0).parent.glob("step_*")),
    )
