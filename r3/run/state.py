"""`run.json`, the state of a run beside its checkpoints: id, key that signs them, starts, digests.

The file is readable by its owner alone. Whoever can read the key can make a checkpoint whose
pickled environments this run executes; whoever can only write to `checkpoints/` cannot.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from r3.config import folder_error
from r3.run.folder import owner_of, write_json

_NAME = "run.json"

Digests = Mapping[str, Mapping[str, str]]
"""Digests by group and name, such as "data" and "rows"; of packages their versions."""


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
            state = cls(**json.loads((folder / _NAME).read_bytes()))
            _ = state.key_bytes
            return state
        except FileNotFoundError:
            return None
        except PermissionError:
            owner = owner_of(folder / _NAME)
            rule = f"{_NAME}, the key that signs checkpoints, can be read by {owner} alone"
            fix = f"let {owner} resume the run, or resume a copy of the folder without {_NAME}"
        except (OSError, ValueError, TypeError, RecursionError) as error:
            rule = f"{_NAME} cannot be read ({error})"
            fix = f"remove {_NAME}; only conversations that were suspended in a checkpoint need it"
        raise folder_error(folder, rule, fix)

    def write(self, folder: Path, *, anew: bool = True) -> None:
        """Write the file, readable by its owner alone.

        Args:
            anew: also if it is there.
        """
        if anew or not (folder / _NAME).exists():
            write_json(folder / _NAME, asdict(self), private=True)

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
