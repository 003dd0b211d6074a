"""launch/slurm.sbatch under a real Slurm of two nodes; a small program stands for the ranks."""

from __future__ import annotations

import re
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, cluster, missing

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.large,
    pytest.mark.skipif(bool(missing()), reason=missing()),
]

# Prints what it was called with, runs until a file `end` appears, and stops at USR1 as ranks do,
# leaving a file.
_RANKS = """#!/usr/bin/env bash
here=$(dirname "$0")
case "$*" in
  *--check*) echo "check: $*"; exit "$(cat "$here/check")";;
  *r3.doctor*) echo "health of $(hostname)"; exit 0;;
esac
trap 'touch "$here/stopped-on-$(hostname)"; exit 75' USR1
echo "ranks on $(hostname): $*"
while [ ! -e "$here/end" ]; do sleep 0.1; done
exit "$(cat "$here/end")"
"""


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Cluster]:
    program = tmp_path / "python"
    program.write_text(_RANKS)
    program.chmod(0o755)
    (tmp_path / "check").write_text("0")
    settings = {"PYTHON": str(program), "MINI_SLURMD_TIMEOUT": "6"}
    with cluster(tmp_path, settings) as made:
        yield made


def submit(slurm: Cluster, nodes: int, *more: str) -> int:
    return slurm.submit([f"--nodes={nodes}", "--gpus-per-node=2", *more], "tiny")


def end(slurm: Cluster, code: int) -> None:
    """Let all ranks end with this code."""
    (slurm.folder / "end").write_text(str(code))


def test_two_nodes_run_once_and_end(slurm: Cluster) -> None:
    job = submit(slurm, 2)
    slurm.wait_for_text(job, "ranks on n1")
    slurm.wait_for_text(job, "ranks on n2")
    end(slurm, 0)
    assert slurm.wait_for_state(job, "COMPLETED")["Restarts"] == "0"
    output = slurm.output(job)
    assert "--check --world-size 4" in output
    assert output.count("health of n") == 2
    assert output.count("--nnodes 2 --nproc_per_node 2 ") == 2
    assert output.count("--rdzv_endpoint n1:") == 2


@pytest.mark.parametrize("when", ["check", "ranks"])
def test_an_error_is_not_requeued(slurm: Cluster, when: str) -> None:
    if when == "check":
        (slurm.folder / "check").write_text("2")
    else:
        end(slurm, 3)
    facts = slurm.wait_for_state(submit(slurm, 1), "FAILED")
    assert facts["Restarts"] == "0"
    assert facts["ExitCode"] == ("2:0" if when == "check" else "3:0")


def test_the_signal_before_the_time_limit_requeues(slurm: Cluster) -> None:
    job = submit(slurm, 2)
    slurm.wait_for_text(job, "ranks on n2")
    slurm.call("run", "scancel", "--signal=USR1", "--batch", str(job))
    slurm.wait_for_text(job, "ranks on n2", count=2)
    # The first node that stops ends the others (srun --kill-on-bad-exit). Real ranks have agreed on
    # the step before, and have its checkpoint.
    assert list(slurm.folder.glob("stopped-on-n*"))  # last words may be lost with the job step
    end(slurm, 0)
    assert slurm.wait_for_state(job, "COMPLETED")["Restarts"] == "1"


def test_a_preempted_job_goes_on_later(slurm: Cluster) -> None:
    job = submit(slurm, 2)
    slurm.wait_for_text(job, "ranks on n2")
    urgent = submit(slurm, 2, "--partition=urgent")
    slurm.wait_for_text(urgent, "ranks on n2")
    assert slurm.facts(job)["JobState"] == "PENDING"
    slurm.call("run", "scancel", str(urgent))
    slurm.wait_for_text(job, "ranks on n2", count=2)
    end(slurm, 0)
    assert slurm.wait_for_state(job, "COMPLETED")["Restarts"] == "1"


def test_a_job_that_loses_a_node_is_requeued(slurm: Cluster) -> None:
    """It starts again after two minutes: until then nodes refuse its credential."""
    job = submit(slurm, 2)
    slurm.wait_for_text(job, "ranks on n2")
    slurm.call("crash", "n2")
    slurm.wait(job, "requeue", lambda facts: facts["Restarts"] == "1")
    # The controller's word: srun's own may come after the state that was just read.
    log = (slurm.folder / "log" / "slurmctld.log").read_text()
    assert f"requeue job JobId={job} due to failure of node n2" in log
    assert slurm.facts(job)["JobState"] in ("COMPLETING", "PENDING")


def test_a_cluster_that_does_not_come_up_is_tried_twice_and_leaves_nothing(tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as taken:
        settings = {"MINI_PORT": str(taken.getsockname()[1])}
        with (
            pytest.warns(UserWarning, match="the cluster is started again"),
            pytest.raises(AssertionError, match="Address already in use"),
            cluster(tmp_path, settings),
        ):
            pytest.fail("two programs listen at one port")
    assert not (tmp_path / "state").exists()
    # Another cluster may be up meanwhile, but not in the same network.
    (network,) = set(re.findall(r"ctl\((\S+)\.254\)", (tmp_path / "slurm.conf").read_text()))
    command = ["ip", "-4", "route", "show", f"{network}.0/24"]
    assert not subprocess.run(command, capture_output=True, text=True, check=True).stdout
