"""One run per folder: a lock against a second start, also on network file systems.

The lock is the file `run.lock`, locked with flock by rank 0. The kernel releases it when that
process ends, however it ends. Some network file systems have no flock, or keep it within one
machine. So the file also holds a heartbeat. A start that finds the heartbeat of another machine
waits until it beats again (the run is alive) or has been silent for a minute (the run is dead).
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import json
import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from r3.config import ANOTHER_FOLDER, ConfigError, folder_error
from r3.run.folder import owner_of
from r3.runtime.process import boot_id
from r3.runtime.terminal import say

_NAME = "run.lock"
_SIZE = 512  # bytes of the file, always: a beat overwrites it in place and needs no disk space
_NO_FLOCK = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_BEAT_S = 3.0
_STALE_S = 60.0  # twenty beats; clients of NFS may cache a file for 60 s, but not across an open
_RETRY_S = 1.0  # `require_free` of another process may hold the lock for an instant


@dataclass(frozen=True, kw_only=True)
class Holder:
    """The process that holds a folder, as its lock file tells."""

    host: str
    pid: int
    started: str
    boot: str = ""
    beat: int = 0
    ended: bool = False

    def shares_locks(self, other: Holder) -> bool:
        """Whether one kernel serves both. Machines that are copies of one have equal names."""
        return (self.boot or self.host) == (other.boot if self.boot else other.host)


class RunLock:
    """A run folder that belongs to this process until `release`, or until the process ends."""

    def __init__(self, descriptor: int, holder: Holder, path: Path) -> None:
        self._descriptor = descriptor
        self._path = path
        self.folder = path.parent
        self._holder = holder
        self._stop = threading.Event()
        self._released = False
        _held.add(self)
        self._write()
        self._thread = threading.Thread(target=self._beat, name="r3-run-lock", daemon=True)
        self._thread.start()
        atexit.register(self.release)

    def release(self) -> None:
        """Release the folder. Releasing twice does nothing."""
        if self._released:
            return
        self._released = True
        self._stop.set()
        self._thread.join()
        atexit.unregister(self.release)
        self._write(ended=True)
        _held.remove(self)
        with suppress(OSError):  # a file system without locks
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # for every copy of the descriptor
        os.close(self._descriptor)

    def forget(self) -> None:
        """Leave the folder to the process that this one was forked from."""
        self._released = True
        os.close(self._descriptor)

    def _beat(self) -> None:
        while not self._stop.wait(_BEAT_S):
            self.require_there()
            self._write()

    def require_there(self) -> None:
        """End this process if another folder, or none, has the place of the one that it holds."""
        if self.is_lost:
            # What is written now makes half a folder, or changes another run's.
            text = f"{self.folder} was deleted or moved while the run wrote to it"
            say(f"\n{text}. The run ends.", error=True)
            os._exit(1)

    @property
    def is_lost(self) -> bool:
        """Whether the folder no longer has the file that this process holds."""
        try:
            mine, there = os.fstat(self._descriptor), os.stat(self._path)
        except FileNotFoundError:
            return True
        except OSError:  # a network file system that does not answer now
            return False
        return (mine.st_dev, mine.st_ino) != (there.st_dev, there.st_ino)

    def _write(self, *, ended: bool = False) -> None:
        self._holder = Holder(
            **asdict(self._holder) | {"beat": self._holder.beat + 1, "ended": ended}
        )
        content = json.dumps(asdict(self._holder)).encode().ljust(_SIZE - 1) + b"\n"
        try:
            os.pwrite(self._descriptor, content, 0)
        except OSError as error:  # flock still protects the folder on this machine
            say(f"{_NAME}: cannot be written: {error}", error=True)


_held: set[RunLock] = set()


def _forget_all() -> None:
    """A process of users' code, such as one of a pool, may live longer than its rank."""
    while _held:
        _held.pop().forget()


os.register_at_fork(after_in_child=_forget_all)


