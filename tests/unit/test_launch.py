"""The logic of launch/slurm.sbatch: real bash, with small programs in the place of Slurm and r3."""

import os
import re
import shutil
import signal
import socket
import subprocess
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from r3.cli.parse import parse
from tests.errors import Patch
from tests.runs import program
from tests.world import ROOT

_PROGRAMS = {
    "srun": 'echo "srun $*"; while [[ $1 == -* ]]; do shift; done; exec "$@"\n',
    "scontrol": 'case $1 in show) echo node1;; *) echo "requeued $2"; exit $REFUSED;; esac\n',
    "r3": (
        'case "$*" in *--check*)\n'
        ' echo "check $* on $LOCAL_WORLD_SIZE"; sleep $CHECK_S; exit $CHECK;;\n'
        ' *r3.doctor*) echo "health $*"; sleep $CHECK_S; exit $HEALTH;; esac\n'
        "trap 'echo stopped; exit 75' USR1 TERM\n"
        'echo "ranks $*"\necho "folder $R3_LOG_DIR"\necho "threads $OMP_NUM_THREADS"\n'
        "for i in $(seq $TENTHS); do sleep 0.1; done; exit $CODE\n"
    ),
}


def programs(folder: Path, texts: dict[str, str]) -> str:
    """Write shell programs into a folder; returns a PATH that finds them first."""
    for name, text in texts.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (folder / name).chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def local(
    folder: Path, texts: dict[str, str], *words: str, **variables: str
) -> CompletedProcess[str]:
    """Run launch/local.sh with these programs; `r3` stands for Python."""
    own = {"PATH": programs(folder, texts), "PYTHON": str(folder / "r3")}
    return program(ROOT / "launch/local.sh", "tiny", *words, env=own | variables)


