"""Stand-ins for the interpreter that start programs with everything imported.

Imports are most of a start of R3, and tests make many starts. A stand-in asks a process that has
imported what a program imports, and has done nothing else, to fork the program. Programs that it
does not know run in the real interpreter. Without a GPU only: CUDA does not survive a fork.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

_ROOT = Path(__file__).resolve().parent.parent
_PROGRAMS = {
    "r3.run.forked_ranks:preload": ("ranks.py", "train.py"),
    "tests.fake_cuda:preload": ("tests.fake_cuda",),
}
"""Scripts and modules that are forked from a process that has called a function."""
_RUNS = "r3.run.forked_ranks:preload"
_SHEBANG = """\
#!{python} -IS
import sys

sys.path.insert(0, {root!r})
from tests.warm import stand_in

stand_in({python!r}, {address!r}, {programs!r})
"""


def write_stand_in(path: Path, prepare: str = _RUNS) -> None:
    """Write the program. The process that it talks to lives as long as this one.

    Args:
        path: where to.
        prepare: what that process calls first, a key of `_PROGRAMS`.
    """
    text = _SHEBANG.format(
        python=sys.executable,
        root=str(_ROOT),
        address=_address(prepare),
        programs=_PROGRAMS[prepare],
    )
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)


def interpreter(prepare: str = _RUNS) -> str:
    """A stand-in that lives as long as this process."""
    path = Path(_folder().name) / prepare
    if not path.exists():
        write_stand_in(path, prepare)
    return str(path)


@cache
def _folder() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="r3-tests-")


@cache
def _address(prepare: str) -> str:
    """Start the process that forks; returns the name of its socket."""
    name = f"\0r3-tests-{os.getpid()}-{prepare}"  # Linux: no file
    words = [sys.executable, "-m", "tests.warm", name[1:], prepare]
    # One thread, as in all programs that tests start. Torch reads TORCHDYNAMO_DISABLE when it is
    # imported, and the cases of CUDA run without.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(_ROOT)}
    environment.pop("TORCHDYNAMO_DISABLE", None)
    process = subprocess.Popen(
        words,
        cwd=_ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    with process.stdout as output:
        assert output.readline() == "listening\n", f"{words} has ended"
    return name


# --- in the place of the interpreter ------------------------------------------------------------


def stand_in(python: str, address: str, programs: tuple[str, ...]) -> NoReturn:
    """Run this process's words as `python` would, with its exit code."""
    words = sys.argv[1:]
    program = words[1:2] if words[:1] == ["-m"] else [Path(word).name for word in words[:1]]
    if not program or program[0] not in programs:
        os.execv(python, [python, *words])
    job = {"words": words, "environment": dict(os.environ), "folder": os.getcwd()}
    job["executable"] = sys.argv[0]
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        socket.send_fds(connection, [b"r"], [0, 1, 2])
        connection.sendall(json.dumps(job).encode() + b"\n")
        code = int(connection.makefile().readline())
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


# --- the process that forks ---------------------------------------------------------------------


def _serve(name: str, prepare: str) -> None:
    """Import, then fork a process for every connection."""
    from r3.runtime.process import die_with_parent

    die_with_parent(os.getppid())
    module, function = prepare.split(":")
    getattr(importlib.import_module(module), function)()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"\0{name}")
        server.listen()
        print("listening", flush=True)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the processes below
        while True:
            connection, _ = server.accept()
            if not os.fork():
                server.close()
                _run_for(connection)
            connection.close()


def _run_for(connection: socket.socket) -> NoReturn:
    """Run the program of a connection in another process; send its exit code, and end."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, descriptors, _, _ = socket.recv_fds(connection, 1, 3)
    job = json.loads(connection.makefile().readline())
    pid = os.fork()
    if not pid:
        connection.close()
        _be(job, descriptors)
    # Readable: the program has ended, or its stand-in has.
    ready, _, _ = select.select([ended := os.pidfd_open(pid), connection], [], [])
    if ended not in ready:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    with suppress(BrokenPipeError):
        connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
    os._exit(0)


def _be(job: dict[str, Any], descriptors: list[int]) -> NoReturn:
    """Be the program of a job."""
    from r3.run.forked_ranks import run_program

    def begin() -> None:
        os.setsid()
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.chdir(job["folder"])
        sys.executable = job["executable"]
        is_module = job["words"][0] == "-m"
        sys.path[0] = job["folder"] if is_module else str(Path(job["words"][0]).resolve().parent)

    run_program(job["words"], job["environment"], begin)


if __name__ == "__main__":
    _serve(*sys.argv[1:])
