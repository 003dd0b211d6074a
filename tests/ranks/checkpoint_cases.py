"""Checkpoints that are damaged, cannot be written, or should not be."""

from __future__ import annotations

import io
import os
import pickle
import resource
import shutil
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from r3.config import Config, with_values
from r3.partial import PartialRollouts, state_dict
from r3.policy import Policy, chained
from r3.run import (
    KEYS,
    Checkpointer,
    Opened,
    ResumeError,
    RunDir,
    RunState,
    SaveError,
    UnsoundError,
    checkpoint,
    gathered_state,
    measure,
    newest_whole,
    read_manifest,
    step_folders,
    write_manifest,
)
from r3.runtime.device import Device
from r3.runtime.mesh import axis_beside, cuda_type_names
from r3.types import Batch
from tests.errors import message_of
from tests.faults.attempts import flip_bit
from tests.policies import batches_of, build, one_update, save_checkpoint
from tests.tiny import edit_json, tiny_config


class Executed:
    """Creates a file when it is unpickled: what a prepared checkpoint could do."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self.path, "w")


def swap(one: Path, other: Path) -> None:
    """Exchange two files."""
    aside = one.with_name("aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def first(action: Callable[..., object], *arguments: Any) -> None:
    """Let rank 0 do something while the others wait. All ranks must call."""
    if dist.get_rank() == 0:
        action(*arguments)
    dist.barrier()


def forge(folder: Path, name: str, content: bytes, at: int = 0) -> None:
    """Write into a file of a checkpoint, with a manifest that fits."""
    forged = bytearray((folder / name).read_bytes())
    forged[at : at + len(content) or None] = content
    (folder / name).write_bytes(forged)
    manifest = read_manifest(folder)
    files = {**manifest.files, name: measure(folder / name)}
    write_manifest(folder, run_id=manifest.run_id, step=manifest.step, files=files)


def program(folder: Path) -> bytes:
    """A file of torch that would run a program if it were unpickled without limits."""
    content = io.BytesIO()
    torch.save(Executed(f"{folder}/executed"), content)
    return content.getvalue()


def forge_program(folder: Path) -> None:
    """Put a program at the end of the largest tensor of the first rank's shard; archives are read
    from their ends.
    """
    content = program(folder)
    places = pickle.loads((folder / ".metadata").read_bytes()).storage_data.values()
    place = max((p for p in places if p.relative_path == "__0_0.distcp"), key=lambda p: p.length)
    forge(folder, place.relative_path, content, at=place.offset + place.length - len(content))


# Pickles whose sizes, as those of a flipped bit, raise MemoryError and OverflowError.
HUGE, HUGER = (b"\x80\x04\x8e" + size.to_bytes(8, "little") for size in (1 << 62, (1 << 64) - 1))

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
    "optimizer step edited": lambda new, old: edit_json(new / "r3.json", optimizer_step=7),
    "random state truncated": lambda new, old: os.truncate(new / "random_00000.json", 100),
    "r3.json a list": lambda new, old: (new / "r3.json").write_text("[]"),
    "r3.json with a step alone": lambda new, old: (new / "r3.json").write_text('{"step": 2}'),
    "shard truncated": lambda new, old: os.truncate(new / "__0_0.distcp", 1000),
    "shard empty": lambda new, old: os.truncate(new / "__0_0.distcp", 0),
    "shard missing": lambda new, old: (new / "__1_0.distcp").unlink(),
    "shards swapped": lambda new, old: swap(new / "__0_0.distcp", new / "__1_0.distcp"),
    "shard a folder": lambda new, old: (
        (new / "__1_0.distcp").unlink(),
        (new / "__1_0.distcp").mkdir(),
    ),
    "metadata of another size": lambda new, old: (new / ".metadata").write_bytes(HUGE),
    "metadata with a program": lambda new, old: (new / ".metadata").write_bytes(
        pickle.dumps(Executed(f"{new}/executed"))
    ),
    "metadata forged": lambda new, old: forge(new, ".metadata", HUGE),
    "metadata forged otherwise": lambda new, old: forge(new, ".metadata", HUGER),
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


def damaged(device: Device, *, out: str) -> SimpleNamespace:
    """Save two steps, and damage the newest in every way of DAMAGE.

    Returns:
        Results by damage, and the updates in the checkpoint that a run falls back to.
    """
    mesh, policy = build(device, tiny_config(parallel={"ep": 2}))
    (batch,) = batches_of(mesh, policy.shape, micro_batch_tokens=96)
    whole = RunDir(Path(out) / "whole")
    state = RunState.new("0123456789abcdef")
    first(state.write, whole.path)
    for step in (1, 2):
        one_update(policy, batch, total_updates=4)
        save_checkpoint(whole.checkpoints, policy, step=step, state=state)
    resumed = {"whole": resume(policy, whole)}
    updates = 0
    for name, damage in DAMAGE.items():
        run_dir = copy_of(whole, Path(out) / name.replace(" ", "_"))
        first(damage, run_dir.checkpoint(2), run_dir.checkpoint(1))
        resumed[name] = resume(policy, run_dir)
        if name == "bit of a moment":
            updates = loads(policy, run_dir)
    stop = with_values(policy.config, {"checkpoint.on_damage": "stop"})
    run_dir = copy_of(whole, Path(out) / "stop")
    first(flip_bit, run_dir.checkpoint(2) / "common.pt", 9)
    resumed["stop"] = resume(policy, run_dir, stop)
    first(flip_bit, run_dir.checkpoint(1) / "common.pt", 9)
    resumed["both damaged"] = resume(policy, run_dir)
    return SimpleNamespace(resumed=resumed, updates=updates)


def copy_of(whole: RunDir, folder: Path) -> RunDir:
    """A copy of a run's folder, made by rank 0."""
    first(shutil.copytree, whole.path, folder)
    return RunDir(folder)


