"""Every key is explained, parts merge to one row, and rows reach the file, TensorBoard and the
console.
"""

import io
import json
import math
import re
import resource
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.text import Text
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from r3 import extras
from r3.metrics import (
    GLOSSARY,
    DeadExperts,
    EffectiveSampleSize,
    LoadEntropy,
    LoadMax,
    Max,
    Mean,
    Meter,
    Quantile,
    Sum,
    UnknownMetricError,
    UsersMean,
    explain,
    headlines,
)
from r3.metrics.console import COLUMNS, console_of, notes, stage, step_line
from r3.run import RunDir, read_metrics, truncate_metrics
from r3.tools import show_samples
from tests.errors import Patch, Terminal
from tests.runs import is_wall_clock
from tests.tiny import ALONE, tiny_config


def meter(
    folder: Path | None = None, *, stream: io.StringIO | None = None, **arguments: Any
) -> Meter:
    log = arguments.pop("log", {"tensorboard": False})
    config = tiny_config(train={"steps": 40}, log=log)
    run_dir = RunDir(folder) if folder else None
    return Meter(
        run_dir, arguments.pop("axis", ALONE), config, stream=stream or io.StringIO(), **arguments
    )


# --- glossary ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("eval/heldout/accuracy", "eval/SET/accuracy"),
        ("eval/gsm8k-1.1/pass_at_8", "eval/SET/pass_at_K"),
        ("mismatch/k3", "mismatch/k3"),
        ("env/tool_calls", "env/NAME"),
        ("reward/cites", "reward/NAME"),
        ("reward/brief/mean", "reward/COMPONENT/mean"),
        ("eval/gsm8k-1.1/env/tool_calls", "eval/SET/env/NAME"),
    ],
)
def test_explain(key: str, name: str) -> None:
    assert explain(key) == GLOSSARY[name]


def test_an_unknown_key_is_an_error() -> None:
    keys = "eval//accuracy env/2 env/a/b eval/a/b/accuracy eval/a/pass_at_0 eval/a/pass_at_K8 loss"
    add, enter = (
        lambda key: meter().add({key: Sum(1.0)}),
        lambda key: meter().phase(key).__enter__(),
    )
    refusing = (explain, is_wall_clock, add, enter)
    for key, refuse in product((*keys.split(" "), ""), refusing):
        with pytest.raises(UnknownMetricError):
            refuse(key)
    with pytest.raises(UnknownMetricError, match=r"'rewards/mean': did you mean 'reward/mean'\?"):
        explain("rewards/mean")
    with pytest.raises(UnknownMetricError, match=r"time/trian_s'.*time/train_s"):
        enter("trian")


@pytest.mark.parametrize("key", ["reward/men", "env/turn_mean", "eval/heldout/reward/men"])
def test_a_metric_that_only_users_may_name_is_an_error_from_r3(key: str) -> None:
    with pytest.raises(UnknownMetricError, match=f"unknown metric '{key}'"):
        meter().add({key: Sum(1.0)})
    meter().add({key: UsersMean((1.0,))})


def test_wall_clock_keys() -> None:
    clocked = {key for key in GLOSSARY if is_wall_clock(key)}
    assert {"time/step_s", "memory/peak_gib", "perf/sampled_tokens_per_s"} <= clocked
    assert clocked.isdisjoint({"rollout/tokens", "perf/packing_efficiency", "mismatch/k3"})
    assert not is_wall_clock("eval/heldout/accuracy")


# --- rows -------------------------------------------------------------------------------------


