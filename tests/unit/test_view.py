"""What `r3.show` prints and refuses, and what is read of a run's folder."""

import json
import re
from pathlib import Path

import pytest

from r3 import show
from r3.run import RunDir
from tests.errors import Capsys
from tests.run_folder import GROUPS, SAMPLES, report_data, write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "first")


def shown(capsys: Capsys, *words: object) -> str:
    show.main([*map(str, words), "--width", "100"])
    return capsys.readouterr().out


def refused(capsys: Capsys, *words: object) -> str:
    with pytest.raises(SystemExit) as ended:
        show.main([*map(str, words)])
    assert ended.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1, captured
    return captured.err


def test_newest_dump_is_shown_with_best_and_worst(run: Path, capsys: Capsys) -> None:
    out = shown(capsys, run)
    assert "step 3" in out and "12 samples, mean reward 0.250" in out
    assert out.count("reward 1 ") == 3 and out.count("reward 0 ") == 3
    assert "advantage +1.500" in out and "finish length" in out
    out = shown(capsys, run, "--step", 1, "--worst", 2)
    assert "highest rewards" not in out and out.count("reward 0 ") == 2


def test_best_and_worst_are_by_reward_and_keep_the_order_of_the_dump(run: Path) -> None:
    words = show.parse([str(run), "--step", "1", "--best", "2", "--worst", "2"])
    _, parts = show.chosen(words, [])
    best, worst = ([(each.group, each.sample_index) for each in part] for _, part in parts)
    assert (best, worst) == ([(0, 3), (1, 3)], [(0, 0), (0, 1)])


def test_group_is_found_by_number_and_by_prompt(run: Path, capsys: Capsys) -> None:
    by_number = shown(capsys, run, "--group", 1)
    by_name = shown(capsys, run, "--group", "rows.jsonl:2")
    assert by_number.count("rows.jsonl:2  sample") == SAMPLES
    assert by_number.splitlines()[4:] == by_name.splitlines()[4:]
    assert 'calc({"expression": "1+2"})' in by_number, "a structured call is a line"


def test_evaluation_shows_the_reference(run: Path, capsys: Capsys) -> None:
    out = shown(capsys, run, "--eval", "--step", 0, "--best", 1)
    assert "heldout: 3 samples" in out and "reference\n  #### 1" in out and "advantage" not in out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--step", "2"], "no dump of rollouts at this step; steps with one: 1, 3"),
        (["--eval", "--step", "1"], "no dump of evaluation at this step; steps with one: 0, 3"),
        (["--group", "9"], "no such prompt in this dump. Give a group number from 0 to 2"),
        (["--eval", "--set", "math"], "no such set at step 3; it has heldout"),
        (["--best", "-1"], "must be >= 0"),
    ],
)
def test_what_is_not_there_is_one_line(
    words: list[str], expected: str, run: Path, capsys: Capsys
) -> None:
    assert f"{' '.join(words[-2:])}: {expected}" in refused(capsys, run, *words)


def test_a_folder_that_is_no_run_is_one_line(tmp_path: Path, capsys: Capsys) -> None:
    assert "no such folder" in refused(capsys, tmp_path / "absent")
    assert f"r3.show: {tmp_path}: no dump of rollouts. Only" in refused(capsys, tmp_path)


def test_what_cannot_be_read_is_noted_and_the_rest_shown(tmp_path: Path, capsys: Capsys) -> None:
    run = write_run(tmp_path / "run")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    lines[1:1] = ["{torn", '{"reward/mean": 1}', '{"step": 2, "reward/mean": 9, "policy": "high"}']
    lines += [lines[-2], '{"step": 4, "rew']  # step 2 for the third time, and a torn end
    (run / "metrics.jsonl").write_text("\n".join(lines))
    (run / "config.yaml").write_text("train: [")
    (data,) = report_data(run)["runs"]
    assert data["metrics"]["step"] == [0, 1, 2, 3] and data["settings"] == {}
    assert data["metrics"]["reward/mean"][2] == 0.45, "the last row of a step counts"
    yaml, *notes = data["notes"]
    assert yaml.startswith("config.yaml cannot be read: it is not YAML")
    assert notes[:3] == [
        "metrics.jsonl: lines 2, 3, 9 cannot be read (torn?): left out",
        "metrics.jsonl: step 2 more than once: the last row counts",
        "metrics.jsonl: 1 values are no numbers, such as policy of step 2",
    ]

    dump = run / "rollouts" / "step_000003.jsonl"
    first, second, third, fourth, *others = dump.read_text().splitlines()
    texts = [json.dumps(json.loads(second) | {"reward": "good"}), "{torn"]
    for line, name in ((third, "group"), (fourth, "messages"), (second, "sample_index")):
        texts.append(json.dumps({k: v for k, v in json.loads(line).items() if k != name}))
    dump.write_text("\n".join([*texts, first, *others]))
    (run / "rollouts" / "step_000009.copy.jsonl").write_text("")
    out = " ".join(shown(capsys, run, "--step", 3).split())
    assert "step_000003.jsonl in rollouts/: lines 1, 2, 3, 4, 5 cannot be read: left out" in out
    assert "9 samples" in out
    dump.write_text("{torn")
    assert "line 1 cannot be read, and no other has a sample" in refused(capsys, run, "--step", 3)


def test_equal_rewards_are_one_list_and_no_sample_is_shown_twice(
    run: Path, tmp_path: Path, capsys: Capsys
) -> None:
    out = shown(capsys, run, "--best", 8, "--worst", 8)
    assert out.count("  sample ") == GROUPS * SAMPLES and "shaped" not in out
    equal = write_run(tmp_path / "equal")
    dump = RunDir(equal).rollouts(3)
    # Lowered before training.
    rows = [json.loads(line) | {"reward": 1.0, "shaped_reward": 0.75} for line in dump.open()]
    dump.write_text("\n".join(map(json.dumps, rows)))
    out = shown(capsys, equal)
    assert "all rewards are equal" in out and "lowest rewards" not in out
    assert len(set(re.findall(r"rows\.jsonl:\d  sample \d", out))) == 6
    assert "shaped 0.75" in out