def resume(policy: Policy, run_dir: RunDir, config: Config | None = None) -> SimpleNamespace:
    """Find the checkpoint that a run would resume from.

    Returns:
        Name of the folder that a run resumes from, "" if it does not; what the console shows.
    """
    step, folder = step_folders(run_dir.checkpoints)[-1]
    start = Opened(
        checkpoint=folder,
        step=step,
        notes=("as found",),
        state=None if policy.device.rank else RunState.read(run_dir.path),
    )
    try:
        settings = config or policy.config
        start = newest_whole(start, run_dir, settings, policy.mesh.world, writes=True)
    except ResumeError as error:
        return SimpleNamespace(folder="", notes=[str(error)])
    finally:
        dist.barrier()
    left = [folder.name for _, folder in step_folders(run_dir.checkpoints)]
    assert start.checkpoint is not None and start.checkpoint.name == left[-1], left
    return SimpleNamespace(folder=start.checkpoint.name, notes=list(start.notes))


def load(folder: Path, policy: Policy) -> None:
    """Load a checkpoint."""
    checkpoint.load_checkpoint(folder, policy, policy.device, policy.mesh)


def loads(policy: Policy, run_dir: RunDir) -> int:
    """The number of updates in the checkpoint that a run falls back to, loaded for real."""
    load(step_folders(run_dir.checkpoints)[-1][1], policy)
    return policy.update_number


def refused(device: Device, *, out: str) -> SimpleNamespace:
    """Checkpoints that must not be read or written, all of one policy after one update.

    Returns:
        Results of the functions of these names.
    """
    policy, _ = trained(device)
    return SimpleNamespace(
        code_in_metadata=code_in_metadata(policy, Path(out) / "code"),
        suspended_conversations=suspended_conversations(policy, Path(out) / "suspended"),
        unwritable=unwritable(policy, Path(out) / "unwritable"),
        unsound=unsound(policy, Path(out) / "unsound"),
    )


def trained(device: Device) -> tuple[Policy, Batch]:
    """A policy after one update, and the batch of it."""
    mesh, policy = build(device, tiny_config(parallel={"ep": 2}))
    (batch,) = batches_of(mesh, policy.shape, micro_batch_tokens=96)
    one_update(policy, batch, total_updates=4)
    return policy, batch


def code_in_metadata(policy: Policy, out: Path) -> SimpleNamespace:
    """Put a program into files of a checkpoint, with a manifest that fits; then load it.

    Returns:
        Messages about a program in the metadata and in other files, and whether one ran.
    """
    others = []
    for put in (lambda new: forge(new, "common.pt", program(new)), forge_program):
        folder = save_checkpoint(out / "checkpoints", policy, step=1)
        first(put, folder)
        refusals = (pickle.UnpicklingError, CheckpointException)
        others.append(message_of(partial(load, folder, policy), *refusals))
        dist.barrier()
        executed = (folder / "executed").exists()
        assert not executed, "a program in a checkpoint ran"
    folder = save_checkpoint(out / "checkpoints", policy, step=1)
    first(forge, folder, ".metadata", pickle.dumps(Executed(f"{out}/executed")))
    loaded = message_of(lambda: load(folder, policy), ValueError)
    dist.barrier()
    (note,) = resume(policy, RunDir(out)).notes
    executed = (out / "executed").exists()
    return SimpleNamespace(load=loaded, resume=note, others=others, executed=executed)


def suspended_conversations(policy: Policy, out: Path) -> dict[str, SimpleNamespace]:
    """Resume from a checkpoint with pickled environments, as its own run and as another one."""
    run_dir, resumed = RunDir(out), {}
    writer = RunState.new("0123456789abcdef")
    files = state_dict(PartialRollouts(prompts_taken=1), policy.device.rank, is_leader=True)
    save_checkpoint(run_dir.checkpoints, policy, step=1, files=files, state=writer)
    for name, reader in {"own": writer, "other": RunState.new("0123456789abcdef")}.items():
        first(reader.write, run_dir.path)
        resumed[name] = resume(policy, run_dir)
    return resumed