def test_parts_of_every_kind_merge_and_are_written_exactly(tmp_path: Path) -> None:
    m = meter(tmp_path)
    m.add({"reward/mean": Mean(total=1.0, count=3.0), "rollout/tokens": Sum(5.0)})
    m.add({"reward/mean": Mean(total=1.0, count=7.0), "rollout/tokens": Sum(6.0)})
    m.add({"mismatch/abs_max": Max(0.5), "mismatch/ess": EffectiveSampleSize(3.0, 5.0, 2.0)})
    m.add({"mismatch/abs_p99": Quantile(np.arange(101, dtype=np.float32), 0.99)})
    m.add({"loss/total": Mean(math.nan, 1.0), "optim/lr": Mean(1e-4, 1.0)})
    m.add({"policy/entropy": Mean(total=0.0, count=0.0)})  # nothing counted: no such key in the row
    row = m.close_step(1)
    assert row | {"loss/total": 0.0} == {
        "loss/total": 0.0,
        "mismatch/abs_max": 0.5,
        "mismatch/abs_p99": 99.0,
        "mismatch/ess": 9.0 / 10.0,
        "optim/lr": 1e-4,
        "reward/mean": 0.2,
        "rollout/tokens": 11.0,
    }
    assert math.isnan(row["loss/total"])
    (read,) = read_metrics(tmp_path)
    assert list(read) == ["step", *sorted(row)]
    assert json.dumps(read) == json.dumps({"step": 1, **row})
    assert m.close_step(2) == {}  # parts belong to one row only


def test_parts_of_two_kinds_are_refused() -> None:
    m = meter()
    m.add({"reward/mean": Mean(1.0, 1.0)})
    m.add({"reward/mean": Sum(1.0)})
    with pytest.raises(TypeError, match=r"reward/mean: .* \['Mean', 'Sum'\]"):
        m.close_step(1)


def test_a_step_cannot_be_reported_twice() -> None:
    m = meter()
    m.close_step(0)
    m.close_step(1)
    with pytest.raises(ValueError, match="step 1 after one of step 1"):
        m.close_step(1)
    with pytest.raises(ValueError, match="step 4 after one of step 4"):
        meter(first_step=4).close_step(4)


def test_phases_are_timed_and_told() -> None:
    told: list[str] = []
    m = meter(on_phase=told.append)
    with m.phase("train"):
        time.sleep(0.02)
        with m.phase("prove_sync"), m.progress(2, "sync") as tick:
            time.sleep(0.02)
            tick()
    with pytest.raises(RuntimeError, match="inside"), m.phase("train"):
        time.sleep(0.02)
        raise RuntimeError("inside")
    m.add({"rollout/tokens": Sum(100.0)})
    row = m.close_step(1)
    assert told == [
        *("train", "prove_sync", "prove_sync", "train", "between phases"),  # a tick is progress
        *("train", "between phases"),
        *("report", "between phases"),
    ]
    assert row["time/prove_sync_s"] >= 0.02
    # Both times, the inner phase included
    assert row["time/train_s"] >= 0.04 + row["time/prove_sync_s"] - 0.02
    assert row["time/step_s"] >= row["time/train_s"]
    assert row["perf/tokens_per_s"] == 100.0 / row["time/step_s"]
    assert m.close_step(2) == {}


def test_evaluation_slows_down_neither_rate_nor_time_left() -> None:
    stream = io.StringIO()
    m = meter(stream=stream)
    for step in (1, 2):
        with m.phase("generate"):
            time.sleep(0.01)
        if step == 2:
            with m.phase("evaluate"):
                time.sleep(0.5)
        m.add({"rollout/tokens": Sum(100.0), "rollout/sampled_tokens": Sum(40.0)})
        row = m.close_step(step)
    own_s = row["time/step_s"] - row["time/evaluate_s"]
    assert row["time/evaluate_s"] >= 0.5 and own_s < 0.5
    assert row["perf/tokens_per_s"] == 100.0 / own_s
    assert row["perf/sampled_tokens_per_s"] == 40.0 / row["time/generate_s"]
    left = float(stream.getvalue().rpartition("left ")[2].strip().removesuffix("s"))
    assert left < 0.25 * 38, "38 steps as fast as these, without evaluations"


def test_other_ranks_write_and_print_nothing(tmp_path: Path) -> None:
    stream = io.StringIO()
    m = meter(tmp_path, axis=replace(ALONE, rank=1), stream=stream, log={"tensorboard": True})
    m.console.header(["model tiny"])
    m.add({"reward/mean": Mean(1.0, 1.0)})
    assert m.close_step(1) == {"reward/mean": 1.0}
    m.close()
    assert stream.getvalue() == ""
    assert list(tmp_path.iterdir()) == []