def hold(folder: Path, *, stale_s: float = _STALE_S) -> RunLock:
    """Take a run folder for this process; the folder is made if it is missing.

    Args:
        stale_s: seconds to wait for a heartbeat of a holder on another machine.

    Raises:
        ConfigError: another run holds the folder, or the folder cannot be written. No byte of the
            folder has changed.
    """
    # Absolute: users' code may change the working folder.
    path = folder.absolute() / _NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise unusable(folder, error) from None
    try:
        local = _flock(descriptor, path)
        holder = _read(descriptor)
        mine = Holder(
            host=socket.gethostname(),
            pid=os.getpid(),
            started=time.strftime("%Y-%m-%d %H:%M:%S"),
            boot=boot_id(),
        )
        if holder is not None and not holder.ended and not (local and mine.shares_locks(holder)):
            _require_silence(path, holder, stale_s)
        return RunLock(descriptor, mine, path)
    except ConfigError:
        os.close(descriptor)
        raise


def require_free(folder: Path) -> None:
    """Raise ConfigError if a run on this machine holds the folder, or nobody can write to it.

    Changes nothing.
    """
    above = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not os.access(above, os.W_OK):
        if os.statvfs(above).f_flag & os.ST_RDONLY:
            raise unusable(folder, OSError(errno.EROFS, f"{above} is read-only"))
        raise unusable(folder, PermissionError(errno.EACCES, "", str(above)))
    try:
        descriptor = os.open(folder / _NAME, os.O_RDONLY)
    except FileNotFoundError:
        return
    except OSError as error:
        raise unusable(folder, error) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _in_use(folder, _read(descriptor)) from None
    except OSError as error:
        if error.errno not in _NO_FLOCK:
            raise
    finally:
        os.close(descriptor)


def is_abandoned(folder: Path) -> bool:
    """Whether the run of a folder was killed: nobody holds it, and nobody has released it.

    False as well for a run of another machine. Changes nothing.
    """
    here = Holder(host=socket.gethostname(), pid=os.getpid(), started="", boot=boot_id())
    try:
        descriptor = os.open(folder / _NAME, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        holder = _read(descriptor)
    except OSError:  # a run holds it, or this file system has no locks
        return False
    finally:
        os.close(descriptor)
    return holder is not None and not holder.ended and here.shares_locks(holder)


def _flock(descriptor: int, path: Path) -> bool:
    """Lock the file; False if this file system has no locks."""
    until = time.monotonic() + _RETRY_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > until:
                raise _in_use(path.parent, _read(descriptor)) from None
            time.sleep(0.05)
        except OSError as error:
            if error.errno in _NO_FLOCK:
                return False
            raise unusable(path.parent, error) from None


def _require_silence(path: Path, holder: Holder, stale_s: float) -> None:
    """Wait until the holder's heartbeat is stale by this machine's clock; raise if it beats."""
    say(
        f"{path}: process {holder.pid} on {holder.host} did not release the folder; waiting "
        f"{stale_s:.0f} s for a heartbeat",
        error=True,
    )
    until = time.monotonic() + stale_s
    while time.monotonic() < until:
        time.sleep(min(1.0, stale_s / 10))
        descriptor = os.open(path, os.O_RDONLY)  # opened anew: NFS then asks its server
        try:
            now = _read(descriptor)
        finally:
            os.close(descriptor)
        if now is not None and now != holder:
            if now.ended:
                return
            raise _in_use(path.parent, now)


def _read(descriptor: int) -> Holder | None:
    try:
        return Holder(**json.loads(os.pread(descriptor, _SIZE, 0)))
    except (ValueError, TypeError):  # an empty file: it was made an instant ago
        return None


def _in_use(folder: Path, holder: Holder | None) -> ConfigError:
    who = (
        f"process {holder.pid} on {holder.host}, started {holder.started}"
        if holder
        else "a process that has just started"
    )
    return folder_error(
        folder,
        f"another run writes to this folder ({who})",
        f"wait for that run, stop it, or give {ANOTHER_FOLDER}",
    )


def unusable(folder: Path, error: OSError) -> ConfigError:
    """The error of a run folder that cannot be written."""
    if isinstance(error, PermissionError) and error.filename and Path(error.filename).exists():
        path = Path(error.filename)
        mode = path.stat().st_mode & 0o777
        return folder_error(
            folder,
            f"{path} belongs to {owner_of(path)} and has mode {mode:o}: this user may not write it",
            f"let {owner_of(path)} start the run, or give a folder of your own; for a folder of a "
            "group, start every run of it with umask 002",
        )
    return folder_error(
        folder,
        f"the folder cannot be written: {error.strerror or error}",
        "give a folder on a disk that can be written",
    )
