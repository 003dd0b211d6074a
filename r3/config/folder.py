"""Rules about the folder of a run, and the errors of one that cannot be used."""

from __future__ import annotations

import stat
from pathlib import Path

from r3.config.check import Findings
from r3.config.settings import Config

_FILES = ("metrics.jsonl", "config.yaml", "overrides.yaml", "run.json", "run.lock")
_FOLDERS = ("checkpoints", "errors", "eval", "heartbeats", "hf", "rollouts", "tensorboard")
_NEW = "name a new folder, or that of an earlier run"


def check_run_folder(config: Config, found: Findings) -> None:
    """Refuse what cannot be a folder, and things of the wrong kind in it. Changes nothing."""
    path = config.log.dir
    if not path:
        return
    try:
        path.encode()
    except UnicodeEncodeError:
        # Shown with its escapes, because nothing can print it as it is.
        found.add("log.dir", "is not UTF-8", _NEW, value=path.encode(errors="replace").decode())
        return
    folder = Path(path)
    try:
        if folder.exists() and not folder.is_dir():
            found.add("log.dir", "is not a folder", _NEW)
            return
        kinds = {name: (folder / name).stat().st_mode for name in _present(folder)}
    except (OSError, ValueError) as error:  # too long, a loop of links, below a file, a null byte
        reason = error.strerror if isinstance(error, OSError) else error
        found.add("log.dir", f"cannot be a folder ({reason})", _NEW)
        return
    for name, mode in kinds.items():
        fits = stat.S_ISREG(mode) if name in _FILES else stat.S_ISDIR(mode)
        if not fits:
            kind = "file" if name in _FILES else "folder"
            found.add("log.dir", f"holds {name}, which is not a {kind}", f"remove it, or {_NEW}")


def _present(folder: Path) -> list[str]:
    """Names of a run that the folder holds; OSError if there can be no such folder."""
    try:
        folder.stat()
    except FileNotFoundError:
        return []
    return [name for name in (*_FILES, *_FOLDERS) if (folder / name).exists()]
