"""What each rank does in the tests of damaged, unwritable and unsound checkpoints."""

from __future__ import annotations

import json
import os
import pickle
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from r3.config import Config, with_values
from r3.policy import Policy
from r3.run import checkpoint
from r3.run.folder import RunDir
from r3.run.identity import new_identity, write_identity
from r3.run.manifest import measure, read_manifest, write_manifest
from r3.run.resume import Found, ResumeError, Start, find_latest, step_folders
from r3.run.sound import UnsoundError
from r3.run.verify import newest_whole
from r3.runtime.device import Device
from r3.runtime.mesh import Mesh
from tests.ranks.cases import batches_of, build
from tests.tiny import tiny_config


class Executed:
    """Creates a file when it is unpickled: what a prepared checkpoint could do."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self.path, "w")


def flip_bit(path: Path, position: int) -> None:
    """Flip one bit of a file."""
    content = bytearray(path.read_bytes())
    content[position] ^= 0x40
    path.write_bytes(content)


def swap(one: Path, other: Path) -> None:
    """Exchange two files."""
    aside = one.with_name("aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def edit(path: Path, **values: Any) -> None:
    """Change values in a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


# What is done to the newest of two checkpoints. Each takes the folder of the newest and the older.
DAMAGE: dict[str, Callable[[Path, Path], object]] = {
    "bit of a moment": lambda new, old: flip_bit(new / "__0_0.distcp", -5000),
    "bit of a weight": lambda new, old: flip_bit(new / "__1_0.distcp", 5000),
    "bit of metadata": lambda new, old: flip_bit(new / ".metadata", 100),
    "bit of manifest": lambda new, old: flip_bit(new / "manifest.json", 100),
    "bit of random state": lambda new, old: flip_bit(new / "random_00001.json", 50),
    "shard of another step": lambda new, old: shutil.copy(old / "__1_0.distcp", new),
    "metadata of another step": lambda new, old: shutil.copy(old / ".metadata", new),
    "manifest of another step": lambda new, old: shutil.copy(old / "manifest.json", new),
    "whole folder of another step": lambda new, old: (
        shutil.rmtree(new),
        shutil.copytree(old, new),
    ),
    "optimizer step edited": lambda new, old: edit(new / "r3.json", optimizer_step=7),
    "shard truncated": lambda new, old: os.truncate(new / "__0_0.distcp", 1000),
    "shard empty": lambda new, old: os.truncate(new / "__0_0.distcp", 0),
    "shard missing": lambda new, old: (new / "__1_0.distcp").unlink(),
    "shards swapped": lambda new, old: swap(new / "__0_0.distcp", new / "__1_0.distcp"),
    "shard a folder": lambda new, old: (
        (new / "__1_0.distcp").unlink(),
        (new / "__1_0.distcp").mkdir(),
    ),
    "metadata missing": lambda new, old: (new / ".metadata").unlink(),
    "common missing": lambda new, old: (new / "common.pt").unlink(),
    "backend missing": lambda new, old: (new / "metadata.json").unlink(),
    "r3.json missing": lambda new, old: (new / "r3.json").unlink(),
    "manifest missing": lambda new, old: (new / "manifest.json").unlink(),
    "manifest a list": lambda new, old: (new / "manifest.json").write_text("[]"),
    "manifest deep": lambda new, old: (new / "manifest.json").write_text("[" * 100_000),
    "folder empty": lambda new, old: (shutil.rmtree(new), new.mkdir()),
    "folder a file": lambda new, old: (shutil.rmtree(new), new.write_text("")),
}


def damaged(device: Device, *, out: str) -> dict[str, Any]:
    """Save two steps, damage the newest in every way of DAMAGE; what each rank would resume
    from.
    """
    mesh, policy = build(device, tiny_config(parallel={"ep": 2}))
    (batch,) = batches_of(mesh, policy.shape, micro_batch_tokens=96)
    whole = RunDir(Path(out) / "whole")
    identity = new_identity("0123456789abcdef")
    if device.rank == 0:
        write_identity(whole.path, identity)
    for step in (1, 2):
        policy.update(batch, total_updates=4)
        checkpoint.save(
            whole.checkpoints, policy, device, mesh, step=step, keep=0, identity=identity
        )
    said: dict[str, Any] = {"whole": resume(device, mesh, whole, tiny_config(parallel={"ep": 2}))}
    for name, damage in DAMAGE.items():
        run_dir = copy_of(whole, Path(out) / name.replace(" ", "_"), device)
        if device.rank == 0:
            damage(run_dir.checkpoint(2), run_dir.checkpoint(1))
        dist.barrier()
        said[name] = resume(device, mesh, run_dir, tiny_config(parallel={"ep": 2}))
        if name == "bit of a moment":
            said["loaded"] = loads(device, mesh, policy, run_dir)
    stop = with_values(tiny_config(parallel={"ep": 2}), {"checkpoint.on_damage": "stop"})
    run_dir = copy_of(whole, Path(out) / "stop", device)
    if device.rank == 0:
        flip_bit(run_dir.checkpoint(2) / "common.pt", 9)
    dist.barrier()
    said["stop"] = resume(device, mesh, run_dir, stop)
    if device.rank == 0:
        flip_bit(run_dir.checkpoint(1) / "common.pt", 9)
    dist.barrier()
    said["both damaged"] = resume(device, mesh, run_dir, tiny_config(parallel={"ep": 2}))
    return said


def copy_of(whole: RunDir, folder: Path, device: Device) -> RunDir:
    """A copy of a run's folder, made by rank 0."""
    if device.rank == 0:
        shutil.copytree(whole.path, folder)
    dist.barrier()
    return RunDir(folder)


