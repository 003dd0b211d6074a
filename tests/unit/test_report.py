"""What `r3.report` and `r3.show` make of a run's folder: the page, worked out by hand, the text."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from r3 import assets, show
from r3.run import RunDir
from r3.tools import read_rollouts
from tests.errors import Capsys
from tests.run_folder import (
    GROUPS,
    SAMPLES,
    report_data,
    report_page,
    rollout,
    save_scores,
    write_run,
)
from tests.world import ROOT


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "first")


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A run that a test changes."""
    return write_run(tmp_path / "run")


def one_run(*words: object) -> dict[str, Any]:
    """The data of a page of one run."""
    (found,) = report_data(*words)["runs"]
    return dict(found)


def test_columns_keep_the_step_of_every_value(own: Path) -> None:
    rows = '{"step": 0, "a": 12345678.0}\n{"step": 1, "b": 0.3333333333}\n'
    (own / "metrics.jsonl").write_text(f'{rows}{{"step": 2, "a": NaN, "b": Infinity}}\n')
    expected = {"step": [0, 1, 2], "a": [12345678, None, None], "b": [None, 0.333333, None]}
    assert one_run(own)["metrics"] == expected
    (own / "metrics.jsonl").write_text("")
    assert one_run(own)["metrics"] == {}


def test_evenly_spaced_or_asked_steps_are_shown(own: Path) -> None:
    for step in (1, 10, 20, 30, 40, 50, 60, 70, 80, 90):
        for suffix in (".jsonl", ".safetensors"):
            file = own / "rollouts" / f"step_{step:06d}{suffix}"
            shutil.copy(own / "rollouts" / f"step_000003{suffix}", file)

    def shown(*words: object) -> list[int]:
        return [dump["step"] for dump in one_run(own, *words)["dumps"] if dump["kind"] == "train"]

    assert shown() == [1, 3, 20, 30, 50, 60, 80, 90], "8 of 11, the first and the last among them"
    assert shown("--steps", 3, 7) == [3]


@pytest.mark.parametrize(
    ("most", "groups"), [(1, [2]), (2 * SAMPLES + 1, [0, 2]), (100, [0, 1, 2])]
)
def test_a_limit_keeps_whole_groups(most: int, groups: list[int], run: Path) -> None:
    dump = one_run(run, "--steps", 1, "--samples", most)["dumps"][0]
    assert [row["group"] for row in dump["samples"]] == [g for g in groups for _ in range(SAMPLES)]


def test_facts_of_tokens_are_those_of_the_dump_up_to_a_limit(run: Path) -> None:
    # The first two samples have 10 and 11 tokens.
    dump = one_run(run, "--steps", 1, "--tokens", 21)["dumps"][0]
    assert ["tokens" in row for row in dump["samples"]] == [True, True] + [False] * 10
    assert (dump["total"], dump["mean"]) == (GROUPS * SAMPLES, 0.25)
    facts, expected = dump["samples"][1]["tokens"], rollout(0, 1)
    assert facts["ids"] == expected.tokens_T.tolist() and facts["sampled"] == [[6, 11]]
    # Rounded to 4 digits for the page.
    assert facts["logprobs"] == pytest.approx(expected.logprobs_T[6:].tolist(), abs=1e-4)
    assert facts.keys() == {"ids", "sampled", "logprobs"}


def test_saved_scores_become_differences_and_disagreement(own: Path) -> None:
    file = own / "rollouts" / "step_000001.safetensors"
    arrays = load_file(file)
    arrays["loss_mask"][8] = 0  # a token of the first rollout that was not sampled
    second = int(arrays["cu_rows"][1])
    arrays["routed_experts"][second + 9] = -1  # not captured
    save_file(arrays, file)
    # Row 8 of the second rollout predicted its token 9. It gets other experts in one of 4 layers.
    save_scores(own, second + 8, layers=2)
    data = one_run(own)
    dumps = {dump["step"]: dump for dump in data["dumps"][:2]}
    first, other = (dumps[1]["samples"][place]["tokens"] for place in (0, 1))
    assert first["sampled"] == [[6, 8], [9, 10]]
    # float32 rounds the sum to 1e-7 or so; the page rounds to 1e-6.
    assert other["differences"] == pytest.approx([0.5] * 5, abs=2e-6)
    assert other["disagreement"] == [0, 0, 0, 0.25, None]
    assert dumps[1]["has_differences"] and dumps[1]["has_disagreement"]
    assert not dumps[3]["has_differences"] and not dumps[3]["has_disagreement"]
    # Two choices per layer of every captured row: 12 rollouts have 10.5 rows on average.
    assert [load["layers"] for load in data["loads"]] == [[0, 1, 2, 3]] * 2
    loads = [[sum(layer) for layer in load["tokens"]] for load in data["loads"]]
    assert loads == [[2 * 125] * 4, [2 * 126] * 4]


