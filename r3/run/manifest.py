"""What a run knows of its checkpoints: its state, which signs them, and the files of each.

`run.json` has the state of a run: id, key, starts, digests. It is readable by its owner alone.
Whoever can read the key can make a checkpoint whose pickled environments this run executes; whoever
can only write to `checkpoints/` cannot.

`manifest.json` is written last, when everything it names is on the disk. It also names the run and
the step, and is signed with the key of the run, because suspended conversations hold pickles.

torch's reader unpickles `.metadata` without limits, so a prepared checkpoint could run any program.
Here the file is unpickled first with the few classes that torch's writer uses. A pickle that passes
names nothing else, so torch's own reader is then safe. Metadata that asks for pickled objects
beside tensors is refused. Tensors and `common.pt` are read with `weights_only`, which runs nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import io
import json
import os
import pickle
import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from r3.config import folder_error
from r3.errors import Fault
from r3.run.folder import owner_of, sync_to_disk, write_json

if TYPE_CHECKING:
    from r3.runtime.mesh import Axis

_NAME = "manifest.json"
_STATE = "run.json"
_FORMAT = 1
_BLOCK = 1 << 22
_PICKLES = ".bin"  # ends the names of files that hold pickled conversations
_SHOWN = 3
_ALLOWED = {
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "torch": {"Size"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.serialization": {"_get_layout"},
}
# What unpickling bytes that are no pickle raises; sizes among them may be of any number.
_UNREADABLE = (
    *(pickle.UnpicklingError, ArithmeticError, AttributeError, EOFError, ImportError),
    *(LookupError, MemoryError, OSError, RuntimeError, TypeError, ValueError),
)


Digests = Mapping[str, Mapping[str, str]]
"""Digests by group and name, such as "data" and "rows"; of packages their versions."""


def digest_of(parts: Iterable[str | bytes]) -> str:
    """A digest of texts and contents, which differs if a border between two of them moves."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        content = part if isinstance(part, bytes) else part.encode(errors="backslashreplace")
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()


@dataclass(frozen=True, kw_only=True)
class RunState:
    """One run, through all its starts.

    Attributes:
        run_id: written into every checkpoint.
        key: hex; signs manifests of checkpoints.
        last_start: newest checkpoint's step when the run started last; -1 = never.
        fruitless: automatic restarts in a row that found no newer checkpoint than the start before.
        failed_step: the step in which the attempt before an automatic restart ended; 0 = none.
        failures: attempts in a row that ended in that step.
        place: the folder at the last start: its number on the disk, and its path.
        tracker: the id for experiment trackers; another one than `run_id` in a copied folder.
        digests: of what shapes the run beside its settings, at the last start; None if no start has
            compared any.
    """

    run_id: str
    key: str
    last_start: int = -1
    fruitless: int = 0
    failed_step: int = 0
    failures: int = 0
    place: tuple[int, str] | None = None
    tracker: str = ""
    digests: Digests | None = None

    @classmethod
    def new(cls, run_id: str = "") -> RunState:
        """A run that has not started yet."""
        return cls(run_id=run_id or secrets.token_hex(8), key=secrets.token_hex(32))

    @classmethod
    def read(cls, folder: Path) -> RunState | None:
        """The state in a run folder, or None.

        Raises:
            ConfigError: the file is not as R3 wrote it.
        """
        try:
            state = cls(**json.loads((folder / _STATE).read_bytes()))
            _ = state.key_bytes
            return state
        except FileNotFoundError:
            return None
        except PermissionError:
            owner = owner_of(folder / _STATE)
            rule = f"{_STATE}, the key that signs checkpoints, can be read by {owner} alone"
            fix = f"let {owner} resume the run, or resume a copy of the folder without {_STATE}"
        except (OSError, ValueError, TypeError, RecursionError) as error:
            rule = f"{_STATE} cannot be read ({error})"
            fix = f"remove {_STATE}; only conversations that were suspended in a checkpoint need it"
        raise folder_error(folder, rule, fix)

    def write(self, folder: Path, *, anew: bool = True) -> None:
        """Write the file, readable by its owner alone.

        Args:
            anew: also if it is there.
        """
        if anew or not (folder / _STATE).exists():
            write_json(folder / _STATE, asdict(self), private=True)

    @property
    def key_bytes(self) -> bytes:
        """The key that signs."""
        return bytes.fromhex(self.key)

    @property
    def tracker_id(self) -> str:
        """The run of an experiment tracker that this folder continues."""
        return self.tracker or self.run_id

    def placed(self, folder: Path) -> RunState:
        """The same run in a folder; a copy of the folder gets another run of the tracker.

        A folder that was moved or mounted elsewhere keeps its number on the disk, and one that was
        restored from a backup its path.
        """
        number, path = place = (folder.stat().st_ino, str(folder.resolve()))
        is_copy = self.place is not None and number != self.place[0] and path != self.place[1]
        return replace(self, place=place, tracker=secrets.token_hex(8) if is_copy else self.tracker)

    def started(self, step: int, *, reached: int, automatic: bool) -> RunState:
        """The same run after a start from the checkpoint of `step`, 0 if there is none.

        Args:
            reached: the last step that the attempt before has reported.
            automatic: whether a launcher started the run again; a person's start counts anew.
        """
        if not automatic:
            return replace(self, last_start=step, fruitless=0, failed_step=0, failures=0)
        return replace(
            self,
            last_start=step,
            fruitless=self.fruitless + 1 if step <= self.last_start else 0,
            failed_step=reached + 1,
            failures=self.failures + 1 if reached + 1 == self.failed_step else 1,
        )


