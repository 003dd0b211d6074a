"""Write a captured checkpoint in a thread: files, hashes, manifest, one rename."""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed.checkpoint as dcp

from r3.models.hf_checkpoint import replace_folder
from r3.run.folder import step_folders, sync_to_disk
from r3.run.lock import require_held
from r3.run.manifest import FileFacts, measure_durably, write_manifest
from r3.run.result import best_step
from r3.run.run_json import Identity, has_identity, write_identity
from r3.runtime.mesh import Axis
from r3.runtime.terminal import say

_T = TypeVar("_T")
# What exFAT, SMB and FUSE say of a symbolic link; nothing that R3 resumes from is one.
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)


class SaveError(OSError):
    """A checkpoint could not be written for a reason outside of the run; it can be retried."""


def _partial(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.partial")


def make_room(folder: Path, needed: int, world: Axis) -> None:
    """Make an empty folder to write a checkpoint into. All ranks must call.

    Args:
        folder: final name of the checkpoint.
        needed: bytes that all ranks will write.

    Raises:
        SaveError: on all ranks: the disk has no room or cannot be written.
    """
    partial = _partial(folder)

    def prepare() -> None:
        if world.rank:
            return
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        free = shutil.disk_usage(partial).free
        if free < needed:
            shutil.rmtree(partial, ignore_errors=True)
            raise OSError(
                f"{folder.parent}: no space: a checkpoint needs {needed / 2**20:,.1f} MiB, "
                f"{free / 2**20:,.1f} MiB are free"
            )

    _together(world, prepare)


@dataclass(frozen=True, kw_only=True)
class Unwritten:
    """One rank's part of a checkpoint, all of it in host memory and of no other use.

    Attributes:
        folder: final name, such as `checkpoints/step_000010`.
        shards: what torch's writer takes.
        files: further files of this rank.
        private: the same, for the owner alone: conversations may hold texts of users.
        facts: for `r3.json`.
        identity: of the run, for the manifest.
        keep: number of newest checkpoints that are kept; 0 = all.
        values: of the evaluations by step, the highest is the best. The best checkpoint is kept.
        started: when the save began (time.time()).
    """

    folder: Path
    shards: dict[str, Any]
    files: Mapping[str, bytes]
    private: Mapping[str, bytes]
    facts: Mapping[str, Any]
    identity: Identity
    keep: int
    started: float
    values: Mapping[int, float] = field(default_factory=dict)

    def write(self, axis: Axis) -> Path:
        """Write the checkpoint, point `latest` and `best` at theirs, delete old ones.

        Returns the folder.

        All ranks must call. Uses no device, and no collective but those of `axis`.

        Args:
            axis: all ranks; beside a training, on a process group that nothing else uses.

        Raises:
            SaveError: on all ranks: a disk is full or cannot be written. What was there before is
                unchanged.
        """
        try:
            self._write_shards(axis)
            measured = _together(axis, lambda: self._write_own_files(axis.rank))
            _together(axis, lambda: None if axis.rank else self._publish(measured))
        except SaveError:
            if axis.rank == 0:
                shutil.rmtree(_partial(self.folder), ignore_errors=True)
            raise
        return self.folder

    def _write_shards(self, axis: Axis) -> None:
        """Write Megatron's shards with torch's writer, for `dist_checkpointing.load`."""
        from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner

        partial = _partial(self.folder)
        # Nothing is copied ahead: with CUDA, that would touch the first device from every rank.
        writer = dcp.FileSystemWriter(
            partial, thread_count=1, single_file_per_rank=True, per_thread_copy_ahead=0
        )
        planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        try:
            dcp.save(self.shards, storage_writer=writer, planner=planner, process_group=axis.group)
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

    def _write_own_files(self, rank: int) -> dict[str, FileFacts]:
        partial = _partial(self.folder)
        for name, content in {**self.files, **self.private}.items():
            (partial / name).touch(mode=0o600 if name in self.private else 0o666)
            (partial / name).write_bytes(content)
        shards = [path.name for path in partial.glob(f"__{rank}_*.distcp")]
        return measure_durably(partial, [*self.files, *self.private, *shards])

    def _publish(self, measured: list[dict[str, FileFacts]]) -> None:
        """Complete the folder and give it its name, when the disk has the files of all ranks."""
        partial, checkpoints = _partial(self.folder), self.folder.parent
        require_held(checkpoints.parent)
        # Without its run.json, the next start would have another key than the checkpoints.
        if self.identity.run_id and not has_identity(checkpoints.parent):
            write_identity(checkpoints.parent, self.identity)
        facts = {**self.facts, "seconds": round(time.time() - self.started, 3)}
        (partial / "r3.json").write_text(json.dumps(facts, indent=2))
        known = {name: one for part in measured for name, one in part.items()}
        rest = sorted({path.name for path in partial.iterdir()} - set(known))
        write_manifest(
            partial,
            run_id=self.identity.run_id,
            step=self.facts["step"],
            files=known | measure_durably(partial, rest),
            key=self.identity.key_bytes,
        )
        replace_folder(partial, self.folder)
        saved = dict(step_folders(checkpoints))
        best = best_step({step: self.values[step] for step in saved if step in self.values})
        links = {"latest": self.folder} | ({} if best is None else {"best": saved[best]})
        for name in ("latest", "best"):
            link, new = checkpoints / name, checkpoints / f".{name}.partial"
            if link.is_dir() and not link.is_symlink():  # as tools that follow links copy it
                shutil.rmtree(link)
            if name not in links:
                link.unlink(missing_ok=True)
                continue
            new.unlink(missing_ok=True)
            try:
                new.symlink_to(links[name].name)
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                say(f"{link} is {links[name].name}; this disk has no links", error=True)
            else:
                os.replace(new, link)
        sync_to_disk(checkpoints)
        for step in list(saved)[: -self.keep] if self.keep else ():
            if step == best:
                continue
            # Renamed first: a kill in the middle must not leave half a folder of that name.
            unused = saved[step].with_name(f".{saved[step].name}.old")
            shutil.rmtree(unused, ignore_errors=True)
            os.replace(saved[step], unused)
            shutil.rmtree(unused, ignore_errors=True)


class Background:
    """One piece of work at a time on a thread beside the training: `with Background() as work:`.

    At the end of the block the work is finished first, unless Ctrl-C ends it: a step that fails
    must not take the checkpoint before it along.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="r3-checkpoint")
        self._work: Future[object] | None = None

    def __enter__(self) -> Background:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._work is not None and kind is not KeyboardInterrupt:
            wait([self._work])

    def start(self, work: Callable[[], object]) -> None:
        """Begin some work. `finish` must have been called for the work before."""
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