def test_a_page_is_made_of_what_can_be_read(own: Path) -> None:
    rollouts = own / "rollouts"
    # Arrays of another step: as many rollouts with as many tokens, and other ones.
    arrays = load_file(rollouts / "step_000001.safetensors")
    arrays["tokens"] = arrays["tokens"][::-1].copy()
    save_file(arrays, rollouts / "step_000003.safetensors")
    (rollouts / "step_000001.safetensors").write_bytes(b"torn")
    (own / "eval" / "step_000000.jsonl").write_text("{")
    data = one_run(own)
    shown = [(dump["kind"], dump["step"], dump["total"]) for dump in data["dumps"]]
    assert shown == [("train", 1, 12), ("train", 3, 12), ("eval", 3, 3)]
    assert not any("tokens" in row for dump in data["dumps"] for row in dump["samples"])
    said = "\n".join(data["notes"])
    for part in (
        "step_000001.safetensors cannot be read",
        "the arrays of step 3 are left out: its tokens are not those of row 1",
        "step_000000.jsonl in eval/: line 1 cannot be read, and no other has a sample",
    ):
        assert part in said
    with pytest.raises(ValueError, match="tokens are not those of row 1"):
        read_rollouts(rollouts / "step_000003.jsonl")


def test_arrays_of_fewer_rollouts_are_left_out(own: Path) -> None:
    dump = RunDir(own).rollouts(1)
    lines = dump.read_text().splitlines()
    dump.write_text("\n".join([*lines, lines[0]]))
    said = "it has the arrays of 12 rollouts, and there are 13 rows"
    assert said in " ".join(one_run(own)["notes"])


def test_the_data_of_two_runs_is_complete(run: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "first", replay="off")
    data = report_data(run, other)
    first, second = data["runs"]
    # Equal names are told apart by their paths.
    assert [first["name"], second["name"]] == [str(run), str(other)]
    assert data["differing"] == ["replay.mode", "log.dir"]
    assert first["metrics"]["mismatch/k3"] == [None, 0.1, 0.01, 0.001]
    assert [(dump["kind"], dump["step"]) for dump in first["dumps"]] == [
        *(("train", 1), ("train", 3), ("eval", 0), ("eval", 3))
    ]
    tokens = load_file(run / "rollouts" / "step_000001.safetensors")["tokens"]
    assert set(first["vocabulary"]) == set(map(str, tokens.tolist()))
    assert "replay.mode" in second["changed"] and "replay.mode" not in first["changed"]
    assert data["users"] == ["env/tool_calls"]
    assert data["glossary"]["env/tool_calls"].startswith("mean of what your environment reports")
    assert data["glossary"]["mismatch/k3"].startswith("mean(e^D - D - 1)")


def test_changed_settings_are_those_that_the_run_wrote(own: Path) -> None:
    assert one_run(own)["base"] == ""
    RunDir(own).overrides.write_text("# comment\nbase: tiny\ntrain:\n  lr: 0.1\n")
    data = one_run(own)
    assert (data["base"], data["changed"]) == ("tiny", ["train.lr"])


def test_without_the_model_the_export_has_the_tokenizer(own: Path, tmp_path: Path) -> None:
    config = RunDir(own).config
    config.write_text(config.read_text().replace(str(assets.TINY_MOE), str(tmp_path / "gone")))
    bare = one_run(own)
    assert bare["vocabulary"] == {} and "tokens are shown by their numbers" in bare["notes"][0]
    shutil.copytree(assets.TINY_MOE, RunDir(own).hf(3))
    exported = one_run(own)
    assert exported["vocabulary"] and exported["notes"] == []