# --- TensorBoard ------------------------------------------------------------------------------


def events(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder / "tensorboard")).Reload()


def test_layers_are_in_the_row_and_have_no_curves(tmp_path: Path) -> None:
    """The load of experts has one number over all layers: the worst layer, the mean and the sum."""
    shown = meter(tmp_path, log={"tensorboard": True})
    for layer, load in ((1, [4, 4, 0, 0]), (2, [2, 2, 2, 2])):
        load_E = np.array(load)
        shown.add({f"routing/load_max_layer/{layer}": LoadMax(load_E)})
        shown.add({f"routing/load_entropy_layer/{layer}": LoadEntropy(load_E)})
        shown.add({f"routing/load_dead_layer/{layer}": DeadExperts(load_E)})
        shown.add({f"routing/agreement_layer/{layer}": Mean(layer, 20.0)})
    row = shown.close_step(1)
    shown.close()
    assert row["routing/agreement_layer/2"] == 0.1
    load = {key: row[f"routing/{key}"] for key in ("load_max", "load_entropy", "load_dead")}
    assert load == {"load_max": 2.0, "load_entropy": 0.75, "load_dead": 2.0}
    assert set(events(tmp_path).Tags()["scalars"]) == {f"routing/{key}" for key in load}


def test_best_middle_and_worst_samples_are_shown_as_they_are(tmp_path: Path) -> None:
    shown = meter(tmp_path, log={"tensorboard": True})
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "calc"}}]}
    row = {"prompt_id": "rows.jsonl:1", "response_tokens": 4, "finish_reason": "stop"}
    row |= {"reference": "#### 2"}
    rows = []
    for index, reward in enumerate((0.5, 1.0, 0.0)):
        said = {"role": "assistant", "content": f"*two*\n#### {index}"}
        messages = [{"role": "user", "content": "1+1? <b>"}, call, said]
        facts = {"sample_index": index, "reward": reward, "advantage": reward - 0.5}
        rows.append({**row, **facts, "messages": messages})
    show_samples(shown, 1, rows)
    show_samples(shown, 2, [])
    shown.close()
    tags = {tag for tag in events(tmp_path).Tags()["tensors"] if tag.startswith("samples/")}
    assert tags == {f"samples/{name}/text_summary" for name in ("best", "middle", "worst")}
    (best,) = events(tmp_path).Tensors("samples/best/text_summary")
    text = best.tensor_proto.string_val[0].decode()
    assert text.startswith("reward 1, advantage +0.500, 4 sampled tokens, finish stop")
    assert "**user**\n\n    1+1? <b>" in text and "    {'name': 'calc'}" in text
    assert "    *two*\n    #### 1" in text and text.endswith("**reference answer**\n\n    #### 2")


def test_a_resumed_run_continues_file_and_curves(tmp_path: Path) -> None:
    first = meter(tmp_path, log={"tensorboard": True})
    for step in range(6):
        first.add({"reward/mean": Mean(float(step), 1.0)})
        first.close_step(step)
    first.close()
    assert truncate_metrics(RunDir(tmp_path), 4)  # killed after step 5, its checkpoint is of step 3
    again = meter(tmp_path, log={"tensorboard": True}, first_step=3)
    for step in (4, 5, 6):
        again.add({"reward/mean": Mean(100.0 + step, 1.0)})
        again.close_step(step)
    again.close()
    expected = [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0), (4, 104.0), (5, 105.0), (6, 106.0)]
    assert [(row["step"], row["reward/mean"]) for row in read_metrics(tmp_path)] == expected
    curve = events(tmp_path).Scalars("reward/mean")
    assert [(event.step, event.value) for event in curve] == expected


