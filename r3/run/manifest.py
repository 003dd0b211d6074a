"""The files of a checkpoint with size and SHA-256, in a file that hashes itself.

`manifest.json` is written last, when everything it names is on the disk. It also names the run and
the step, and is signed with the key of the run, because suspended conversations hold pickles.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from r3.run.folder import sync_to_disk

_NAME = "manifest.json"
_FORMAT = 1
_BLOCK = 1 << 22


class DamageError(ValueError):
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


def faults(folder: Path, manifest: Manifest, names: Sequence[str]) -> list[str]:
    """Return one line per file that is not as it was written."""
    found = []
    for name in names:
        expected = manifest.files[name]
        try:
            size = os.stat(folder / name).st_size
            if size != expected.size:
                found.append(f"{name} has {size} bytes, not {expected.size}")
            elif measure(folder / name) != expected:
                found.append(f"{name} has other content than was written (SHA-256 differs)")
        except FileNotFoundError:
            found.append(f"{name} is missing")
        except OSError as error:
            found.append(f"{name} cannot be read: {error.strerror}")
    return found


def _canonical(manifest: Manifest) -> str:
    """The text that the hash and the signature cover."""
    facts = {
        "format": _FORMAT,
        "run_id": manifest.run_id,
        "step": manifest.step,
        "files": {name: asdict(manifest.files[name]) for name in sorted(manifest.files)},
    }
    return json.dumps(facts, sort_keys=True)
