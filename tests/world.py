"""Runs a function on every rank of a real process group (gloo, one process a rank), bounded in
time.

A case is a module-level function `case(device, **arguments)` in a module under `tests`. It returns
JSON values or frozen dataclasses of them; `run_world` returns the ranks' results in order, as the
types that the case is annotated with. Processes that outlive the limit are killed with everything
they started, and their output is shown.

Importing torch, Megatron and vLLM takes a process 5 to 8 s. So rank n of every world is forked
from a process that has imported them and done nothing else; each n has its own such process, so
that ranks differ in the order of their sets as they do in a run.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import traceback
import types
from collections.abc import Callable
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar, Union, get_args, get_origin, get_type_hints

ROOT = Path(__file__).resolve().parent.parent
QUIET_THREADS = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "0",
    "KMP_BLOCKTIME": "0",
    "PYTHONPATH": str(ROOT),
}
# The processes that fork ranks ask whether there is a GPU. By default torch asks CUDA, which no
# fork of the process can use then; with this variable it asks the driver's library.
FORKS_CAN_USE_CUDA = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}

T = TypeVar("T")


def plain(value: Any) -> Any:
    """Make JSON values of dataclasses, at any depth."""
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    return [plain(entry) for entry in value] if isinstance(value, list | tuple) else value


def restored(kind: Any, value: Any) -> Any:
    """Make the dataclasses of a type from JSON values; other types are left as JSON has them."""
    arguments = get_args(kind)
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        return kind(**{name: restored(hints[name], entry) for name, entry in value.items()})
    if get_origin(kind) is list:
        return [restored(arguments[0], entry) for entry in value]
    if get_origin(kind) is dict:
        return {key: restored(arguments[1], entry) for key, entry in value.items()}
    if get_origin(kind) in (Union, types.UnionType) and value is not None:
        return restored(next(one for one in arguments if one is not type(None)), value)
    return value


def ranks_read_each_other() -> bool:
    """Whether the system lets ranks of these tests, which have different parents, read each other's
    memory."""
    yama = Path("/proc/sys/kernel/yama/ptrace_scope")
    return not yama.exists() or yama.read_text().strip() == "0"


class Rank:
    """One rank of a world, forked from the process that is kept for its number."""

    _origins: ClassVar[dict[int, subprocess.Popen[bytes]]] = {}

    def __init__(self, rank: int, job: dict[str, Any]) -> None:
        origin = self._origins.get(rank)
        if origin is None or origin.poll() is not None:
            origin = subprocess.Popen(
                [sys.executable, "-m", "tests.world"],
                cwd=ROOT,
                env=os.environ | QUIET_THREADS | FORKS_CAN_USE_CUDA,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,  # what is read ahead, `select` does not see
                start_new_session=True,
            )
            self._origins[rank] = origin
        self._origin = origin
        self._write(json.dumps(job))
        self.pid = int(self._read())

    def wait(self, timeout_s: float) -> int | None:
        """Exit code of the rank; None if it has not ended by then."""
        assert self._origin.stdout is not None
        ready, _, _ = select.select([self._origin.stdout], [], [], timeout_s)
        return int(self._read()) if ready else None

    def kill(self) -> None:
        """Kill the rank and what it has started."""
        os.killpg(self.pid, signal.SIGKILL)
        self._read()

    def _write(self, line: str) -> None:
        assert self._origin.stdin is not None
        self._origin.stdin.write(f"{line}\n".encode())

    def _read(self) -> str:
        assert self._origin.stdout is not None
        line = self._origin.stdout.readline().decode()
        assert line, "the process that forks the ranks has ended"
        return line


def run_world(
    case: Callable[..., T], world_size: int, *, timeout_s: float = 240.0, **arguments: Any
) -> list[T]:
    """Run `case` on `world_size` ranks and return what each returned; fails with the ranks' output
    when one fails.
    """
    from r3.runtime.device import free_port

    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / f"rank_{rank}.out" for rank in range(world_size)]
        results = [Path(folder) / f"rank_{rank}.json" for rank in range(world_size)]
        environment = os.environ | {
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
        job = {"case": f"{case.__module__}:{case.__name__}", "arguments": arguments}
        waiting = {
            rank: Rank(
                rank,
                job
                | {
                    "environment": environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                    "output": str(outputs[rank]),
                    "result": str(results[rank]),
                },
            )
            for rank in range(world_size)
        }
        failed = None
        try:
            for rank in range(world_size):
                code = waiting[rank].wait(timeout_s)
                if code is None:
                    failed = failed or f"not done after {timeout_s:.0f} s"
                    break
                del waiting[rank]
                if code != 0 and failed is None:
                    failed = f"rank {rank} ended with {code}"
                    timeout_s = 5.0  # the others wait for it in vain
        finally:
            for process in waiting.values():
                process.kill()
        if failed is not None:
            shown = "\n".join(
                f"--- rank {rank}\n{output.read_text()[-4000:]}"
                for rank, output in enumerate(outputs)
            )
            raise AssertionError(f"{case.__name__} on {world_size} ranks: {failed}\n{shown}")
        kind = get_type_hints(case)["return"]
        return [restored(kind, json.loads(result.read_text())) for result in results]


def _run_rank(job: dict[str, Any], origin: int) -> None:
    """Be the rank of a job; never returns."""
    code = 1
    try:
        os.setsid()
        with open(job["output"], "w") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        import torch

        from r3.runtime.device import init_device
        from r3.runtime.process import die_with_parent

        die_with_parent(origin)
        os.environ.clear()
        os.environ.update(job["environment"] | QUIET_THREADS)
        device = init_device(timeout_s=120.0)
        # A rank that ends at once would take the store away from one that is still joining.
        torch.distributed.barrier()
        module, name = job["case"].split(":")
        result = getattr(importlib.import_module(module), name)(device, **job["arguments"])
        Path(job["result"]).write_text(json.dumps(plain(result)))
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # engines leave threads and handles behind that a normal exit would wait for


def _serve_jobs() -> None:
    """Fork a rank for every line of the standard input; print its process id, then its exit
    code.
    """
    from r3.runtime.device import has_gpu, prepare_environment
    from r3.runtime.process import die_with_parent

    die_with_parent(os.getppid())
    prepare_environment()  # vLLM reads some of it when it is imported
    if not has_gpu():
        import r3.run.build  # noqa: F401
    for line in sys.stdin:
        job = json.loads(line)
        if job["case"].startswith("tests.e2e.") and not has_gpu():
            from vllm import LLM  # noqa: F401
        origin = os.getpid()
        pid = os.fork()
        if pid == 0:
            _run_rank(job, origin)
        print(pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    _serve_jobs()
