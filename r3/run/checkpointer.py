"""Save checkpoints: a copy in host memory, then files, hashes, manifest, one rename.

What is written may be written on a thread beside the training. A folder gets its final name when
the disk has everything in it.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch.distributed.checkpoint as dcp

from r3.models.hf_checkpoint import replace_folder
from r3.policy import Policy
from r3.run import checkpoint
from r3.run.checkpoint import CheckpointFiles
from r3.run.folder import step_folders, sync_to_disk
from r3.run.goal import best_step
from r3.run.lock import RunLock
from r3.run.manifest import FileFacts, RunState, measure_durably, write_manifest
from r3.runtime.device import Device
from r3.runtime.mesh import Axis, Mesh
from r3.runtime.terminal import say

_T = TypeVar("_T")
# What exFAT, SMB and FUSE say of a symbolic link; nothing that R3 resumes from is one.
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)


class SaveError(OSError):
    """A checkpoint could not be written for a reason outside of the run; it can be retried."""


@dataclass(frozen=True, kw_only=True)
class Copy:
    """One rank's part of a checkpoint, all of it in host memory and of no other use.

    Attributes:
        shards: what torch's writer takes.
        files: further files of this rank.
        private: the same, for the owner alone: conversations may hold texts of users.
        facts: for `r3.json`.
        values: of the evaluations by step, the highest is the best.
        started: when the save began (time.time()).
    """

    step: int
    shards: dict[str, Any]
    files: Mapping[str, bytes]
    private: Mapping[str, bytes]
    facts: Mapping[str, Any]
    values: Mapping[int, float]
    started: float


class Stateful(Protocol):
    """A part of a run whose state is in every checkpoint."""

    def state_dict(self) -> Mapping[str, bytes]:
        """Return files of this rank, by names that no other rank and no other part uses."""

    def load_state_dict(self, state: Mapping[str, bytes]) -> None:
        """Continue from the files of a checkpoint, those of all ranks and parts, by name."""


class Checkpointer:
    """Saves checkpoints into a folder, one at a time: `with Checkpointer(...) as checkpointer:`.

    At the end of the block, what a thread writes is finished first, unless Ctrl-C ends it: a step
    that fails must not take the checkpoint before it along.

    Args:
        folder: of the checkpoints.
        keep: number of newest checkpoints that are kept beside the best; 0 = all.
        state: of the run, whose id and key are in manifests.
        lock: of the run's folder, in the process that writes there.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int = 0,
        state: RunState | None = None,
        lock: RunLock | None = None,
    ) -> None:
        self._folder, self._keep, self._state, self._lock = folder, keep, state, lock
        self._parts: list[Stateful] = []
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="r3-checkpoint")
        self._work: Future[object] | None = None

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._work is not None and kind is not KeyboardInterrupt:
            wait([self._work])

    def attach(self, part: Stateful, checkpoint: Path | None = None) -> None:
        """Have the state of a part in every checkpoint from now on.

        Args:
            checkpoint: that the run continues from, whose state the part takes.
        """
        self._parts.append(part)
        if checkpoint:
            part.load_state_dict(CheckpointFiles(checkpoint))

    def copy(
        self,
        policy: Policy,
        device: Device,
        mesh: Mesh,
        *,
        step: int,
        values: Mapping[int, float] | None = None,
        evaluations: Sequence[Mapping[str, float]] = (),
    ) -> Copy:
        """Copy the state after `step` steps to host memory, to be written while the run goes on.

        All ranks must call, with the policy's training memory onloaded. When this returns, the
        policy may change.

        Args:
            values: of the evaluations by step; the checkpoint of the highest is not deleted.
            evaluations: the same as rows of metrics, for `r3.json`.

        Raises:
            SaveError: on all ranks: the disk has no room or cannot be written.
            UnsoundError: on all ranks: weights or moments that no run should continue from.
        """
        started = time.time()
        checkpoint.require_sound(policy, mesh.world, f"after step {step}")
        shards, own_files = checkpoint.copied_state(
            policy, device, mesh, make_room=lambda size: self._make_room(step, size, mesh.world)
        )
        return Copy(
            step=step,
            shards=shards,
            files=own_files,
            private={
                name: kept for part in self._parts for name, kept in part.state_dict().items()
            },
            facts={
                "step": step,
                "update_number": policy.update_number,
                "optimizer_step": checkpoint.optimizer_step(policy),
                "world_size": device.world_size,
                "evaluations": list(evaluations),
            },
            values=dict(values or {}),
            started=started,
        )

    def write(self, copy: Copy, axis: Axis) -> Path:
        """Write a checkpoint, point `latest` and `best` at theirs, delete old ones.

        Returns the folder.

        All ranks must call. Uses no device, and no collective but those of `axis`.

        Args:
            axis: all ranks; beside a training, on a process group that nothing else uses.

        Raises:
            SaveError: on all ranks: a disk is full or cannot be written. What was there before is
                unchanged.
        """
        partial = self._partial(copy.step)
        try:
            _write_shards(copy.shards, partial, axis)
            measured = _together(axis, lambda: _write_files(copy, partial, axis.rank))
            _together(axis, lambda: None if axis.rank else self.publish(copy, measured))
        except SaveError:
            if axis.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            raise
        return self._final(copy.step)

    def begin(self, work: Callable[[], object]) -> None:
        """Do some work on the thread. `finish` must have been called for the work before."""
        assert self._work is None, "one piece of work at a time"
        self._work = self._threads.submit(work)

    @property
    def is_busy(self) -> bool:
        """Whether work was begun and `finish` not called; the same on all ranks."""
        return self._work is not None

    @property
    def is_done(self) -> bool:
        """Whether `finish` would return at once; may differ between ranks."""
        return self._work is None or self._work.done()

    def finish(self) -> None:
        """Wait until the work is finished, and raise the error that ended it, if any."""
        work, self._work = self._work, None
        if work is not None:
            work.result()

    def _final(self, step: int) -> Path:
        return self._folder / f"step_{step:06d}"

    def _partial(self, step: int) -> Path:
        return self._folder / f".step_{step:06d}.partial"

    def _make_room(self, step: int, size: int, world: Axis) -> None:
        """Make an empty folder for a checkpoint of so many bytes of this rank."""
        needed, partial = sum(world.all_gather_object(size)), self._partial(step)

        def prepare() -> None:
            if world.rank:
                return
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            free = shutil.disk_usage(partial).free
            if free < needed:
                shutil.rmtree(partial, ignore_errors=True)
                raise OSError(
                    f"{self._folder}: no space: a checkpoint needs {needed / 2**20:,.1f} MiB, "
                    f"{free / 2**20:,.1f} MiB are free"
                )

        _together(world, prepare)

    def publish(self, copy: Copy, measured: Sequence[Mapping[str, FileFacts]]) -> None:
        """Complete the folder and give it its name, when the disk has the files of all ranks."""
        partial = self._partial(copy.step)
        if self._lock:
            self._lock.require_there()
        if self._state:  # without its file, the next start would have another key
            self._state.write(self._folder.parent, anew=False)
        facts = {**copy.facts, "seconds": round(time.time() - copy.started, 3)}
        (partial / "r3.json").write_text(json.dumps(facts, indent=2))
        known = {name: one for part in measured for name, one in part.items()}
        rest = sorted({path.name for path in partial.iterdir()} - set(known))
        write_manifest(
            partial,
            run_id=self._state.run_id if self._state else "",
            step=copy.step,
            files=known | measure_durably(partial, rest),
            key=self._state.key_bytes if self._state else b"",
        )
        replace_folder(partial, self._final(copy.step))
        saved = dict(step_folders(self._folder))
        best = best_step({step: copy.values[step] for step in saved if step in copy.values})
        self._link("latest", self._final(copy.step))
        self._link("best", None if best is None else saved[best])
        sync_to_disk(self._folder)
        for step in list(saved)[: -self._keep] if self._keep else ():
            if step == best:
                continue
            # Renamed first: a kill in the middle must not leave half a folder of that name.
            unused = saved[step].with_name(f".{saved[step].name}.old")
            shutil.rmtree(unused, ignore_errors=True)
            os.replace(saved[step], unused)
            shutil.rmtree(unused, ignore_errors=True)

    def _link(self, name: str, to: Path | None) -> None:
        link, new = self._folder / name, self._folder / f".{name}.partial"
        if link.is_dir() and not link.is_symlink():  # as tools that follow links copy it
            shutil.rmtree(link)
        if to is None:
            link.unlink(missing_ok=True)
            return
        new.unlink(missing_ok=True)
        try:
            new.symlink_to(to.name)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            say(f"{link} is {to.name}; this disk has no links", error=True)
        else:
            os.replace(new, link)


