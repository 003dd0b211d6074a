"""What `r3.watch` shows of a run, from its files."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from r3 import watch
from r3.config import from_yaml, to_yaml, with_values
from r3.run import RunDir, write_json
from tests.errors import Capsys
from tests.run_folder import write_run
from tests.runs import program

LOW = "\u2581"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run after the first of the two steps that its config asks for."""
    return write_run(tmp_path / "run", steps=1)


def shown(capsys: Capsys, run: Path) -> str:
    watch.main([str(run), "--once"])
    return capsys.readouterr().out


def beat(run: Path, rank: int, phase: str, *, age_s: float = 0.0, silent_s: float = 0.0) -> None:
    state = {"rank": rank, "phase": phase, "phases": 1, "silent_s": silent_s, "host": "here"}
    state |= {"written_at": time.time() - age_s, "pid": 1}
    write_json(RunDir(run).heartbeat(rank), state)


def change(run: Path, **values: object) -> None:
    """Change settings of `train` and `checkpoint` that the run wrote."""
    file = RunDir(run).config
    names = {name.replace("_", ".", 1): value for name, value in values.items()}
    file.write_text(to_yaml(with_values(from_yaml(file.read_text()), names)))


def test_a_console_of_ascii_shows_the_run(tmp_path: Path) -> None:
    """Curves and models' texts become escapes; the command does not fail on them."""
    run = write_run(tmp_path / "run", steps=1, text="3 + 4 = 7 日本 é")
    for module, words in (("watch", ["--once"]), ("show", ["--best", "1", "--worst", "0"])):
        command = (sys.executable, "-m", f"r3.{module}", run, *words)
        said = program(*command, env={"PYTHONIOENCODING": "ascii"})
        assert said.returncode == 0, said.stderr
        assert (r"\u2581" if module == "watch" else r"\u65e5\u672c \xe9") in said.stdout


def test_curves_have_gaps_and_the_time_left_is_of_the_newest_steps(
    run: Path, capsys: Capsys
) -> None:
    (run / "metrics.jsonl").unlink()
    change(run, train_steps=45)
    for step in range(36):
        row = {"step": step, "time/step_s": 7.5 if step > 25 else 100.0, "policy/entropy": 2.0}
        reward = {34: {}, 33: {"reward/mean": 1.0}, 35: {"reward/mean": 0.5}}
        row |= reward.get(step, {"reward/mean": 9.0 if step < 4 else 0.0})
        evaluated = {"time/step_s": 40.0, "time/evaluate_s": 32.5} if step == 35 else {}
        RunDir(run).append_metrics(row | evaluated)
    out = shown(capsys, run)
    assert f"{29 * LOW}\u2588 \u2585\n" in out, "the newest 32, a gap among them"
    assert f"entropy  2.000  {32 * LOW}" in out
    assert "about 75s left" in out, "ten steps as long as the newest ten, without evaluations"


def test_screen_has_progress_figures_and_phases(run: Path, capsys: Capsys) -> None:
    beat(run, 0, "generate")
    beat(run, 1, "train")
    out = shown(capsys, run)
    assert "step 1/2" in out and "about 2s left" in out
    assert "heldout accuracy" in out and "1.0e-01" in out
    assert "generate: rank 0" in out and "train: rank 1" in out


def test_figures_of_the_same_tokens_stand_together(run: Path, capsys: Capsys) -> None:
    """k3 of all tokens is no partner of the live k3, which is of a sample of them."""
    rows = {"mismatch/k3": 3e-5, "mismatch/k3_replay": 1e-5, "mismatch/k3_live": 2e-5}
    RunDir(run).append_metrics({"step": 2, "loss/nll": 1.7927, "loss/kl_teacher": 0.25} | rows)
    said = [line.split("  ") for line in shown(capsys, run).splitlines()]
    figures = [[word.strip() for word in words if word][:2] for words in said]
    at = figures.index(["mismatch k3", "3.0e-05"])
    assert figures[at + 1 : at + 3] == [
        ["sampled, replayed", "1.0e-05"],
        ["the same, live", "2.0e-05"],
    ]
    assert ["supervised loss", "1.7927"] in figures and ["KL to teacher", "2.50e-01"] in figures


