"""Runs a function on every rank of a real process group (gloo, one process a rank), bounded in
time.

A case is a module-level function `case(device, **arguments)` in a module under `tests`. It returns
JSON values or frozen dataclasses of them; `run_world` returns the ranks' results in order, as the
types that the case is annotated with. Processes that outlive the limit are killed with everything
they started, and their output is shown.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
import types
from collections.abc import Callable
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

ROOT = Path(__file__).resolve().parent.parent


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
        port = str(free_port())
        processes = []
        for rank in range(world_size):
            environment = os.environ | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "OMP_NUM_THREADS": "1",
                "OMP_WAIT_POLICY": "PASSIVE",
                "GOMP_SPINCOUNT": "0",
                "KMP_BLOCKTIME": "0",
                "PYTHONPATH": str(ROOT),
            }
            command = [
                sys.executable,
                "-m",
                "tests.world",
                f"{case.__module__}:{case.__name__}",
                json.dumps(arguments),
                str(results[rank]),
            ]
            with outputs[rank].open("w") as out:
                processes.append(
                    subprocess.Popen(
                        command,
                        cwd=ROOT,
                        env=environment,
                        stdout=out,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        failed = None
        try:
            for rank, process in enumerate(processes):
                if process.wait(timeout=timeout_s) != 0 and failed is None:
                    failed = f"rank {rank} ended with {process.returncode}"
                    timeout_s = 5.0  # the others wait for it in vain
        except subprocess.TimeoutExpired:
            failed = failed or f"not done after {timeout_s:.0f} s"
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        if failed is not None:
            shown = "\n".join(
                f"--- rank {rank}\n{output.read_text()[-4000:]}"
                for rank, output in enumerate(outputs)
            )
            raise AssertionError(f"{case.__name__} on {world_size} ranks: {failed}\n{shown}")
        kind = get_type_hints(case)["return"]
        return [restored(kind, json.loads(result.read_text())) for result in results]


def _main() -> None:
    module, name = sys.argv[1].split(":")
    from r3.runtime.device import init_device

    code = 1
    try:
        device = init_device(timeout_s=120.0)
        case = getattr(importlib.import_module(module), name)
        result = case(device, **json.loads(sys.argv[2]))
        Path(sys.argv[3]).write_text(json.dumps(plain(result)))
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # engines leave threads and handles behind that a normal exit would wait for


if __name__ == "__main__":
    _main()
