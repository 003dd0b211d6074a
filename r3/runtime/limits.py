"""CPUs and memory that this process may use: all of the machine, or the limit of its job.

A container, a Slurm job or a systemd unit limits its processes with control groups: version 2, or
one tree per controller in version 1. Limits of the groups above a process hold too.

    python r3/runtime/limits.py        print the number of processors: launch/local.sh
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

_GIB = 1024**3


# Two ranks on the smallest model fail with 64 files; one that maps 1.7 GiB is the smallest run.
_LEAST_FILES = 96
_LEAST_ADDRESSES_GIB = 1.6


def too_small() -> list[tuple[str, str, str, str]]:
    """The limits of this process with which no run comes to its first step: name, value, what is
    wrong, and what to do.
    """
    limits = []
    files, addresses = (
        resource.getrlimit(kind)[place]
        for kind, place in ((resource.RLIMIT_NOFILE, 1), (resource.RLIMIT_AS, 0))
    )
    if 0 <= files < _LEAST_FILES:
        rule = f"a rank may open {files} files and needs at least {_LEAST_FILES}"
        limits.append(("ulimit -n", str(files), rule, "raise the hard limit to 1024 or more"))
    if 0 <= addresses < _LEAST_ADDRESSES_GIB * _GIB:
        rule = (
            f"limits the address space to {addresses / _GIB:.2f} GiB; libraries, engine and policy "
            f"of a rank map at least {_LEAST_ADDRESSES_GIB:g} GiB"
        )
        fix = "ulimit -v unlimited; limit memory by a control group instead"
        limits.append(("ulimit -v", str(addresses // 1024), rule, fix))
    return limits


def host_gib(root: Path = Path("/")) -> float:
    """Memory in GiB of this machine, or of the job's part of it.

    Args:
        root: folder that stands for `/`, in tests.
    """
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for version, group in _groups("memory", root):
        text = _read(group / ("memory.max" if version == 2 else "memory.limit_in_bytes"))
        if text.isdecimal():  # without a limit: "max", or in version 1 more than any machine has
            limits.append(int(text))
    return min(limits) / _GIB


def host_processors(root: Path = Path("/")) -> float:
    """Number of processors that this process may use, on Linux: those of its affinity, or fewer if
    the job has a quota.

    Args:
        root: folder that stands for `/`, in tests.
    """
    limits = [float(len(os.sched_getaffinity(0)))]
    for version, group in _groups("cpu", root):
        if version == 2:
            quota, _, period = _read(group / "cpu.max").partition(" ")
        else:
            quota, period = (_read(group / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
        if quota.isdecimal() and period.isdecimal():  # without a limit: "max", or -1
            limits.append(int(quota) / int(period))
    return min(limits)


def openmp_threads(value: str) -> int:
    """Threads that OMP_NUM_THREADS asks for: the first number of a list (`8,2`); 1 if there is
    none.
    """
    first = value.split(",")[0].strip()
    return max(1, int(first)) if first.isdecimal() else 1


def _groups(controller: str, root: Path) -> Iterator[tuple[int, Path]]:
    """Version and folder of each group that holds this process, up to the root of its tree.

    A container may see its own group as the root of a tree, under the path that it has outside.
    """
    mounted = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _number, controllers, path = line.split(":", 2)
        if not controllers:
            trees = [(2, mounted), (2, mounted / "unified")]  # the latter beside version 1
        elif controller in controllers.split(","):
            trees = [(1, mounted / controller), (1, mounted / controllers)]
        else:
            continue
        for version, tree in trees:
            here = tree / path.lstrip("/")
            yield from ((version, each) for each in (here, *here.parents) if _is_in(each, tree))


def _is_in(path: Path, tree: Path) -> bool:
    return path == tree or tree in path.parents


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


if __name__ == "__main__":
    print(max(1, int(host_processors())))