def _write_shards(shards: dict[str, Any], partial: Path, axis: Axis) -> None:
    """Write Megatron's shards with torch's writer, for `dist_checkpointing.load`."""
    from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner

    # Nothing is copied ahead: with CUDA, that would touch the first device from every rank.
    writer = dcp.FileSystemWriter(
        partial, thread_count=1, single_file_per_rank=True, per_thread_copy_ahead=0
    )
    planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
    try:
        dcp.save(shards, storage_writer=writer, planner=planner, process_group=axis.group)
    except dcp.api.CheckpointException as error:
        failures = {rank: cause for rank, (cause, _) in error.failures.items()}
        if not all(map(_is_of_disk, failures.values())):
            raise
        raise SaveError(
            "; ".join(
                f"rank {rank}: {partial}: {_of_disk(cause)}" for rank, cause in failures.items()
            )
        ) from None
    axis.barrier()


def _write_files(copy: Copy, partial: Path, rank: int) -> dict[str, FileFacts]:
    for name, content in {**copy.files, **copy.private}.items():
        (partial / name).touch(mode=0o600 if name in copy.private else 0o666)
        (partial / name).write_bytes(content)
    shards = [path.name for path in partial.glob(f"__{rank}_*.distcp")]
    return measure_durably(partial, [*copy.files, *copy.private, *shards])


def _together(axis: Axis, work: Callable[[], _T]) -> list[_T]:
    """Do `work` on every rank; return all results, or raise SaveError on all ranks."""
    value: _T | None = None
    failure = ""
    try:
        value = work()
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        failure = f"rank {axis.rank}: {place}{error.strerror or error}"
    everybody = axis.all_gather_object((value, failure))
    if failures := [failure for _, failure in everybody if failure]:
        raise SaveError("; ".join(failures))
    return [value for value, _ in everybody]


def _is_of_disk(error: BaseException) -> bool:
    # torch's C++ writer reports a failed write as a RuntimeError, without the system's reason.
    return isinstance(error, OSError) or (
        isinstance(error, RuntimeError)
        and any(name in str(error) for name in ("PytorchStreamWriter", "inline_container"))
    )


def _of_disk(error: BaseException) -> str:
    reason = isinstance(error, OSError) and error.strerror
    return reason or "a write failed; is the disk full?"