def resume(device: Device, mesh: Mesh, run_dir: RunDir, config: Config) -> list[str]:
    """The name of the folder that a run would resume from, then what the user reads."""
    start = Start(found=find_latest(run_dir.checkpoints), said=("as found",))
    try:
        start = newest_whole(start, run_dir, config, mesh.world, writes=True)
    except ResumeError as error:
        return ["", str(error)]
    finally:
        dist.barrier()
    left = [folder.name for _, folder in step_folders(run_dir.checkpoints)]
    assert start.found is not None and start.found.folder.name == left[-1], left
    return [start.found.folder.name, *start.said]


def loads(device: Device, mesh: Mesh, policy: Policy, run_dir: RunDir) -> int:
    """The number of updates in the checkpoint that a run falls back to, loaded for real."""
    found = find_latest(run_dir.checkpoints)
    assert found is not None
    checkpoint.load(found, policy, device, mesh)
    return policy.update_number


def refused(device: Device, *, out: str) -> dict[str, Any]:
    """Checkpoints that must not be read or written, all of one policy after one update."""
    mesh, policy = trained(device)
    cases = (code_in_metadata, suspended_conversations, unwritable, unsound)
    return {case.__name__: case(device, mesh, policy, Path(out) / case.__name__) for case in cases}


def trained(device: Device) -> tuple[Mesh, Policy]:
    """A policy after one update."""
    mesh, policy = build(device, tiny_config(parallel={"ep": 2}))
    (batch,) = batches_of(mesh, policy.shape, micro_batch_tokens=96)
    policy.update(batch, total_updates=4)
    return mesh, policy


def code_in_metadata(device: Device, mesh: Mesh, policy: Policy, out: Path) -> dict[str, Any]:
    """Put a program into `.metadata` of a checkpoint whose manifest is made to fit; then load
    it.
    """
    folder = checkpoint.save(out / "checkpoints", policy, device, mesh, step=1, keep=0)
    if device.rank == 0:
        (folder / ".metadata").write_bytes(pickle.dumps(Executed(f"{out}/executed")))
        files = dict(read_manifest(folder).files)
        files[".metadata"] = measure(folder / ".metadata")
        write_manifest(folder, run_id="", step=1, files=files)
    dist.barrier()
    said = {}
    try:
        checkpoint.load(Found(folder=folder, step=1), policy, device, mesh)
    except ValueError as error:
        said["load"] = str(error)
    dist.barrier()
    said["resume"] = resume(device, mesh, RunDir(out), tiny_config(parallel={"ep": 2}))[1]
    said["executed"] = (out / "executed").exists()
    return said


def suspended_conversations(
    device: Device, mesh: Mesh, policy: Policy, out: Path
) -> dict[str, Any]:
    """A checkpoint with pickled environments is used only if it is signed with the run's key."""
    run_dir, said = RunDir(out), {}
    writer = new_identity("0123456789abcdef")
    files = {f"carried_{device.rank:05d}.bin": b"pickles"}
    checkpoint.save(
        run_dir.checkpoints, policy, device, mesh, step=1, keep=0, files=files, identity=writer
    )
    for name, reader in {"own": writer, "other": new_identity("0123456789abcdef")}.items():
        if device.rank == 0:
            write_identity(run_dir.path, reader)
        dist.barrier()
        said[name] = resume(device, mesh, run_dir, tiny_config(parallel={"ep": 2}))
    return said


def unwritable(device: Device, mesh: Mesh, policy: Policy, out: Path) -> dict[str, Any]:
    """A save on a disk that takes no large file, into a path that is a file; then a good one."""
    folder, said = out / "checkpoints", {}

    def attempt(name: str, into: Path) -> None:
        try:
            said[name] = checkpoint.save(into, policy, device, mesh, step=1, keep=0).name
        except checkpoint.SaveError as error:
            said[name] = str(error)

    # A limit of the kernel: the first rank's write fails in the middle, as on a full disk.
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if device.rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    attempt("shard", folder)
    dist.barrier()  # rank 0 tidies up
    said["left"] = sorted(path.name for path in folder.iterdir())
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    if device.rank == 0:
        (out / "file").write_text("")
    dist.barrier()
    attempt("not a folder", out / "file")
    attempt("good", folder)
    return said


def unsound(device: Device, mesh: Mesh, policy: Policy, out: Path) -> dict[str, Any]:
    """Save with a broken weight and broken moments on the second rank only."""
    checkpoint.save(out, policy, device, mesh, step=1, keep=0)
    weight = next(policy.chunks[0].parameters()).data
    tensors = dict(policy.memory.optimizer_tensors())
    first = next(tensor for name, tensor in tensors.items() if name.endswith("/exp_avg"))
    second = next(tensor for name, tensor in tensors.items() if name.endswith("/exp_avg_sq"))
    said = {}
    for name, tensor, value in (
        ("nan weight", weight, float("nan")),
        ("large weight", weight, 1e30),
        ("infinite moment", first, float("inf")),
        ("negative variance", second, -1.0),
        ("nothing", weight, 0.0),
    ):
        kept = tensor.clone()
        if device.rank == 1:
            tensor.view(-1)[0] = value
        try:
            checkpoint.save(out, policy, device, mesh, step=2, keep=0)
            said[name] = "saved"
        except UnsoundError as error:
            said[name] = str(error)
        tensor.copy_(kept)
        said[f"{name}, left"] = str(sorted(path.name for path in out.iterdir()))
        dist.barrier()
    assert torch.isfinite(weight).all()
    return said