def test_the_page_has_a_dark_half_of_every_colour() -> None:
    """Colours stand in the two lists alone; those that are drawn on white keep their own white."""
    styles = (ROOT / "r3/tools/report/assets/report.css").read_text()
    light, _, styles = styles.removeprefix(":root {").partition("\n}\n")
    dark, _, rest = styles.partition("\n  }\n}\n")
    assert dark.strip().startswith("@media (prefers-color-scheme: dark) {\n  :root {")
    colours = [re.findall(r"(--[a-z]+): (#[0-9a-f]+);", half) for half in (light, dark)]
    assert [name for name, _ in colours[0]] == [name for name, _ in colours[1]]
    assert not {*colours[0]} & {*colours[1]}
    assert re.findall(r"[a-z.]+ span\.s \{[^}]*\}", rest) and "overflow-x: auto" in rest
    others = {"#d9a032", "#1c2128", "#fff", "#9db8d9", "#8cc2a0", "#c9a5d6", "#e2c47c"}
    assert {*re.findall(r"#[0-9a-f]{3,6}\b", rest)} <= others


def test_a_page_keeps_texts_in_its_data_and_refers_to_nothing_outside(tmp_path: Path) -> None:
    text = "</script><script>alert(1)</script> <!-- \u2028"
    run = write_run(tmp_path / "run", text=text)
    page = report_page(run)
    assert "alert(1)" in page and "</script><script>alert" not in page
    samples = one_run(run)["dumps"][0]["samples"]
    assert samples[0]["messages"][-1]["content"] == text
    page = report_page(write_run(tmp_path / "plain"))
    assert not re.findall(r"""(?:src|href)\s*=\s*["'](?!#|data:)[^"']*""", page)
    assert "@import" not in page and "url(" not in page and "fetch(" not in page


# --- r3.show ---------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("by_call", "mean"),
    [(False, "9 samples, mean reward 0.333"), (True, "12 samples, mean reward 0.250")],
)
def test_an_episode_of_two_sequences_counts_as_in_the_metrics(
    by_call: bool, mean: str, run: Path, capsys: Capsys
) -> None:
    """Once, unless its calls are rewarded."""
    dump = RunDir(run).rollouts(3)
    rows = [json.loads(line) | {"own_reward": by_call} for line in dump.read_text().splitlines()]
    rows = [
        {**row, "sample_index": 0, "sequence": 1} if row["sample_index"] == 1 else row
        for row in rows
    ]
    dump.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert mean in shown(capsys, run)
    (dump,) = [
        each for each in one_run(run)["dumps"] if (each["kind"], each["step"]) == ("train", 3)
    ]
    assert f"{dump['mean']:.3f}" == mean[-5:]
    assert sum("uncounted" in sample for sample in dump["samples"]) == (0 if by_call else 3)


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


def test_what_cannot_be_read_is_noted_and_the_rest_shown(own: Path, capsys: Capsys) -> None:
    lines = (own / "metrics.jsonl").read_text().splitlines()
    lines[1:1] = ["{torn", '{"reward/mean": 1}', '{"step": 2, "reward/mean": 9, "policy": "high"}']
    lines += [lines[-2], '{"step": 4, "rew']  # step 2 for the third time, and a torn end
    (own / "metrics.jsonl").write_text("\n".join(lines))
    (own / "config.yaml").write_text("train: [")
    data = one_run(own)
    assert data["metrics"]["step"] == [0, 1, 2, 3] and data["settings"] == {}
    assert data["metrics"]["reward/mean"][2] == 0.45, "the last row of a step counts"
    yaml, *notes = data["notes"]
    assert yaml.startswith("config.yaml cannot be read: it is not YAML")
    assert notes[:3] == [
        "metrics.jsonl: lines 2, 3, 9 cannot be read (torn?): left out",
        "metrics.jsonl: step 2 more than once: the last row counts",
        "metrics.jsonl: 1 values are no numbers, such as policy of step 2",
    ]

    dump = own / "rollouts" / "step_000003.jsonl"
    first, second, third, fourth, *others = dump.read_text().splitlines()
    texts = [json.dumps(json.loads(second) | {"reward": "good"}), "{torn"]
    for line, name in ((third, "group"), (fourth, "messages"), (second, "sample_index")):
        texts.append(json.dumps({k: v for k, v in json.loads(line).items() if k != name}))
    dump.write_text("\n".join([*texts, first, *others]))
    (own / "rollouts" / "step_000009.copy.jsonl").write_text("")
    out = " ".join(shown(capsys, own, "--step", 3).split())
    assert "step_000003.jsonl in rollouts/: lines 1, 2, 3, 4, 5 cannot be read: left out" in out
    assert "9 samples" in out
    dump.write_text("{torn")
    assert "line 1 cannot be read, and no other has a sample" in refused(capsys, own, "--step", 3)


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
