"""`python -m r3.doctor`: passes on a sound path, and says what is wrong with a broken one."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from tests.e2e import doctor_cases as cases
from tests.runs import program, torchrun
from tests.tiny import FEW_ROWS
from tests.world import run_world

pytestmark = pytest.mark.e2e

FEW = ("--data.path", FEW_ROWS)


@pytest.mark.parametrize(
    "flags",
    [
        # A filter would give most of the made-up routes to other experts, if the doctor did not
        # leave it out.
        ("--parallel.ep", "2", "--model.recompute", "full", "--replay.plausibility", "0.5"),
        pytest.param(
            ("--parallel.ep", "1", "--parallel.pp", "2", "--parallel.vpp", "2"),
            marks=pytest.mark.large,
        ),
    ],
    ids=["ep2", "pp2-vpp2"],
)
def test_sound_path_passes_and_nothing_is_written(flags: tuple[str, ...], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    done = torchrun(2, "-m", "r3.doctor", "tiny", *FEW, "--log.dir", str(folder), *flags)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "8 of 8 passed" in done.stdout
    assert "FAIL" not in done.stdout
    assert "1688 coded (token, layer) slots read back right" in done.stdout
    assert not folder.exists()


def test_broken_path_fails_with_exit_code_1(tmp_path: Path) -> None:
    driver = tmp_path / "broken.py"
    driver.write_text(
        "import sys\n"
        "from r3 import doctor\n"
        "from r3.routing.replay import Replay\n"
        "load = Replay.load\n"
        "Replay.load = lambda self, routes, *rest, **facts: load(self, routes.roll(1, 0), *rest, "
        "**facts)\n"
        "doctor.main(sys.argv[1:])\n"
    )
    done = torchrun(2, str(driver), "tiny-smoke", *FEW, "--log.dir", str(tmp_path / "run"))
    assert done.returncode == 1, done.stdout[-4000:]
    assert "FAIL  route path" in done.stdout
    assert "slots were routed elsewhere" in done.stdout
    # At once: it may be the only one that fails, and the others wait for it.
    assert "rank 1 fails route path: CheckFailed: " in done.stdout
    assert "pass  collectives" in done.stdout
    # float32: the proof of the sync replays, and sees it as well
    assert "FAILED: route path, sync" in done.stdout
    assert "skipped: needs sync" in done.stdout


def test_known_answer_test_notices_every_fault_and_only_faults() -> None:
    for found in run_world(cases.faults, 2, ep=2):
        for name in ("sound", "sound again"):
            assert "1688 coded (token, layer) slots read back right, each once" in found.pop(name)
        assert len(found) == 7
        # Caught by the checksums, before any router
        for name in ("samples swapped", "packed backwards"):
            said = found.pop(name)
            assert said.startswith("RouteError: rollout "), said
            assert "packed tokens and routes are not those that were sent" in said
        for name, said in found.items():
            assert "of 1688 (token, layer) slots were routed elsewhere" in said, f"{name}: {said}"
            assert "its routes are experts" in said
        wrong = {name: int(said.split()[1]) for name, said in found.items()}
        for name in ("rows shifted", "layers swapped", "routed live"):
            assert wrong[name] > 0.8 * 1688, f"{name}: {wrong[name]}"


def test_codes_are_recognisable() -> None:
    found = cases.codes()
    assert found["distinct"] == found["legal"] == 1.0
    for other in ("next token", "next rollout", "next layer"):
        assert found[other] == pytest.approx(1 / 28, abs=0.02)  # pairs of 8 experts


def test_fast_looks_at_the_folder_of_the_run_itself(tmp_path: Path) -> None:
    """It may be a disk of its own: here one that is read-only, below a folder that is not."""
    doctor = (sys.executable, "-m", "r3.doctor", "--fast", "tiny", "--parallel.ep", "1")
    mount = 'mount -t tmpfs -o ro none "$0" && exec "$@" --log.dir "$0"'
    done = program("unshare", "-Urm", "sh", "-c", mount, tmp_path, *doctor)
    if "unshare" in done.stderr:
        pytest.skip(done.stderr)
    assert f"FAIL  disk                rank 0 on {socket.gethostname()}: {tmp_path} " in done.stdout
    assert "cannot be written: Read-only file system" in done.stdout, done.stderr
    assert "4 of 5 passed" in done.stdout and done.returncode == 1
