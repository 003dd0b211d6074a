"""What `r3.show` prints and refuses, from the folder of a run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from r3 import show
from r3.run.folder import RunDir
from r3.tools.view.runs import ViewError, differing_settings, read_run
from r3.tools.view.samples import sample_of, tool_calls_text
from r3.tools.view.terminal import facts
from tests.run_folder import GROUPS, SAMPLES, write_run

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "first")


def shown(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    show.main([*map(str, words), "--width", "100"])
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    with pytest.raises(SystemExit) as ended:
        show.main([*map(str, words)])
    assert ended.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1, captured
    return captured.err


def test_newest_dump_is_shown_with_best_and_worst(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = shown(capsys, run)
    assert "step 3" in out and "12 samples, mean reward 0.250" in out
    assert out.count("reward 1 ") == 3 and out.count("reward 0 ") == 3
    assert "advantage +1.500" in out and "finish length" in out


def test_best_and_worst_are_by_reward_and_keep_the_order_of_the_dump(run: Path) -> None:
    words = show.parse([str(run), "--step", "1", "--best", "2", "--worst", "2"])
    _, parts = show.chosen(words, [])
    best, worst = ([(each.group, each.sample_index) for each in part] for _, part in parts)
    assert (best, worst) == ([(0, 3), (1, 3)], [(0, 0), (0, 1)])


def test_counts_choose_what_is_shown(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, run, "--step", 1, "--worst", 2)
    assert "highest rewards" not in out and out.count("reward 0 ") == 2


def test_group_is_found_by_number_and_by_prompt(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    by_number = shown(capsys, run, "--group", 1)
    by_name = shown(capsys, run, "--group", "rows.jsonl:2")
    assert by_number.count("rows.jsonl:2  sample") == SAMPLES
    assert by_number.splitlines()[4:] == by_name.splitlines()[4:]


def test_evaluation_shows_the_reference(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, run, "--eval", "--step", 0, "--best", 1)
    assert "heldout: 3 samples" in out and "reference\n  #### 1" in out and "advantage" not in out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--step", "2"], "--step 2: no dump of rollouts at this step; steps with one: 1, 3"),
        (
            ["--eval", "--step", "1"],
            "--step 1: no dump of evaluation at this step; steps with one: 0, 3",
        ),
        (
            ["--group", "9"],
            "--group 9: no such prompt in this dump. Give a group number from 0 to 2",
        ),
        (["--eval", "--set", "math"], "--set math: no such set at step 3; it has heldout"),
        (["--best", "-1"], "--best -1: must be >= 0"),
    ],
)
def test_what_is_not_there_is_one_line(
    words: list[str], expected: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert expected in refused(capsys, run, *words)


def test_a_folder_that_is_no_run_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "no such folder" in refused(capsys, tmp_path / "absent")
    assert f"r3.show: {tmp_path}: no dump of rollouts. Only" in refused(capsys, tmp_path)
    with pytest.raises(ViewError, match=r"no config\.yaml in this folder"):
        read_run(tmp_path)


def test_torn_metrics_are_noted(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 4, "rew')
    facts = read_run(run)
    assert [row["step"] for row in facts.rows] == [0, 1, 2, 3]
    assert any("torn" in note for note in facts.notes)


def test_what_cannot_be_read_is_noted_and_the_rest_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    lines[1:1] = ["{torn", '{"reward/mean": 1}', '{"step": 2, "reward/mean": 9, "policy": "high"}']
    lines.append(lines[-2])  # step 2 for the third time
    (run / "metrics.jsonl").write_text("\n".join(lines))
    (run / "config.yaml").write_text("train: [")
    facts = read_run(run)
    assert [row["step"] for row in facts.rows] == [0, 1, 2, 3]
    assert facts.rows[2]["reward/mean"] == 0.45, "the last row of a step counts"
    assert facts.settings == {} and facts.steps == 0
    yaml, *notes = facts.notes
    assert yaml.startswith("config.yaml cannot be read: it is not YAML")
    assert notes == [
        "metrics.jsonl: lines 2, 3 cannot be read (torn?): left out",
        "metrics.jsonl: step 2 more than once: the last row counts",
        "metrics.jsonl: 1 values are no numbers, such as policy of step 2",
    ]

    dump = run / "rollouts" / "step_000003.jsonl"
    first, second, *others = dump.read_text().splitlines()
    texts = [json.dumps(json.loads(second) | {"reward": "good"}), "{torn", first]
    dump.write_text("\n".join([*texts, *others]))
    (run / "rollouts" / "step_000009.copy.jsonl").write_text("")
    out = shown(capsys, run, "--step", 3)
    assert "step_000003.jsonl in rollouts/: lines 1, 2 cannot be read: left out" in out
    assert "11 samples" in " ".join(out.split())
    dump.write_text("{torn")
    assert "line 1 cannot be read, and no other has a sample" in refused(capsys, run, "--step", 3)


def test_equal_rewards_are_one_list_and_no_sample_is_shown_twice(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = shown(capsys, run, "--best", 8, "--worst", 8)
    assert out.count("  sample ") == GROUPS * SAMPLES
    equal = write_run(tmp_path / "equal")
    dump = RunDir(equal).rollouts(3)
    rows = [json.loads(line) | {"reward": 1.0} for line in dump.read_text().splitlines()]
    dump.write_text("\n".join(map(json.dumps, rows)))
    out = shown(capsys, equal)
    assert "all rewards are equal" in out and "lowest rewards" not in out
    assert len(set(re.findall(r"rows\.jsonl:\d  sample \d", out))) == 6


def test_settings_that_differ_are_found_by_name(tmp_path: Path) -> None:
    first, second = (read_run(write_run(tmp_path / mode, replay=mode)) for mode in ("r3", "off"))
    assert differing_settings([first.settings, second.settings]) == ["replay.mode", "log.dir"]
    assert differing_settings([first.settings, first.settings]) == []
    assert differing_settings([{"a.b": "1"}, {}]) == ["a.b"]


def test_alien_rows_are_refused() -> None:
    row = {"prompt_id": "p", "group": 2, "sample_index": 1, "reward": 1.0, "advantage": 0.5}
    row |= {"messages": [], "finish_reason": "stop", "response_tokens": 3}
    assert sample_of(0, row).group == 2
    for name in ("group", "sample_index", "messages"):
        with pytest.raises(LookupError):
            sample_of(0, {key: value for key, value in row.items() if key != name})


def test_a_reward_that_was_lowered_before_training_shows_both() -> None:
    row: dict[str, object] = {"prompt_id": "a:1", "group": 0, "sample_index": 0, "messages": []}
    row |= {"reward": 1.0, "advantage": 0.5, "finish_reason": "stop", "response_tokens": 3}
    assert "reward 1  shaped 0.75  advantage +0.500" in facts(
        sample_of(0, row | {"shaped_reward": 0.75})
    )
    assert "shaped" not in facts(sample_of(0, row | {"shaped_reward": 1.0}))
    assert "shaped" not in facts(sample_of(0, row))


def test_structured_tool_calls_are_one_line_each() -> None:
    call = {"type": "function", "function": {"name": "calc", "arguments": '{"expression": "1+2"}'}}
    assert tool_calls_text({"role": "assistant", "content": "", "tool_calls": [call]}) == [
        'calc({"expression": "1+2"})'
    ]
