"""What a start needs of its machine: other ranks in reach, memory that ranks share, open files."""

from __future__ import annotations

import os
import resource
import shutil
import socket
from pathlib import Path

from r3.config import Config, ConfigError, Problem
from r3.models.shape import ModelShape
from r3.run.prepare import LaunchError
from r3.runtime.device import has_gpu
from r3.runtime.limits import too_small
from r3.runtime.process import addresses, is_leader
from r3.runtime.terminal import say


def require_place(config: Config, *, launched: bool) -> None:
    """Raise ConfigError unless the launcher has given this process what it needs.

    Args:
        launched: whether this process is to be a rank; otherwise a launcher starts them later.
    """
    if limits := too_small():
        raise LaunchError([Problem(*limit) for limit in limits])
    require_others_in_reach(launched=launched)
    require_engines_within_machines(config)


def require_others_in_reach(*, launched: bool = True) -> None:
    """Raise LaunchError if this process would wait without end for ranks that it cannot reach.

    Some clusters set RANK and WORLD_SIZE for every job, and a shell may still have them from
    another program. Without an address there is nobody to join.

    Args:
        launched: whether this process is to be a rank; otherwise a launcher starts them later.
    """
    world, rank = os.environ.get("WORLD_SIZE", "1"), os.environ.get("RANK", "0")
    has_address = all(name in os.environ for name in ("MASTER_ADDR", "MASTER_PORT"))
    problems = []
    if launched and (world, rank) != ("1", "0") and not has_address:
        rule = f"without MASTER_ADDR and MASTER_PORT, rank {rank} cannot find the other ranks"
        fix = (
            "start ranks with launch/local.sh or torchrun, which set all of them; for one rank, "
            "unset RANK, LOCAL_RANK and WORLD_SIZE"
        )
        problems.append(Problem("WORLD_SIZE", world, rule, fix))
    here = [name for _, name in socket.if_nameindex()]
    named = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if missing := [name for name in named.split(",") if name and name not in here]:
        rule = f"{socket.gethostname()} has no network interface {missing[0]}"
        fix = f"name one of {', '.join(here)}, or unset the variable"
        problems.append(Problem("GLOO_SOCKET_IFNAME", named, rule, fix))
    several = launched and world != os.environ.get("LOCAL_WORLD_SIZE", world)
    if several and has_address and not named and not _inside(os.environ["MASTER_ADDR"]):
        own = addresses(name := socket.gethostname())
        if all(map(_inside, own)):  # gloo would give it to the others as its address
            state = f"resolves to {own[0]}" if own else "does not resolve"
            rule = f"other machines cannot reach this one: its name {name} {state}"
            fix = f"name one of {', '.join(name for name in here if name != 'lo')}"
            problems.append(Problem("GLOO_SOCKET_IFNAME", named, rule, fix))
    if problems:
        raise LaunchError(problems)


def _inside(address: str) -> bool:
    """Whether an address is one that each machine has for itself."""
    return address in ("localhost", "::1") or address.startswith("127.")


def require_engines_within_machines(config: Config) -> None:
    """Raise ConfigError if an engine would have ranks on two machines, as the launcher placed them.

    The ranks of an engine share memory.
    """
    local, size = int(os.environ.get("LOCAL_WORLD_SIZE", "0")), config.parallel.engine_tp
    if local % size:
        rule = f"must divide the {local} rank(s) of a machine: an engine stays on one machine"
        fix = f"set parallel.engine_tp to {local} or a divisor of it, or start {size} ranks on each"
        raise ConfigError.of("parallel.engine_tp", size, rule, fix)


_ENOUGH_FILES = 1024
_MOST_FILES = 1 << 16  # some libraries go through all that are allowed


def raise_file_limit() -> int:
    """Let this process open as many files as the system allows it; returns how many those are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = min(hard, _MOST_FILES) if hard != resource.RLIM_INFINITY else _MOST_FILES
    if soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return max(soft, most)


def require_memory(shape: ModelShape) -> None:
    """Raise ConfigError if /dev/shm is too small for the ranks of this machine; warn of few files.

    On CPU, ranks share their weights there. A container has 64 MiB unless it is told otherwise.
    """
    files = raise_file_limit()
    if files < _ENOUGH_FILES and is_leader():
        say(
            f"warning: this process may open {files} files (ulimit -n). Connections of rewards, "
            f"environments and agents may need more: raise the hard limit to {_ENOUGH_FILES}",
            error=True,
        )
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    shared = Path("/dev/shm")
    if has_gpu() or ranks == 1 or not shared.is_dir():
        return
    needed, free = 4 * shape.num_params, shutil.disk_usage(shared).free
    if free < needed:
        rule = (
            f"{shared} has {free / 2**20:,.1f} MiB free, and {ranks} ranks share at least "
            f"{needed / 2**20:,.1f} MiB of weights there"
        )
        fix = "mount a larger one (docker run --shm-size 8g), or start one rank"
        raise ConfigError.of("parallel", f"{ranks} ranks", rule, fix)
