"""The data of a report, worked out by hand, and the page that holds it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from r3 import assets
from r3.cli.base_config import OVERRIDES
from r3.run.folder import RunDir
from r3.tools.dumps import read_rollouts
from r3.tools.report.page import (
    Limits,
    columns,
    dump_data,
    evenly,
    page_data,
    render,
    shown_samples,
)
from r3.tools.report.tokens import (
    disagreement,
    expert_load,
    read_arrays,
    spans,
    token_facts,
)
from r3.tools.view.runs import ViewError, read_samples
from tests.run_folder import GROUPS, SAMPLES, rollout, write_run

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "first")


def test_columns_keep_the_step_of_every_value() -> None:
    rows = [
        {"step": 0, "a": 1.0},
        {"step": 1, "b": 1 / 3},
        {"step": 2, "a": float("nan"), "b": float("inf")},
    ]
    assert columns(rows) == {"step": [0, 1, 2], "a": [1, None, None], "b": [None, 0.333333, None]}
    assert columns([]) == {}


def test_evenly_spaced_steps_hold_the_first_and_the_last() -> None:
    assert evenly([1, 10, 20, 30, 40, 50], 3) == [1, 20, 50]
    assert evenly([1, 2], 3) == [1, 2]
    assert evenly([1, 2, 3], 1) == [3]


def test_a_limit_keeps_whole_groups(run: Path) -> None:
    samples = read_samples(run, "train", 1)["train"]
    kept = shown_samples(samples, 2 * SAMPLES + 1)
    assert [each.group for each in kept] == [0] * SAMPLES + [2] * SAMPLES
    assert len(shown_samples(samples, 1)) == SAMPLES, "never less than a group"
    assert len(shown_samples(samples, 100)) == GROUPS * SAMPLES


def test_samples_beyond_the_token_limit_have_text_alone(run: Path) -> None:
    samples = read_samples(run, "train", 1)["train"]
    arrays = read_arrays(RunDir(run), 1)
    # The first two samples have 10 and 11 tokens.
    data = dump_data(
        samples, kind="train", name="train", step=1, arrays=arrays, limits=Limits(tokens=21)
    )
    assert ["tokens" in row for row in data["samples"]] == [True, True] + [False] * 10
    assert (data["total"], data["mean"]) == (12, 0.25)
    assert not data["has_differences"] and not data["has_disagreement"]


def test_facts_of_tokens_are_those_of_the_dump(run: Path) -> None:
    arrays = read_arrays(RunDir(run), 1)
    facts = token_facts(arrays, 5)
    expected = rollout(1, 1)
    assert facts["ids"] == expected.tokens_T.tolist()
    assert facts["sampled"] == [[6, 11]]
    # Rounded to 4 digits for the page.
    assert facts["logprobs"] == pytest.approx(expected.logprobs_T[6:].tolist(), abs=1e-4)
    assert facts.keys() == {"ids", "sampled", "logprobs"}


def test_saved_scores_become_differences_and_disagreement(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    arrays = read_arrays(RunDir(run), 1)
    live = arrays.routed_experts.copy()
    # Row 8 of the second rollout predicted its token 9. It gets another expert in one of 4 layers.
    row = int(arrays.cu_rows[1]) + 8
    live[row, 2, 0] = (set(range(8)) - set(live[row, 2].tolist())).pop()
    shifted = arrays.logprobs + np.float32(0.5) * (arrays.loss_mask > 0)
    save_file({"logprobs_replay": shifted, "routes_live": live}, RunDir(run).scores(1))
    facts = token_facts(read_arrays(RunDir(run), 1), 1)
    # float32 rounds the sum to 1e-7 or so; the page rounds to 1e-6.
    assert facts["differences"] == pytest.approx([0.5] * 5, abs=2e-6)
    assert facts["disagreement"] == [0, 0, 0, 0.25, 0]
    dumps = {dump["step"]: dump for dump in page_data([run], Limits())["runs"][0]["dumps"][:2]}
    assert dumps[1]["has_differences"] and dumps[1]["has_disagreement"]
    assert not dumps[3]["has_differences"] and not dumps[3]["has_disagreement"]


def test_a_page_is_made_of_what_can_be_read(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    rollouts = run / "rollouts"
    # Arrays of another step: as many rollouts with as many tokens, and other ones.
    arrays = load_file(rollouts / "step_000001.safetensors")
    arrays["tokens"] = arrays["tokens"][::-1].copy()
    save_file(arrays, rollouts / "step_000003.safetensors")
    (rollouts / "step_000001.safetensors").write_bytes(b"torn")
    (run / "eval" / "step_000000.jsonl").write_text("{")
    (run / "metrics.jsonl").write_text('{"step": 1, "reward/mean": "high"}\n{\n{"step": 2}')
    (run / "config.yaml").write_text("model: {path: [")
    data = page_data([run], Limits())["runs"][0]
    assert data["metrics"] == {"step": [1, 2]}
    shown = [(dump["kind"], dump["step"], dump["total"]) for dump in data["dumps"]]
    assert shown == [("train", 1, 12), ("train", 3, 12), ("eval", 3, 3)]
    assert not any("tokens" in row for dump in data["dumps"] for row in dump["samples"])
    said = "\n".join(data["notes"])
    for part in (
        "config.yaml cannot be read",
        "metrics.jsonl: line 2 cannot be read",
        "step_000001.safetensors cannot be read",
        "the arrays of step 3 are left out: its tokens are not those of row 1",
        "step_000000.jsonl in eval/: line 1 cannot be read, and no other has a sample",
    ):
        assert part in said
    with pytest.raises(ValueError, match="tokens are not those of row 1"):
        read_rollouts(rollouts / "step_000003.jsonl")


def test_arrays_of_fewer_rollouts_are_left_out(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    dump = RunDir(run).rollouts(1)
    lines = dump.read_text().splitlines()
    dump.write_text("\n".join([*lines, lines[0]]))
    with pytest.raises(ViewError, match="the arrays of 12 rollouts, and there are 13 rows"):
        read_arrays(RunDir(run), 1)
    rows = [json.loads(line) for line in lines]
    dump.write_text("\n".join(json.dumps(row | {"checksum": None}) for row in rows))
    with pytest.raises(ViewError, match="of row 1"):
        read_arrays(RunDir(run), 1)


def test_spans_are_half_open() -> None:
    assert spans([False, True, True, False, True]) == [[1, 3], [4, 5]]
    assert spans([False]) == [] and spans([True]) == [[0, 1]]


def test_disagreement_is_of_sets_and_unknown_where_not_captured() -> None:
    captured = np.array([[[0, 1], [2, 3]], [[0, 1], [2, 3]], [[-1, -1], [-1, -1]]])
    live = np.array([[[1, 0], [2, 3]], [[0, 2], [3, 2]], [[0, 1], [2, 3]]])
    np.testing.assert_array_equal(disagreement(captured, live), [0.0, 0.5, np.nan])


def test_expert_load_counts_captured_choices() -> None:
    routes = np.array([[[0, 1], [3, 2]], [[0, 2], [3, 2]], [[-1, -1], [-1, -1]]])
    assert expert_load(routes, 4) == [[2, 1, 1, 0], [0, 0, 2, 2]]


def test_page_data_is_complete_and_json(run: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "first", replay="off")
    data = page_data([run, other], Limits())
    first, second = data["runs"]
    assert [first["name"], second["name"]] == [str(run), str(other)], (
        "equal names are told apart by their paths"
    )
    assert data["differing"] == ["replay.mode", "log.dir"]
    assert first["metrics"]["mismatch/k3"] == [None, 0.1, 0.01, 0.001]
    assert [(dump["kind"], dump["step"]) for dump in first["dumps"]] == [
        ("train", 1),
        ("train", 3),
        ("eval", 0),
        ("eval", 3),
    ]
    assert [load["layers"] for load in first["loads"]] == [[0, 1, 2, 3]] * 2
    # Every row of the 12 rollouts has two choices per layer: 12 * 10.5 rows on average.
    assert [sum(layer) for layer in first["loads"][0]["tokens"]] == [2 * 126] * 4
    assert set(first["vocabulary"]) == {int(t) for t in read_arrays(RunDir(run), 1).tokens}
    assert "replay.mode" in second["changed"] and "replay.mode" not in first["changed"]
    assert data["users"] == ["env/tool_calls"]
    assert data["glossary"]["env/tool_calls"].startswith("mean of what your environment reports")
    assert data["glossary"]["mismatch/k3"].startswith("mean(e^D - D - 1)")
    json.dumps(data, allow_nan=False)


def test_changed_settings_are_those_that_the_run_wrote(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    assert page_data([run], Limits())["runs"][0]["base"] == ""
    assert RunDir(run).overrides.name == OVERRIDES
    RunDir(run).overrides.write_text("# comment\nbase: tiny\ntrain:\n  lr: 0.1\n")
    (data,) = page_data([run], Limits())["runs"]
    assert (data["base"], data["changed"]) == ("tiny", ["train.lr"])


def test_without_the_model_the_export_has_the_tokenizer(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    config = RunDir(run).config
    config.write_text(config.read_text().replace(str(assets.TINY_MOE), str(tmp_path / "gone")))
    (bare,) = page_data([run], Limits())["runs"]
    assert bare["vocabulary"] == {} and "tokens are shown by their numbers" in bare["notes"][0]
    shutil.copytree(assets.TINY_MOE, RunDir(run).hf(3))
    (exported,) = page_data([run], Limits())["runs"]
    assert exported["vocabulary"] and exported["notes"] == []


def test_the_page_has_a_dark_half_of_every_colour() -> None:
    """Colours stand in the two lists alone; those that are drawn on white keep their own white."""
    styles = (Path(page_data.__code__.co_filename).parent / "assets" / "report.css").read_text()
    light, _, styles = styles.removeprefix(":root {").partition("\n}\n")
    dark, _, rest = styles.partition("\n  }\n}\n")
    assert dark.strip().startswith("@media (prefers-color-scheme: dark) {\n  :root {")
    colours = [re.findall(r"(--[a-z]+): (#[0-9a-f]+);", half) for half in (light, dark)]
    assert [name for name, _ in colours[0]] == [name for name, _ in colours[1]]
    assert not {*colours[0]} & {*colours[1]}
    assert re.findall(r"[a-z.]+ span\.s \{[^}]*\}", rest) and "overflow-x: auto" in rest
    others = {"#cfd3d9", "#d9a032", "#1c2128", "#fff", "#9db8d9", "#8cc2a0", "#c9a5d6", "#e2c47c"}
    assert {*re.findall(r"#[0-9a-f]{3,6}\b", rest)} <= others - {"#cfd3d9"}


def test_asked_steps_are_shown_if_they_were_dumped(run: Path) -> None:
    data = page_data([run], Limits(steps=(3, 7)))
    assert {dump["step"] for dump in data["runs"][0]["dumps"]} == {3}


def test_text_of_a_sample_cannot_leave_its_script_element(tmp_path: Path) -> None:
    text = "</script><script>alert(1)</script> <!-- \u2028"
    page = render(page_data([write_run(tmp_path / "run", text=text)], Limits()), plotly_js="")
    assert "alert(1)" in page and "</script><script>alert" not in page
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    samples = json.loads(found[1])["runs"][0]["dumps"][0]["samples"]
    assert samples[0]["messages"][-1]["content"] == text


def test_page_refers_to_nothing_outside_of_it(run: Path) -> None:
    page = render(page_data([run], Limits()), plotly_js="")
    assert not re.findall(r"""(?:src|href)\s*=\s*["'](?!#|data:)[^"']*""", page)
    assert "@import" not in page and "url(" not in page and "fetch(" not in page


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ViewError, match=r"no config\.yaml"):
        page_data([tmp_path], Limits())
