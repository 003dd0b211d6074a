"""Prepare a run before it is built: read and check its data, set up its folder.

Nothing here imports Megatron-Core or vLLM, so that mistakes show before they are loaded.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from r3 import extras
from r3.cli.parse import Invocation
from r3.config import Config
from r3.errors import EXPLAINED, ConfigError
from r3.metrics.console import stage
from r3.models.files import AbsentWeightsError, weight_files
from r3.models.hf_checkpoint import read_small_files, with_end_tokens
from r3.rollout.task import Task, read_task
from r3.run.folder import RunDir
from r3.run.lock import require_free
from r3.run.open import Opened, open_run
from r3.runtime.device import prepare_environment
from r3.runtime.process import die_with_launcher, importing, is_leader
from r3.runtime.terminal import say
from r3.user_code.loading import START_LIMIT_S


class LaunchError(ConfigError):
    """Variables of one process or machine: every rank that has them says so, not rank 0 alone."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A run that can be built: its data is read and its folder is ready."""

    invocation: Invocation
    task: Task
    folder: RunDir
    opened: Opened
    began: float  # time.perf_counter()
    small_files: Mapping[str, bytes]  # of the starting model, for exports; on rank 0
    watchdog: Any  # watches until this process ends, or it is closed


@contextmanager
def refusing() -> Iterator[None]:
    """Turn a user's mistake into one message on rank 0 and exit code 2; nothing is written."""
    try:
        yield
    except EXPLAINED as error:
        if is_leader() or isinstance(error, LaunchError):
            say(error, error=True)
        sys.exit(2)


def prepare(invocation: Invocation) -> Prepared | None:
    """Read the task, then make the run's folder ready to start or to resume. Uses no device.

    Returns:
        None if there is nothing to run: `--check` is done.

    Raises:
        ConfigError, DataError, ResumeError, ShapeError: settings, model folder, data or the
            folder of the run are wrong.
        EnvironmentFailed, RewardError: `--check` tried a function of the user, and it failed.
    """
    began = time.perf_counter()
    die_with_launcher()
    config, check = invocation.config, invocation.check
    machine = extras.machine()
    machine.require_place(config, launched=not check)
    run_dir = RunDir.of(config)
    limit_s = 2 * config.debug.kill_after_s
    watchdog = extras.watchdog()(
        int(os.environ.get("RANK", "0")),
        int(os.environ.get("WORLD_SIZE", "1")),
        stall_s=config.debug.stall_s,
        # A part of the start shows no progress in between, so it may take twice as long as one of
        # a step. Imports and rows come from disks that may be slow.
        kill_after_s=limit_s and max(limit_s, START_LIMIT_S),
    )
    with ExitStack() as undo:
        watchdog.start()
        undo.callback(watchdog.close)
        watchdog.beat("reading data and rewards")
        with stage("importing transformers"), importing():
            from transformers import AutoTokenizer  # noqa: F401 (takes longer than to read)
        with stage("reading model facts, data and rewards"):
            task = read_task(config, invocation.world_size, invocation.read)
            invocation = replace(invocation, read=None)  # its rows are prompts now
            os.environ.pop("R3_READ", None)  # of this start, not of what users' code starts
        undo.callback(task.close)
        machine.require_memory(task.shape)
        small_files = read_small_files(task.shape.source) if is_leader() else {}
        if check:
            require_free(run_dir.path)
        writes = is_leader() and config.trains and not check
        # A check downloads no weights of the hub; the start that does compares them.
        compares = is_leader() and not (check and lacks_weights(config))
        opened = open_run(
            run_dir,
            config,
            writes=writes,
            overrides=invocation.overrides,
            digests=partial(extras.digests().digests_of, config, task, small_files)
            if compares
            else None,
        )
        if opened.lock is not None:
            undo.callback(opened.lock.release)
        if check:
            for line in extras.check().check_task(task, config.algo):
                say(line)
            return None
        if not config.trains:
            what = (
                f"checkpoint {opened.checkpoint}, after step {opened.step}"
                if opened.checkpoint
                else f"{task.shape.source}: {run_dir.path} has no checkpoint"
            )
            if config.lora.start and not opened.checkpoint:
                what = f"{config.lora.start} over {what}"
            opened = replace(opened, notes=(f"evaluating {what}; no training", *opened.notes[1:]))
        undo.pop_all()  # `begin` closes them
    ends = task.conversation_setup.renderer.ends
    prepare_environment()  # the caller imports Megatron-Core next
    watchdog.beat("importing Megatron-Core")
    watchdog.watch(kill_after_s=limit_s)
    return Prepared(
        invocation=invocation,
        task=task,
        folder=run_dir,
        opened=opened,
        began=began,
        small_files=with_end_tokens(small_files, ends) if small_files else {},
        watchdog=watchdog,
    )


def lacks_weights(config: Config) -> bool:
    """Whether weights of the policy or a teacher are not here."""
    try:
        for path in config.checkpoints:
            weight_files(path)
    except AbsentWeightsError:
        return True
    return False