def test_the_first_page_is_that_of_the_design(tmp_path: Path) -> None:
    meter(tmp_path, log={"tensorboard": True}).close()
    (event,) = events(tmp_path).Tensors("custom_scalars__config__")
    layout = layout_pb2.Layout.FromString(event.tensor_proto.string_val[0])
    tags = [[list(chart.multiline.tag) for chart in page.chart] for page in layout.category]
    known = [key.replace("SET", "heldout") for key in GLOSSARY]
    # TensorBoard's own rule: re.match, anchored at the beginning only.
    drawn = [
        [[key for key in known if any(re.match(tag, key) for tag in chart)] for chart in page]
        for page in tags
    ]
    health, paired = drawn
    assert all(map(all, (health, paired))), "every chart draws something"
    assert {"reward/mean", "eval/heldout/accuracy", "eval/heldout/reward"} == set(health[0])
    assert {"mismatch/k3_replay", "mismatch/k3_live"} == set(paired[0])


def test_the_figure_of_a_graded_evaluation_is_its_mean_reward() -> None:
    """Values between 0 and 1 are seldom "right": their accuracy would stay at 0."""
    graded = {"eval/a/accuracy": 0.0, "eval/a/reward": 0.437, "eval/a/reward/length": 9.0}
    row = {"eval/b/accuracy": 0.25, **graded}
    assert headlines(row) == {"a": "eval/a/reward", "b": "eval/b/accuracy"}
    assert "  eval 0.437" in step_line(row, 1, 2)
    assert notes(row) == ["a accuracy 0.000", "a reward length 9.000", "b 0.250"]
    assert "  eval 0.250" in step_line({"eval/b/accuracy": 0.25}, 1, 2)


# --- console ----------------------------------------------------------------------------------

ROW = {
    "reward/mean": 0.613,
    "mismatch/k3": 1.2e-7,
    "routing/agreement": 1.0,
    "routing/coverage": 1.0,
    "rollout/response_tokens_mean": 18.26,
    "optim/grad_norm": 0.8199,
    "time/generate_s": 0.94,
    "time/train_s": 1.41,
    "time/sync_s": 0.08,
}


def test_a_log_file_gets_labelled_figures() -> None:
    assert step_line(ROW, 12, 40, eta_s=7200) == (
        "step 12/40  reward 0.613  k3 1.2e-07  tokens 18.3  grad 0.82  agree 1.000"
        "  gen 0.9s  train 1.4s  sync 0.1s  left 2.0h"
    )
    evaluated = {"eval/heldout/accuracy": 0.328, "eval/heldout/pass_at_8": 0.7}
    assert step_line(evaluated, 0, 40) == "step 0/40  eval 0.328  heldout pass_at_8 0.700"
    # Coverage is silent while it is 1, and a share just below is not shown as 1.
    for value, shown in ((0.99996, "coverage 0.999"), (math.nan, "coverage nan")):
        assert shown in step_line({"routing/coverage": value}, 1, 1)
    assert "coverage" not in step_line({"routing/coverage": 1.0}, 1, 1)


def test_a_line_of_a_log_file_is_not_wide_and_keeps_what_matters() -> None:
    row = {key: 0.123456 for column in COLUMNS for key in column.keys} | ROW
    row |= {"eval/heldout/accuracy": 0.5, "eval/heldout/pass_at_8": 0.7}
    del row["loss/nll"]  # of supervised steps
    line = step_line(row, 12, 10000, eta_s=90)
    assert len(line) <= 120
    for title in ("reward", "eval", "k3", "k3 live", "tokens", "heldout pass_at_8", "left"):
        assert f"  {title} " in line
    assert "  sync " not in line, "metrics.jsonl has it"
    # Figures of several sets fill a line; the reward of the step and the first set's stay.
    row |= {f"eval/heldout/pass_at_{k}": 0.7 for k in range(1, 9)}
    for title in ("reward", "eval", "k3", "k3 live", "heldout pass_at_8", "left"):
        assert f"  {title} " in step_line(row, 12, 10000, eta_s=90)