def unwritable(policy: Policy, out: Path) -> SimpleNamespace:
    """Save to a disk that takes no large file and into a path that is a file; then as usual.

    Returns:
        Folder or message by attempt to save, and the files that a failed save leaves.
    """
    folder, saved = out / "checkpoints", {}

    def attempt(name: str, into: Path) -> None:
        try:
            saved[name] = save_checkpoint(into, policy, step=1).name
        except SaveError as error:
            saved[name] = str(error)

    # A limit of the kernel: the first rank's write fails in the middle, as on a full disk.
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if policy.device.rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    attempt("shard", folder)
    dist.barrier()  # rank 0 removes what it wrote
    remaining = sorted(path.name for path in folder.iterdir())
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    first((out / "file").touch)
    attempt("not a folder", out / "file")
    attempt("good", folder)
    return SimpleNamespace(saved=saved, remaining=remaining)


def unsound(policy: Policy, out: Path) -> dict[str, SimpleNamespace]:
    """Save with a broken weight and broken moments on the second rank only.

    Returns:
        Message about a broken tensor, and the files after the attempt to save.
    """
    save_checkpoint(out, policy, step=1)
    weight = next(policy.chunks[0].parameters()).data
    tensors = dict(policy.memory.optimizer_tensors())
    first = next(tensor for name, tensor in tensors.items() if name.endswith("/exp_avg"))
    second = next(tensor for name, tensor in tensors.items() if name.endswith("/exp_avg_sq"))
    broken = {}
    for name, tensor, value in (
        ("nan weight", weight, float("nan")),
        ("large weight", weight, 1e30),
        ("infinite moment", first, float("inf")),
        ("negative variance", second, -1.0),
        ("nothing", weight, 0.0),
    ):
        kept = tensor.clone()
        if policy.device.rank == 1:
            tensor.view(-1)[0] = value
        save = partial(save_checkpoint, out, policy, step=2)
        message = message_of(save, UnsoundError)
        tensor.copy_(kept)
        remaining = sorted(path.name for path in out.iterdir())
        broken[name] = SimpleNamespace(message=message, remaining=remaining)
        dist.barrier()
    assert torch.isfinite(weight).all()
    return broken


def beside(device: Device, *, out: str) -> str:
    """Write the same state at once, and on a thread while the policy trains on.

    Returns:
        What a full disk of the second rank raised.
    """
    policy, batch = trained(device)
    whole = save_checkpoint(Path(out) / "whole", policy, step=1)
    axis, gate = axis_beside(policy.mesh.world, timeout_s=60), threading.Event()
    with Checkpointer(Path(out) / "beside") as beside, Checkpointer(Path(out) / "full") as other:
        copy = beside.copy(policy, device, policy.mesh, step=1)
        beside.begin(lambda: (gate.wait(60), beside.write(copy, axis)))
        one_update(policy, batch, total_updates=4)
        twice = message_of(lambda: beside.begin(lambda: None), AssertionError)
        gate.set()
        one_update(policy, batch, total_updates=4)  # its collectives run beside those of the write
        beside.finish()
        written = Path(out) / "beside" / whole.name

        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        copy_2 = other.copy(policy, device, policy.mesh, step=1)
        if device.rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
        other.begin(lambda: other.write(copy_2, axis))
        full = message_of(other.finish, SaveError)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        dist.barrier()
    assert "one piece of work at a time" in twice, twice
    assert policy.update_number == 3
    assert not any((Path(out) / "full").iterdir()), "files of the save that failed"
    # `.metadata`, r3.json and the manifest hold a time or a random number.
    kinds = ("__", "common", "random")
    names = [path.name for path in whole.iterdir() if path.name.startswith(kinds)]
    expected = ["__0_0.distcp", "__1_0.distcp", "common.pt"]
    assert sorted(names) == [*expected, "random_00000.json", "random_00001.json"]
    for name in names:
        assert (whole / name).read_bytes() == (written / name).read_bytes(), name
    return full


def gathered(device: Device, *, parallel: dict[str, int], piece: int) -> int:
    """Require that R3 gathers the optimizer's state as Megatron does, after an update.

    Returns:
        Tensors that were compared on this rank.
    """
    mesh, policy = build(device, tiny_config(parallel=parallel, model={"dtype": "bfloat16"}))
    (batch,) = batches_of(mesh, policy.shape, micro_batch_tokens=96)
    one_update(policy, batch, total_updates=4)
    compared = 0
    for optimizer in chained(policy.optimizer):
        with cuda_type_names():
            theirs = type(optimizer).get_parameter_state_dp_zero(
                optimizer, use_gloo_comm=False, return_on_all_ranks=True
            )
        ours = gathered_state(optimizer, piece=piece)
        assert ours.keys() == theirs.keys()
        if optimizer.data_parallel_group.rank():
            continue  # its values are never written
        for number in range(len(optimizer.buffers)):
            for dtype, tensors in theirs[number].items():
                assert ours[number][dtype].keys() == tensors.keys()
                pairs = [(ours[number][dtype][key], tensors[key]) for key in KEYS]
                compared += len(pairs)
                assert all(torch.equal(own, other) for own, other in pairs), (number, dtype)
    return compared