def test_a_finished_run_without_heartbeats_is_no_fault(tmp_path: Path, capsys: Capsys) -> None:
    """A run of a few seconds writes none, and those of one that ended long ago are old."""
    run = write_run(tmp_path / "run", steps=2)
    out = shown(capsys, run)
    assert "finished" in out and "no heartbeats" not in out
    beat(run, 0, "train", age_s=240.0)
    assert "finished" in shown(capsys, run)


def test_silence_is_said(run: Path, capsys: Capsys) -> None:
    assert "no heartbeats" in shown(capsys, run)
    beat(run, 0, "train", silent_s=240.0)
    beat(run, 1, "train")
    assert "rank 0 made no progress for 4m" in shown(capsys, run)
    for rank in (0, 1):
        beat(run, rank, "train", age_s=240.0)
    out = shown(capsys, run)
    assert "all ranks silent for 4m: the run was stopped, or hangs" in out and "left" not in out


HOLD = """
import sys, time
from pathlib import Path
from r3.run.lock import hold
lock = hold(Path(sys.argv[1]))
if sys.argv[2] == "release": lock.release()
print("held", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("word", ["hold", "release"])
def test_a_killed_run_is_not_shown_as_alive(word: str, run: Path, capsys: Capsys) -> None:
    beat(run, 0, "train")  # a moment ago
    command = [sys.executable, "-c", HOLD, str(run), word]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        out = shown(capsys, run)
        assert "about 2s left" in out and "train: rank 0" in out and "was killed" not in out
        process.kill()
    out = shown(capsys, run)
    assert ("the run was killed" in out) == (word == "hold"), "a run that released it was not"
    assert ("left" in out) == ("train: rank 0" in out) == (word == "release")


def test_the_end_of_a_run_is_said(run: Path, capsys: Capsys) -> None:
    beat(run, 0, "train")
    (run / "errors").mkdir()
    RunDir(run).first_failure.write_text("\nRewardError on rank 0: broken\n  more\n")
    out = " ".join(shown(capsys, run).split())
    assert "failed: RewardError on rank 0: broken" in out and "see errors/" in out
    assert "left" not in out and "train: rank 0" not in out
    RunDir(run).stopped.write_text("stopped by SIGINT after step 1\n")
    watch.main([str(run)])  # ends by itself
    assert "stopped by SIGINT after step 1" in capsys.readouterr().out


def test_an_early_end_is_said_and_ends_the_watch(tmp_path: Path, capsys: Capsys) -> None:
    run = write_run(tmp_path / "run", steps=3)  # evaluated before and after: 0.25 and 0.85
    beat(run, 0, "train")
    change(run, checkpoint_keep_best="eval/heldout/accuracy", checkpoint_best_is="lowest")
    change(run, train_steps=9, train_patience=1)
    watch.main([str(run)])  # ends by itself
    out = " ".join(capsys.readouterr().out.split())
    assert "stopped after step 3: eval/heldout/accuracy was best after step 0 (0.25)" in out
    assert "left" not in out and "train: rank 0" not in out


def test_files_that_cannot_be_read_are_named(run: Path, capsys: Capsys) -> None:
    beat(run, 0, "train")
    for number, content in enumerate(("[]", '{"rank": "one"}', "{"), 1):
        (run / "heartbeats" / f"rank_{number:05d}.json").write_text(content)
    (run / "config.yaml").write_text("train: {steps: many}")
    out = shown(capsys, run)
    assert out.count("in heartbeats/ cannot be read: left out") == 3
    assert "step 1/?" in out and "train: rank 0" in out


def test_it_follows_a_run_to_its_end(run: Path) -> None:
    command = [sys.executable, "-m", "r3.watch", str(run), "--every", "0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watching:
        RunDir(run).append_metrics({"step": 2, "reward/mean": 0.5})
        out, _ = watching.communicate(timeout=60)
    assert watching.returncode == 0 and "step 2/2" in out and "finished" in out


@pytest.mark.parametrize(
    ("words", "expected"),
    [(["--every", "0"], "--every 0: must be > 0"), ([], "no config.yaml in this folder")],
)
def test_mistakes_are_one_line(
    words: list[str], expected: str, tmp_path: Path, capsys: Capsys
) -> None:
    with pytest.raises(SystemExit) as ended:
        watch.main([str(tmp_path), *words])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert expected in error and error.count("\n") == 1