def test_figures_that_are_0_in_most_runs_are_not_shown() -> None:
    idle = {"reward/mean": 0.0, "loss/clip_frac": 0.0, "eval/a/accuracy": 0.0}
    idle |= {"rollout/truncated_frac": 0.0, "reward/group_zero_std_frac": 0.0}
    line = step_line(idle | {"eval/a/unjudged": 0.0}, 1, 2)
    assert line == "step 1/2  reward 0.000  eval 0.000"
    busy = step_line(idle | {"loss/clip_frac": 0.012, "eval/a/unjudged": 3.0}, 1, 2)
    assert "  clip 1.2%  a unjudged 3.000" in busy


def test_every_column_is_explained_in_help_and_docs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    for column in COLUMNS:
        assert f"| `{column.title}` | " in page
        assert f"\n  {column.title} " in extras.help_texts().columns()


@pytest.mark.parametrize("width", [80, 100, 120, 160, 200])
def test_the_table_fits_the_terminal(width: int, monkeypatch: Patch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    everything = {key: 0.123456 for column in COLUMNS for key in column.keys} | ROW
    stream = Terminal()
    console = console_of(is_leader=True, progress=False, stream=stream)
    for step in (1, 2):
        console.row(everything | {"eval/heldout/accuracy": 0.5}, step, 10000, eta_s=1e5)
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue()).splitlines()
    assert len(lines) == 3  # titles once, then two rows
    assert max(map(len, lines)) <= min(width, 160)
    for title in ("step", "reward", "eval", "k3 live", "left"):  # never dropped
        assert title in lines[0]


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_a_sample_is_shown_in_colours_or_as_plain_lines(
    stream: io.StringIO, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("FORCE_COLOR", "1")  # as CI does; a file has no colours nevertheless
    meter(stream=stream).console.show(Text("[bold] 1+1=2\n" + "word " * 30, style="cyan"))
    text = stream.getvalue()
    assert "[bold] 1+1=2" in text
    if stream.isatty():
        assert "\x1b[" in text
    else:
        assert "\x1b[" not in text
        lines = text.splitlines()
        assert 90 < max(map(len, lines)) <= 100
        assert not [line for line in lines if line != line.rstrip()]


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_a_stage_says_what_is_loaded_and_how_long_it_took(
    stream: io.StringIO, monkeypatch: Patch
) -> None:
    monkeypatch.setattr("sys.stdout", stream)
    monkeypatch.delenv("RANK", raising=False)
    with stage("building the engine"):
        time.sleep(0.15)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    shown = re.search(r"building the engine \.\.\. (\d+\.\d) s\n\Z", text)
    assert shown and float(shown[1]) >= 0.1  # slept 0.15 s; a busy machine takes longer
    assert ("0:00:00" in text) == stream.isatty()  # the seconds run where one looks on
    monkeypatch.setenv("RANK", "1")
    with stage("building the engine"):
        pass
    assert re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue()) == text


def shown_of_a_step(stream: io.StringIO, *, progress: bool = True) -> str:
    """A header, a bar and a row."""
    m = meter(stream=stream, log={"progress": progress, "tensorboard": False})
    m.console.header(["model   tiny [bold]", "replay  r3"])
    with m.progress(3, "generate") as tick:
        tick(2)
        tick()
    m.add({"reward/mean": Mean(1.0, 2.0)})
    m.close_step(1)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())


def test_a_log_file_gets_plain_lines() -> None:
    expected = "model   tiny [bold]\nreplay  r3\nstep 1/40  reward 0.500\n"
    assert shown_of_a_step(stream := io.StringIO()) == stream.getvalue() == expected


def test_supervised_steps_are_a_table_and_evaluations_fit(monkeypatch: Patch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    stream = Terminal()
    console = console_of(is_leader=True, progress=False, stream=stream)
    row = {"loss/nll": 2.4, "optim/grad_norm": 2.9, "time/step_s": 1.4, "eval/a/accuracy": 0.25}
    console.row(row | {"perf/tokens_per_s": 325.0, "policy/entropy": 0.7}, 1, 3, 2.8)
    console.row({f"eval/set{n}/accuracy": 0.25 for n in range(3)} | {"time/step_s": 1.0}, 3, 3)
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue()).splitlines()
    assert lines[0].split() == ["step", "eval", "nll", "entropy", "grad", "tok/s", "s/step", "left"]
    assert lines[1].split() == ["1/3", "0.250", "2.4000", "0.700", "2.90", "325", "1.4", "3s"]
    assert lines[2:] == ["step 3/3  eval 0.250  s/step 1.0  set1 0.250  set2 0.250"]


