"""A rope factor that is wrong beyond the original context alone, and what finds it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from r3 import doctor
from r3.rollout import read_task
from r3.run import build_run
from r3.runtime.device import Device
from r3.runtime.mesh import build_mesh
from r3.tools import CheckFailed
from tests.engines import rope_wrong_beyond
from tests.errors import NOTHING, message_of
from tests.tiny import tiny_config

CONTEXT = 1024  # where the first range of positions ends


def rope_beyond_the_context(device: Device, *, model: str) -> SimpleNamespace:
    """Run the doctor's checks before and after half of the factor is lost beyond the context.

    Returns:
        What the checks of the doctor say, by their names: results, or errors.
        sound: of an engine that rotates as the policy does.
        wrong: of one that does not beyond `CONTEXT`.
    """
    config = tiny_config(
        model,
        engine={"max_model_len": 1600, "kv_cache_gib": 0.25},
        train={"micro_batch_tokens": 2048},
    )
    task, mesh = read_task(config), build_mesh(device, config.parallel)
    run = build_run(config, task, device=device, mesh=mesh)
    context = doctor.DoctorContext(run=run)

    def asked(check: Callable[[Any], str]) -> str:
        said: list[str] = []
        message = message_of(lambda: said.append(check(context)), CheckFailed, RuntimeError)
        return said[0] if message == NOTHING else message

    def all_checks() -> dict[str, str]:
        names = ("check_sync", "check_engine_rows", "check_replay", "check_depth")
        return {name: asked(getattr(doctor, name)) for name in names}

    sound = all_checks()
    with rope_wrong_beyond(CONTEXT, run.engine):
        return SimpleNamespace(sound=sound, wrong=all_checks())