class DamageError(Fault):
    """A checkpoint that is not as it was written."""


@dataclass(frozen=True, kw_only=True)
class FileFacts:
    """Size in bytes and SHA-256 of a file."""

    size: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The files of a checkpoint by name, and the run that wrote them."""

    run_id: str
    step: int
    files: Mapping[str, FileFacts]
    signature: str = ""

    @property
    def num_bytes(self) -> int:
        """Size of the checkpoint."""
        return sum(facts.size for facts in self.files.values())

    def is_signed_with(self, key: bytes) -> bool:
        """Whether a run with this key wrote the manifest."""
        expected = hmac.new(key, _canonical(self).encode(), hashlib.sha256).hexdigest()
        return bool(key) and hmac.compare_digest(self.signature, expected)


def measure(path: Path) -> FileFacts:
    """Read a file once and return its size and hash."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            size += len(block)
    return FileFacts(size=size, sha256=digest.hexdigest())


def measure_durably(folder: Path, names: Iterable[str]) -> dict[str, FileFacts]:
    """Wait until the disk has these files of a folder; returns their facts by name."""
    facts = {}
    for name in names:
        sync_to_disk(folder / name)
        facts[name] = measure(folder / name)
    return facts


def write_manifest(
    folder: Path, *, run_id: str, step: int, files: Mapping[str, FileFacts], key: bytes = b""
) -> None:
    """Write the manifest of a complete checkpoint folder, and wait until the disk has it."""
    manifest = Manifest(run_id=run_id, step=step, files=dict(sorted(files.items())))
    text = _canonical(manifest)
    content = {
        **json.loads(text),
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
        "signature": hmac.new(key, text.encode(), hashlib.sha256).hexdigest() if key else "",
    }
    (folder / _NAME).write_text(json.dumps(content, indent=1) + "\n")
    sync_to_disk(folder / _NAME)
    sync_to_disk(folder)