def submit(
    folder: Path, *, usr1_after: str = "", sends: signal.Signals = signal.SIGUSR1, **variables: str
) -> tuple[int, str]:
    """Run the script until it ends; returns exit code and output.

    Args:
        usr1_after: send a signal to the script when a line begins so.
        sends: the signal.
        variables: set in the environment.
    """
    path = programs(folder, _PROGRAMS)
    slurm = {"SLURM_SUBMIT_DIR": str(folder), "SLURM_JOB_ID": "77", "SLURM_JOB_NUM_NODES": "1"}
    slurm |= {"SLURM_JOB_NODELIST": "node1", "SLURM_GPUS_ON_NODE": "8"}
    stubs = {"REFUSED": "0", "CHECK": "0", "CHECK_S": "0", "HEALTH": "0", "CODE": "0"}
    stubs["TENTHS"] = "20" if usr1_after else "1"  # of a second that the ranks run
    own = {"PATH": path, "PYTHON": str(folder / "r3")}
    process = subprocess.Popen(
        # As Slurm starts it, also where nohup runs the tests.
        ["env", "--default-signal=HUP", "bash", ROOT / "launch" / "slurm.sbatch", "tiny"],
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
            process.send_signal(sends)
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
    assert "\nfolder runs/slurm-77\n" in said


@pytest.mark.parametrize("gpus", ["", "0", "all"])
def test_job_without_gpus_says_so(gpus: str, tmp_path: Path) -> None:
    code, said = submit(tmp_path, SLURM_GPUS_ON_NODE=gpus)
    assert code == 2 and f"no GPUs in this job ({gpus or 'none'})" in said


@pytest.mark.parametrize("ranks", ["0", "two", "-1"])
def test_a_number_of_ranks_that_is_none_is_said(ranks: str, tmp_path: Path) -> None:
    done = local(tmp_path, {"r3": ""}, NPROC=ranks)
    told = f"r3: NPROC={ranks} must be the number of ranks, at least 1\n"
    assert (done.returncode, done.stderr) == (2, told)


@pytest.mark.parametrize("count", ["two", "-1"])
def test_a_number_of_restarts_that_is_none_is_said(count: str, tmp_path: Path) -> None:
    done = local(tmp_path, {"r3": ""}, MAX_RESTARTS=count)
    told = f"r3: MAX_RESTARTS={count} must be a number, 0 or more\n"
    assert (done.returncode, done.stderr) == (2, told)


@pytest.mark.parametrize(
    "words", ["--plan-for 8x80", "--plan-for=8x80", "--models", "--check", "--device-gib=80"]
)
def test_what_needs_no_ranks_starts_none(words: str, tmp_path: Path) -> None:
    done = local(tmp_path, {"r3": '[ "$1" = -c ] || echo "$*"'}, *words.split())
    assert done.stdout == f"{ROOT}/train.py tiny {words}\n"


def test_a_rank_that_another_program_left_makes_no_check_silent() -> None:
    for words in (["--no.such", "1"], ["--check", "--no.such", "1"]):
        done = program(ROOT / "launch/local.sh", "tiny", *words, env={"RANK": "1"})
        assert done.returncode == 2 and "no.such" in done.stderr


def test_the_folder_of_a_yaml_file_counts_before_that_of_the_job(
    monkeypatch: Patch, tmp_path: Path
) -> None:
    """Else each job of a chain begins a run of its own at step 0."""
    monkeypatch.setenv("R3_LOG_DIR", "runs/slurm-77")
    (tmp_path / "own.yaml").write_text("base: tiny-smoke\nlog: {dir: runs/mine}\n")
    words = [str(tmp_path / "own.yaml"), "--parallel.ep", "1"]
    assert parse(words).config.log.dir == "runs/mine"
    assert parse([*words, "--log.dir", "runs/flag"]).config.log.dir == "runs/flag"
    assert parse(["tiny-smoke", *words[1:]]).config.log.dir == "runs/slurm-77"


def test_one_node_needs_no_name_and_several_take_a_free_port(tmp_path: Path) -> None:
    code, said = submit(tmp_path)
    assert code == 0 and " --standalone train.py tiny\n" in said and "rdzv" not in said
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", 20077))
        taken.listen()
        code, said = submit(tmp_path, SLURM_JOB_NUM_NODES="2", R3_HEALTH="0")
    assert code == 0 and re.search(r" --rdzv_endpoint node1:2007[89] --rdzv_id 77-0-run ", said)


def test_a_job_without_python_says_what_to_do(tmp_path: Path) -> None:
    code, said = submit(tmp_path, PYTHON=str(tmp_path / "absent"))
    assert code == 2 and "absent: submit from the root of the checkout, run 'make setup'" in said


@pytest.mark.parametrize("kind", ["absent", "broken"])
def test_local_sh_names_the_python_that_it_takes(kind: str, tmp_path: Path) -> None:
    root = tmp_path / "clone"
    (root / "launch").mkdir(parents=True)
    shutil.copy(ROOT / "launch/local.sh", root / "launch")
    if kind == "broken":  # its interpreter was removed, as after an upgrade of the system
        (root / ".venv/bin").mkdir(parents=True)
        (root / ".venv/bin/python").symlink_to(tmp_path / "gone")

    def run(python3: str) -> CompletedProcess[str]:
        return subprocess.run(
            [root / "launch/local.sh", "--help"],
            env={"PATH": programs(tmp_path, {"python3": python3})},
            capture_output=True,
            text=True,
        )

    done = run('[ "$1" != -c ] || exit 1')  # it has no torch
    first, second = done.stderr.splitlines()
    assert done.returncode == 2 and f"{root}/.venv has no Python that runs; 'make setup'" in first
    assert second.startswith(f"r3: {tmp_path}/python3 has no torch")
    done = run('[ "$1" = -c ] || echo "$*"')
    assert done.stdout == f"{root}/train.py --help\n"
    assert f"; taking {tmp_path}/python3" in done.stderr


@pytest.mark.parametrize(("cores", "threads"), [("64", 8), ("8", 1), ("4", 1)])
def test_ranks_of_a_node_share_its_cores(cores: str, threads: int, tmp_path: Path) -> None:
    code, said = submit(tmp_path, SLURM_CPUS_ON_NODE=cores, OMP_NUM_THREADS="")
    assert code == 0
    assert f"\nthreads {threads}\n" in said


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


def test_closed_terminal_stops_the_ranks_and_requeues_nothing(tmp_path: Path) -> None:
    code, said = submit(tmp_path, usr1_after="ranks", sends=signal.SIGHUP)
    assert code == 75 and "stopped\n" in said and "requeued" not in said


def test_job_that_slurm_does_not_requeue_ends_with_75(tmp_path: Path) -> None:
    code, said = submit(tmp_path, usr1_after="ranks", REFUSED="1")
    assert code == 75 and "submit it again with the same --log.dir" in said
    assert "stopped\n" in said


@pytest.mark.parametrize(
    ("cores", "own", "threads"), [(16, "", 4), (3, "", 1), (16, "7", 7)], ids=["16", "3", "set"]
)
def test_ranks_of_a_gpu_machine_share_its_cores(
    cores: int, own: str, threads: int, tmp_path: Path
) -> None:
    # Torch sees four GPUs; other calls say what they would run on.
    cases = f'-c*) echo 4;; *limits.py) echo {cores};; *) echo "$* on $OMP_NUM_THREADS";;'
    texts = {"nvidia-smi": "", "r3": f'case "$*" in {cases} esac'}
    (ranks,) = local(tmp_path, texts, OMP_NUM_THREADS=own).stdout.splitlines()
    # Checked first, and not forked: CUDA does not survive that.
    assert "/launch/ranks.py --check --standalone --nproc_per_node 4 " in ranks
    assert ranks.endswith(f" on {threads}")