def test_a_terminal_gets_a_frame_and_bars() -> None:
    shown = shown_of_a_step(Terminal())
    assert "model   tiny [bold]" in shown
    assert "\u256d" in shown or "+" in shown  # the frame's corner
    assert "generate" in shown and "3/3" in shown
    assert "1/40  0.500" in shown
    assert "generate" not in shown_of_a_step(Terminal(), progress=False)


def test_a_long_line_of_the_header_goes_on_below_its_value() -> None:
    stream = Terminal()
    meter(stream=stream, log={"tensorboard": False}).console.header([f"model      {'word ' * 40}"])
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue()).splitlines()
    inside = [line[2:-2].rstrip() for line in shown[1:-1]]
    assert len(inside) > 1 and inside[0].startswith("model      word word")
    assert all(line.startswith(" " * 11 + "word") for line in inside[1:])


# --- a full disk ------------------------------------------------------------------------------


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """No file may grow beyond so many bytes: the kernel writes a part, then refuses."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


def test_rows_wait_for_room_and_leave_no_part(tmp_path: Path) -> None:
    console = io.StringIO()
    run = meter(tmp_path, stream=console)
    run.close_step(1)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with room_for(len(before) + 5):
        run.close_step(2)
        run.close_step(3)
        assert (tmp_path / "metrics.jsonl").read_bytes() == before
        with pytest.raises(OSError, match=r"No space left|File too large"):
            run.close()
    run.close_step(4)
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3, 4]
    assert re.findall(r"row of step (\d) not written", console.getvalue()) == ["2", "3"]


def test_tensorboard_may_end_before_the_run(tmp_path: Path) -> None:
    console, before = io.StringIO(), threading.excepthook
    run = meter(tmp_path, stream=console, log={"tensorboard": True})
    run.close_step(1)
    shutil.rmtree(tmp_path / "tensorboard")
    for step in (2, 3, 4):
        run.add({"reward/mean": Mean(total=1.0, count=1.0)})
        run.close_step(step)
    run.close()
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3, 4]
    assert console.getvalue().count("TensorBoard's events end here: ") == 1
    assert threading.excepthook == before


def test_the_thread_of_tensorboard_alone_shows_no_error(tmp_path: Path, monkeypatch: Patch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: shown.append(args.thread.name))

    def fail(name: str) -> None:
        """Let a thread of TensorBoard's fail, as on a disk that is full, and one of a user's."""
        writer = EventFileWriter(str(tmp_path / name), flush_secs=0)
        thread = writer._async_writer._worker
        thread.name = name
        shutil.rmtree(tmp_path / name)
        for _ in range(2):
            with suppress(OSError):
                writer.add_event(Event(wall_time=1.0))
        thread.join(10)
        assert not thread.is_alive()
        user = threading.Thread(target=lambda: (tmp_path / "absent").read_text(), name="user's")
        user.start()
        user.join()

    run = meter(tmp_path / "run", log={"tensorboard": True})
    fail("beside")
    assert shown == ["user's"]
    run.close()
    fail("without")
    assert shown == ["user's", "without", "user's"]


def test_rows_that_vanish_in_mid_run_are_said(tmp_path: Path) -> None:
    console = io.StringIO()
    run = meter(tmp_path, stream=console)
    for step in (1, 2):
        run.close_step(step)
    assert "removed" not in console.getvalue()
    (tmp_path / "metrics.jsonl").unlink()
    for step in (3, 4):
        run.close_step(step)
    said = "metrics.jsonl was removed or emptied: rows before step 3 are lost"
    assert console.getvalue().count(said) == 1
    assert [row["step"] for row in read_metrics(tmp_path)] == [3, 4]
