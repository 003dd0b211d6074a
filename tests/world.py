"""Runs a function on every rank of a real process group (gloo, one process a rank), bounded in
time.

A case is a module-level function `case(device, **arguments)` in a module under `tests`. It returns
JSON values or namespaces of them; `run_world` returns the ranks' results in order. A tuple
arrives as a list. Processes that outlive the limit are killed with everything they started, and
their output is shown.

Importing torch, Megatron and vLLM takes a process 5 to 8 s. So ranks are forked from processes that
have imported them and done nothing else (`tests.warm`); there are two, so that ranks differ in the
order of their sets as programs of torchrun do.
"""

import importlib
import json
import os
import select
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from tests import warm

ROOT = Path(__file__).resolve().parent.parent
QUIET_THREADS = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "0",
    "KMP_BLOCKTIME": "0",
    "PYTHONPATH": str(ROOT),
}

T = TypeVar("T")


def _told(value: Any) -> dict[str, Any]:
    """A namespace as JSON."""
    assert isinstance(value, SimpleNamespace), type(value)
    return {"namespace": vars(value)}


def _heard(value: dict[str, Any]) -> Any:
    return SimpleNamespace(**value["namespace"]) if value.keys() == {"namespace"} else value


class Rank:
    """One rank of a world, forked from one of two processes that have imported what ranks need."""

    def __init__(self, rank: int, job: Path, environment: dict[str, str], output: Path) -> None:
        from r3.runtime.device import has_gpu

        # Neighbours in a row, and in a square of four, are of different processes.
        prepare = "tests.world:nothing" if has_gpu() else warm.RUNS
        origin = warm.address(prepare, (rank ^ rank >> 1) & 1)
        with output.open("w") as file:
            self._connection = warm.ask(
                origin,
                ["-m", "tests.world", str(job)],
                environment=environment,
                folder=str(ROOT),
                executable=sys.executable,
                descriptors=(file.fileno(),) * 3,
            )

    def wait(self, timeout_s: float) -> int | None:
        """Exit code of the rank; None if it has not ended by then."""
        ready, _, _ = select.select([self._connection], [], [], timeout_s)
        return int(self._connection.makefile().readline()) if ready else None

    def end(self) -> None:
        """Kill the rank and what it has started, unless it has ended."""
        self._connection.close()


def run_world(
    case: Callable[..., T], world_size: int, *, timeout_s: float = 240.0, **arguments: Any
) -> list[T]:
    """Run `case` on `world_size` ranks and return what each returned; fails with the ranks' output
    when one fails.
    """
    (found,) = run_rows(case, world_size, [arguments], timeout_s=timeout_s)
    return found


def run_rows(
    case: Callable[..., T],
    world_size: int,
    rows: Sequence[Mapping[str, Any]],
    *,
    timeout_s: float = 240.0,
    **common: Any,
) -> list[list[T]]:
    """Run `case` with the arguments of each row, one after the other in the same processes.

    Starting a world takes longer than many cases do.

    Args:
        common: arguments of all rows.

    Returns:
        What each rank returned, by row.
    """
    from r3.runtime.device import free_port

    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / f"rank_{rank}.out" for rank in range(world_size)]
        jobs = [Path(folder) / f"rank_{rank}.json" for rank in range(world_size)]
        environment = os.environ | {
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
        name = f"{case.__module__}:{case.__name__}"
        job = json.dumps({"case": name, "rows": [common | row for row in rows]})
        waiting = {}
        for rank in range(world_size):
            jobs[rank].write_text(job)
            own = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)} | QUIET_THREADS
            waiting[rank] = Rank(rank, jobs[rank], own, outputs[rank])
        failed = None
        try:
            for rank in range(world_size):
                code = waiting[rank].wait(timeout_s)
                if code is None:
                    failed = failed or f"not done after {timeout_s:.0f} s"
                    break
                waiting.pop(rank).end()
                if code != 0 and failed is None:
                    failed = f"rank {rank} ended with {code}"
                    timeout_s = 5.0  # the others wait for it in vain
        finally:
            for process in waiting.values():
                process.end()
        if failed is not None:
            shown = "\n".join(
                f"--- rank {rank}\n{output.read_text()[-4000:]}"
                for rank, output in enumerate(outputs)
            )
            raise AssertionError(f"{case.__name__} on {world_size} ranks: {failed}\n{shown}")
        found = [json.loads(job.read_text(), object_hook=_heard) for job in jobs]
        return [list(row) for row in zip(*found, strict=True)]


def shared_worlds(
    case: Callable[..., T],
    rows: Mapping[str, Mapping[str, Any]],
    *,
    kept: Collection[str] = (),
    **common: Any,
) -> Callable[[str], list[T]]:
    """Run rows with as many ranks in one world each, when one of them is first asked for.

    Args:
        rows: name -> arguments, and `ranks`.
        kept: rows that `make test` runs too: the others have worlds of their own.
        common: arguments of all rows.

    Returns:
        What gives the result of each rank by the name of a row.
    """
    found: dict[str, list[T]] = {}
    failed: dict[tuple[int, bool], AssertionError] = {}

    def world_of(name: str) -> tuple[int, bool]:
        return rows[name]["ranks"], name in kept

    def of(name: str) -> list[T]:
        world = world_of(name)
        if world in failed:
            raise failed[world]
        if name not in found:
            together = [each for each in rows if world_of(each) == world]
            arguments = [{**rows[each]} for each in together]
            for each in arguments:
                del each["ranks"]
            try:
                results = run_rows(case, world[0], arguments, **common)
            except AssertionError as error:
                failed[world] = error
                raise
            found.update(zip(together, results, strict=True))
        return found[name]

    return of


def forget_mesh() -> None:
    """Destroy Megatron's process groups, so that `build_mesh` may be called again."""
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
        # It forgets this one, and whoever keeps a group keeps the threads and sockets of gloo.
        parallel_state._INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP = None


def _be_rank(file: Path) -> None:
    """Be the rank of a job, whose file is then that of its results."""
    import torch

    from r3.runtime.device import init_device

    device = init_device(timeout_s=120.0)
    job = json.loads(file.read_text())
    module, name = job["case"].split(":")
    case, results = getattr(importlib.import_module(module), name), []
    for number, arguments in enumerate(job["rows"]):
        if number:
            forget_mesh()
        # A rank that ends at once would take the store away from one that is still joining, and its
        # memory from one that still reads it.
        torch.distributed.barrier()
        print(f"{name} {arguments}", flush=True)
        results.append(case(device, **arguments))
    file.write_text(json.dumps(results, default=_told))


def nothing() -> None:
    """Import nothing, as CUDA does not survive a fork."""


if __name__ == "__main__":
    _be_rank(Path(sys.argv[1]))
