"""The logic of launch/slurm.sbatch: real bash, with small programs in the place of Slurm and r3."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.world import ROOT

pytestmark = pytest.mark.unit

_PROGRAMS = {
    "srun": 'echo "srun $*"; while [[ $1 == -* ]]; do shift; done; exec "$@"\n',
    "scontrol": 'case $1 in show) echo node1;; *) echo "requeued $2"; exit $REFUSED;; esac\n',
    "r3": (
        'case "$*" in *--check*)\n'
        ' echo "check $* on $LOCAL_WORLD_SIZE"; sleep $CHECK_S; exit $CHECK;;\n'
        ' *r3.doctor*) echo "health $*"; sleep $CHECK_S; exit $HEALTH;; esac\n'
        "trap 'echo stopped; exit 75' USR1\n"
        'echo "ranks $*"\nfor i in $(seq 20); do sleep 0.1; done; exit $CODE\n'
    ),
}


def submit(folder: Path, *, usr1_after: str = "", **variables: str) -> tuple[int, str]:
    """Run the script until it ends; returns exit code and output.

    Args:
        usr1_after: send USR1 to the script when a line begins so.
        variables: set in the environment.
    """
    for name, text in _PROGRAMS.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{text}")
        (folder / name).chmod(0o755)
    slurm = {
        "SLURM_SUBMIT_DIR": str(folder),
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_JOB_NODELIST": "node1",
        "SLURM_GPUS_ON_NODE": "8",
    }
    stubs = {"REFUSED": "0", "CHECK": "0", "CHECK_S": "0", "HEALTH": "0", "CODE": "0"}
    own = {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHON": str(folder / "r3")}
    process = subprocess.Popen(
        ["bash", ROOT / "launch" / "slurm.sbatch", "tiny"],
        env=os.environ | slurm | stubs | own | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if usr1_after and line.startswith(usr1_after):
            process.send_signal(signal.SIGUSR1)
    return process.wait(), said


@pytest.mark.parametrize(
    ("variables", "gpus"),
    [
        ({"SLURM_GPUS_PER_NODE": "a100:4"}, 4),  # --exclusive: SLURM_GPUS_ON_NODE has them all
        ({"SLURM_GPUS_PER_NODE": "2"}, 2),
        ({}, 8),
        ({"SLURM_GPUS_PER_NODE": "0", "GPUS_PER_NODE": "3"}, 3),  # a site without GRES
    ],
)
def test_ranks_are_the_gpus_that_were_asked_for(
    variables: dict[str, str], gpus: int, tmp_path: Path
) -> None:
    code, said = submit(tmp_path, **variables)
    assert code == 0
    assert f"--check --world-size {gpus} on {gpus}\n" in said
    assert f"--nproc_per_node {gpus} " in said
    assert "--log.dir runs/slurm-77" in said


def test_job_without_gpus_says_so(tmp_path: Path) -> None:
    code, said = submit(tmp_path, SLURM_GPUS_ON_NODE="")
    assert code == 2 and "no GPUs in this job" in said


def test_mistakes_and_errors_are_not_requeued(tmp_path: Path) -> None:
    code, said = submit(tmp_path, CHECK="2")
    assert code == 2 and "ranks" not in said and "requeued" not in said
    code, said = submit(tmp_path, CODE="3")
    assert code == 3 and "requeued" not in said


def test_unhealthy_machines_end_the_job_before_the_ranks(tmp_path: Path) -> None:
    code, said = submit(tmp_path, HEALTH="1")
    assert code == 1 and "\nhealth " in said and "\nranks" not in said and "requeued" not in said
    code, said = submit(tmp_path, HEALTH="1", R3_HEALTH="0")
    assert code == 0 and "\nhealth " not in said and "\nranks" in said


def test_site_file_and_container_hold_every_program(tmp_path: Path) -> None:
    site = tmp_path / "site.sh"
    site.write_text("echo site file\nexport SITE=1\n")
    flags = "--container-image=r3.sqsh --container-mounts=/data:/data"
    code, said = submit(tmp_path, R3_SITE=str(site), R3_SRUN=flags)
    assert code == 0 and said.startswith("site file\n")
    started = [line for line in said.splitlines() if line.startswith("srun ")]
    assert len(started) == 3 and all(flags in line for line in started), said
    code, said = submit(tmp_path, R3_SITE=str(tmp_path / "absent.sh"))
    assert code == 1 and "absent.sh" in said and "srun" not in said


@pytest.mark.parametrize(
    ("moment", "stops"), [("ranks", True), ("check", False), ("health", False)]
)
def test_time_limit_stops_the_ranks_then_requeues(moment: str, stops: bool, tmp_path: Path) -> None:
    code, said = submit(tmp_path, usr1_after=moment, CHECK_S="1")
    assert code == 0 and said.endswith("requeued 77\n")
    assert ("stopped\n" in said) is stops


def test_job_that_slurm_does_not_requeue_ends_with_75(tmp_path: Path) -> None:
    code, said = submit(tmp_path, usr1_after="ranks", REFUSED="1")
    assert code == 75 and "submit it again with the same --log.dir" in said
    assert "stopped\n" in said


def test_first_gpu_run_says_that_there_is_no_gpu(tmp_path: Path) -> None:
    done = subprocess.run(
        ["benchmarks/gpu.sh", str(tmp_path / "out")],
        cwd=ROOT,
        env=os.environ | {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (3, "")
    assert done.stdout == "no GPU: torch finds no CUDA device (nothing was run)\n"
    assert not (tmp_path / "out").exists()
