"""Stand-ins for the interpreter that start programs with everything imported.

Imports are most of a start of R3, and tests make many starts. A stand-in asks a process that has
imported what a program imports, and has done nothing else, to fork the program. It does so for
scripts and modules; text after `-c`, and words with flags of Python, go to the real interpreter.
Without a GPU only: CUDA does not survive a fork.

A variable `PLACE` lets a program run in the namespaces of another process, which the process that
forks it has not; a variable `PID_FILE` names a file that gets its process id, for its signals.
"""

import ctypes
import errno
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

_ROOT = Path(__file__).resolve().parent.parent
RUNS = "tests.warm:preload"
PLACE = "R3_TESTS_PLACE"
"""A process id and the kinds of its namespaces, in the order in which they are entered:
12:net,uts,mnt."""
PID_FILE = "R3_TESTS_PID_FILE"
# What else ranks import that train the shipped model and save it.
_OF_THE_SHIPPED_MODEL = (
    "megatron.core.dist_checkpointing.strategies.torch",
    "transformers.models.qwen3_moe.configuration_qwen3_moe",
    "vllm.model_executor.models.qwen3_moe",
)
_SHEBANG = """\
#!{python} -IS
import sys

sys.path.insert(0, {root!r})
from tests.warm import stand_in

stand_in({python!r}, {address!r})
"""


def write_stand_in(path: Path, prepare: str = RUNS) -> None:
    """Write the program. The process that it talks to lives as long as this one.

    Args:
        path: where to.
        prepare: what that process calls first, as "module:function".
    """
    text = _SHEBANG.format(python=sys.executable, root=str(_ROOT), address=address(prepare, 0))
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)


def interpreter(prepare: str = RUNS) -> str:
    """A stand-in that lives as long as this process; with a GPU, the interpreter itself."""
    from r3.runtime.device import has_gpu

    if has_gpu():
        return sys.executable
    path = Path(_folder().name) / prepare
    if not path.exists():
        write_stand_in(path, prepare)
    return str(path)


@cache
def _folder() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="r3-tests-")


def ask(
    address: str,
    words: list[str],
    *,
    environment: Mapping[str, str],
    folder: str,
    executable: str,
    descriptors: Sequence[int] = (0, 1, 2),
) -> socket.socket:
    """Let a process fork a program.

    Args:
        address: of the process's socket.
        words: a script or `-m` and a module, and its words.
        environment, folder, executable: of the program.
        descriptors: its standard streams.

    Returns:
        A connection that gives the exit code in a line. When it is closed, the program ends.
    """
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    job = {"words": words, "environment": dict(environment), "folder": folder}
    socket.send_fds(connection, [b"r"], descriptors)
    connection.sendall(json.dumps(job | {"executable": executable}).encode() + b"\n")
    return connection


@cache
def address(prepare: str, number: int) -> str:
    """Start a process that forks, if none has this name yet; returns the name of its socket.

    It serves all processes of a run of tests, and ends with the one that started them.

    Args:
        prepare: what it calls first, as "module:function".
        number: another number is another process, which orders its sets in another way.
    """
    owner = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
    name = f"\0r3-tests-{owner}-{prepare}-{number}"  # Linux: no file
    words = [sys.executable, "-m", "tests.warm", name[1:], prepare, str(owner)]
    # One thread, as in all programs that tests start. Torch reads TORCHDYNAMO_DISABLE when it is
    # imported, and the cases of CUDA run without.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(_ROOT)}
    # The process asks whether there is a GPU. By default torch asks CUDA, which no fork of it can
    # use then; with this variable it asks the driver's library.
    environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    environment.pop("TORCHDYNAMO_DISABLE", None)
    process = subprocess.Popen(
        words, cwd=_ROOT, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    with process.stdout as output:
        assert "listening\n" in output, f"{words} has ended"
    return name


# --- in the place of the interpreter ------------------------------------------------------------


def stand_in(python: str, address: str) -> NoReturn:
    """Run this process's words as `python` would, with its exit code."""
    words = sys.argv[1:]
    if words[:1] == ["-u"]:  # as torchrun starts ranks; forks write through anyway
        words = words[1:]
    if not (words[:1] == ["-m"] or (words and words[0].endswith(".py"))):
        os.execv(python, [python, *sys.argv[1:]])
    here = {"environment": os.environ, "folder": os.getcwd(), "executable": sys.argv[0]}
    with ask(address, words, **here) as connection:
        code = int(connection.makefile().readline())
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


def preload() -> None:
    """Import what runs need, and read the rows that they read."""
    from r3.runtime import importing
    from tests import forked_ranks

    forked_ranks.preload()
    for name in _OF_THE_SHIPPED_MODEL:
        importlib.import_module(name)
    with importing():
        from tests import shipped_rows

        shipped_rows.keep()


# --- the process that forks ---------------------------------------------------------------------


def _serve(name: str, prepare: str, owner: int) -> None:
    """Prepare, then fork a process for every connection, until the owner has ended."""
    ended = os.pidfd_open(owner)
    with socket.socket(socket.AF_UNIX) as server:
        try:
            server.bind(f"\0{name}")
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            print("listening", flush=True)  # another process does, or will when it is prepared
            return
        server.listen()
        module, function = prepare.split(":")
        getattr(importlib.import_module(module), function)()
        gc.freeze()  # or every collection in a fork would copy the pages of all that is imported
        print("listening", flush=True)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the processes below
        while ended not in select.select([server, ended], [], [])[0]:
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
        if torch := sys.modules.get("torch"):
            # The first call after a fork makes torch's pool of threads anew. Two threads that make
            # it together meet a pool that is not there ("Invalid thread pool").
            torch.set_num_threads(torch.get_num_threads())
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
    from tests.forked_ranks import run_program

    pid_file = job["environment"].pop(PID_FILE, "")  # programs that this one starts have others

    def begin() -> None:
        os.setsid()
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
            os.close(descriptor)
        if place := job["environment"].get(PLACE):
            _enter(place)
        if pid_file:
            Path(pid_file).write_text(f"{os.getpid()}\n")
        _read_again(job["environment"])
        os.chdir(job["folder"])
        sys.executable = job["executable"]
        is_module = job["words"][0] == "-m"
        sys.path[0] = job["folder"] if is_module else str(Path(job["words"][0]).resolve().parent)

    run_program(job["words"], job["environment"], begin)


def _read_again(environment: Mapping[str, str]) -> None:
    """Set what huggingface_hub reads from the environment when it is imported."""
    from huggingface_hub import constants

    if address := environment.get("HF_ENDPOINT"):
        constants.ENDPOINT = address
        file = "/{repo_id}/resolve/{revision}/{filename}"
        constants.HUGGINGFACE_CO_URL_TEMPLATE = address + file
    if folder := environment.get("HF_HUB_CACHE"):
        constants.HF_HUB_CACHE = folder


def _enter(place: str) -> None:
    """Enter namespaces of another process. Fails without the right to."""
    pid, _, kinds = place.partition(":")
    libc = ctypes.CDLL(None, use_errno=True)
    descriptors = [os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY) for kind in kinds.split(",")]
    for descriptor in descriptors:
        if libc.setns(descriptor, 0):
            number = ctypes.get_errno()
            raise OSError(number, f"{place} not entered: {os.strerror(number)}")
        os.close(descriptor)


if __name__ == "__main__":
    _serve(*sys.argv[1:3], int(sys.argv[3]))