def read_manifest(folder: Path) -> Manifest:
    """Read a checkpoint's manifest and check that it is unchanged.

    Raises:
        DamageError: it is missing, or not as it was written.
    """
    path = folder / _NAME
    try:
        content: dict[str, Any] = json.loads(path.read_bytes())
        manifest = Manifest(
            run_id=content["run_id"],
            step=content["step"],
            files={name: FileFacts(**facts) for name, facts in content["files"].items()},
            signature=content["signature"],
        )
        sha256 = content["sha256"]
    except FileNotFoundError:
        raise DamageError(f"{path.name} is missing") from None
    except OSError as error:
        raise DamageError(f"{path.name} cannot be read: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise DamageError(f"{path.name} is not as it was written") from None
    if hashlib.sha256(_canonical(manifest).encode()).hexdigest() != sha256:
        raise DamageError(f"{path.name} is not as it was written: its own hash differs")
    return manifest


def _faults(folder: Path, manifest: Manifest, names: Sequence[str]) -> list[str]:
    """Return one line per file that is not as it was written."""
    faults = []
    for name in names:
        expected = manifest.files[name]
        try:
            size = os.stat(folder / name).st_size
            if size != expected.size:
                faults.append(f"{name} has {size} bytes, not {expected.size}")
            elif measure(folder / name) != expected:
                faults.append(f"{name} has other content than was written (SHA-256 differs)")
        except FileNotFoundError:
            faults.append(f"{name} is missing")
        except OSError as error:
            faults.append(f"{name} cannot be read: {error.strerror}")
    return faults


def run_id_of(folder: Path) -> str:
    """The run that wrote a checkpoint; "" if it does not tell."""
    with suppress(DamageError):
        return read_manifest(folder).run_id
    return ""


def _canonical(manifest: Manifest) -> str:
    """The text that the hash and the signature cover."""
    facts = {
        "format": _FORMAT,
        "run_id": manifest.run_id,
        "step": manifest.step,
        "files": {name: asdict(manifest.files[name]) for name in sorted(manifest.files)},
    }
    return json.dumps(facts, sort_keys=True)


def damage_of(folder: Path, step: int, world: Axis, *, state: RunState | None = None) -> list[str]:
    """Return one line per fault of a checkpoint, the same on all ranks. All ranks must call.

    No pickle is looked at before all ranks know that every file is as it was written.

    Args:
        state: of the run that must have written it, on rank 0; None if any run may.
    """
    names: list[str] = []

    def files() -> list[str]:
        manifest = read_manifest(folder)
        names.extend(sorted(manifest.files)[world.rank :: world.size])
        strange = [] if world.rank else _strangers(manifest, step, state)
        return strange + _faults(folder, manifest, names)

    def pickles() -> list[str]:
        require_plain_metadata(folder / ".metadata")
        return []

    for look in (files, pickles):
        try:
            mine = look()
        except DamageError as error:
            mine = [str(error)]
        if faults := [fault for part in world.all_gather_object(mine) for fault in part]:
            return list(dict.fromkeys(faults))  # every rank misses the same manifest
    return []


def _strangers(manifest: Manifest, step: int, state: RunState | None) -> list[str]:
    """Why this is not a checkpoint of that step of that run."""
    faults = []
    if manifest.step != step:
        faults.append(f"it is of step {manifest.step}, not {step}")
    if state is None:
        return faults
    # A checkpoint without an id was written after run.json had been removed in mid-run.
    if manifest.run_id and manifest.run_id != state.run_id:
        faults.append(f"it is of run {manifest.run_id}, not {state.run_id}")
    elif any(name.endswith(_PICKLES) for name in manifest.files):
        if not manifest.is_signed_with(state.key_bytes):
            faults.append(
                "it holds suspended conversations, whose environments are pickles, and is not "
                "signed with the key in run.json; R3 does not unpickle what others may have written"
            )
    return faults


def summary(folder: Path, damage: Sequence[str]) -> str:
    """One line about a damaged checkpoint."""
    more = f"; and {len(damage) - _SHOWN} more" if len(damage) > _SHOWN else ""
    return f"{folder} is damaged: {'; '.join(damage[:_SHOWN])}{more}"


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if name in _ALLOWED.get(module, ()) or is_dtype:
            return super().find_class(module, name)
        raise DamageError(f"asks for {module}.{name}, which no checkpoint of R3 needs")


def require_plain_metadata(path: Path) -> None:
    """Look at a checkpoint's `.metadata`.

    Raises:
        DamageError: it describes anything but tensors.
    """
    try:
        metadata = _PlainUnpickler(io.BytesIO(path.read_bytes())).load()
        entries = {type(entry).__name__ for entry in metadata.state_dict_metadata.values()}
        places = {Path(place.relative_path) for place in metadata.storage_data.values()}
        has_planner_data = metadata.planner_data is not None
    except DamageError as error:
        raise DamageError(f"{path}: {error}; it was not read") from None
    except _UNREADABLE as error:
        raise DamageError(f"{path}: not a checkpoint's metadata ({error})") from None
    others = entries - {"TensorStorageMetadata"}
    outside = sorted(str(place) for place in places if place.name != str(place))
    if others or outside or has_planner_data:
        what = sorted(others) or outside or ["planner data"]
        raise DamageError(f"{path}: describes {', '.join(what)} beside tensors; it was not read")
