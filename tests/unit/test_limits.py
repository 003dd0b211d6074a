"""Limits of a job: the files of control groups as Linux, Docker and Slurm write them."""

import os
import re
import sys
from pathlib import Path

import pytest

from r3.runtime import host_gib, host_processors, openmp_threads
from tests.runs import program

_MIB = 2**20
_UNLIMITED = "9223372036854771712"  # memory.limit_in_bytes of version 1


def version_1(quota: str, limit: str, *, cpu: str = "cpu", group: str = "") -> dict[str, str]:
    """The files of a group of processes, as version 1 has them."""
    return {
        f"{cpu}{group}/cpu.cfs_quota_us": quota,
        f"{cpu}{group}/cpu.cfs_period_us": "100000",
        f"memory{group}/memory.limit_in_bytes": limit,
    }


_CASES = {
    "version 2, the group of a container is its root": (
        "0::/",
        {"cpu.max": "50000 100000", "memory.max": str(64 * _MIB)},
        (0.5, 64),
    ),
    "version 2, a Slurm step below its job, which has the limit": (
        "0::/system.slice/slurmstepd.scope/job_7/step_0/user",
        {
            "system.slice/slurmstepd.scope/job_7/memory.max": str(32 * _MIB),
            "system.slice/slurmstepd.scope/job_7/step_0/memory.max": "max",
            "system.slice/slurmstepd.scope/job_7/cpu.max": "max 100000",
            "system.slice/slurmstepd.scope/job_7/step_0/user/cpu.max": "25000 100000",
            "system.slice/slurmstepd.scope/job_8/memory.max": str(_MIB),
        },
        (0.25, 32),
    ),
    "version 1, Slurm": (
        "12:cpu,cpuacct:/slurm/uid_0/job_7\n5:memory:/slurm/uid_0/job_7\n1:name=systemd:/x",
        version_1("20000", str(16 * _MIB), cpu="cpu,cpuacct", group="/slurm/uid_0/job_7")
        | {"memory/memory.limit_in_bytes": _UNLIMITED},
        (0.2, 16),
    ),
    "version 1, docker --cpus 0.5: the path outside, the files at the root": (
        "4:cpu,cpuacct:/docker/4f\n3:memory:/docker/4f\n0::/docker/4f",
        version_1("50000", str(8 * _MIB)),
        (0.5, 8),
    ),
    "version 1 without limits": ("4:cpu:/\n3:memory:/", version_1("-1", _UNLIMITED), None),
    "no control groups": (None, {}, None),
}


@pytest.mark.parametrize(("own", "files", "expected"), _CASES.values(), ids=_CASES)
def test_limits_of_the_job_count(
    own: str | None, files: dict[str, str], expected: tuple[float, float] | None, tmp_path: Path
) -> None:
    texts = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    if own is not None:
        texts["proc/self/cgroup"] = own
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / _MIB
    processors, mib = expected or (len(os.sched_getaffinity(0)), machine)
    assert (host_processors(tmp_path), host_gib(tmp_path) * 1024) == (processors, mib)


@pytest.mark.parametrize(
    ("value", "threads"), [("4", 4), ("8,2", 8), (" 3 ", 3), ("", 1), ("0", 1), ("-1", 1)]
)
def test_every_form_of_omp_num_threads_is_read(value: str, threads: int) -> None:
    assert openmp_threads(value) == threads


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        ("ulimit -n 64", r"ulimit -n = '64': a rank may open 64 files and needs at least 96\. Fix"),
        ("ulimit -v 1500000", r"ulimit -v = '1500000': limits the address space to 1\.43 GiB"),
        ("ulimit -Sn 64", ""),  # which is raised
        ("ulimit -n 256 -v 20000000", ""),
    ],
)
def test_limits_with_which_no_run_starts_are_refused_by_name(
    limit: str, said: str, tmp_path: Path
) -> None:
    """Else a run ends after its first step, or in SIGABRT, without the name of the limit."""
    words = ["tiny-smoke", "--parallel.ep", "1", "--log.dir", str(tmp_path / "run")]
    code = "import sys; from r3.cli.parse import parse; parse(sys.argv[1:]); print('parsed')"
    shell = ("bash", "-c", f'{limit}; exec "$@"', "bash")
    done = program(*shell, sys.executable, "-c", code, *words)
    assert (done.returncode, done.stdout) == ((2, "") if said else (0, "parsed\n")), done.stderr
    assert re.search(said, done.stderr)
