"""Experiment trackers, with the real packages where they are installed, without a network."""

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from r3 import extras
from r3.checks import problems
from r3.config import Config
from r3.metrics import TrackerError
from tests.errors import Patch
from tests.tiny import tiny_config

PASSWORD = "hunter2-hunter2"
SAMPLES = {name: f"a {name} response" for name in ("best", "worst")}


def config_of(tracker: str, folder: Path) -> Config:
    log = {"tracker": tracker, "dir": str(folder / "my-run"), "project": "r3-test"}
    reward: dict[str, Any] = {"request": (f"user={PASSWORD}",), "args": ("scale=2",)}
    reward["url"] = f"https://me:{PASSWORD}@judge.example/v1?key={PASSWORD}"
    return tiny_config(log=log, reward=reward, train={"lr": 1.25e-4})


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: Patch) -> Path:
    """A folder in which every package keeps what it is given. Trackio reads it once."""
    monkeypatch.chdir(tmp_path)
    variables = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "HF_TOKEN": PASSWORD}
    variables |= {"WANDB_API_KEY": "0123456789" * 4, "TRACKIO_DIR": f"{tmp_path}/trackio"}
    variables["MLFLOW_TRACKING_URI"] = f"sqlite:///{tmp_path}/mlflow.db"
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return tmp_path


def made_run(config: Config, *, steps: range) -> None:
    tracker = extras.tracker(config, "abcdef0123456789")
    for step in steps:
        tracker.log({"reward/mean": step / 8, "mismatch/k3": 1e-5}, step)
    tracker.log_samples(SAMPLES, steps[-1])
    tracker.close(failed=False)


@pytest.mark.parametrize("tracker", ["wandb", "trackio", "mlflow"])
def test_a_missing_package_is_a_mistake_with_the_command(
    tracker: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    if importlib.util.find_spec(tracker):
        pytest.skip(f"{tracker} is installed")
    # A folder of the tracker's files in the working folder is no package.
    (tmp_path / tracker).mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    (found,) = problems(tiny_config(log={"tracker": tracker}), 1)
    assert found.place == "log.tracker" and found.value == tracker
    assert f"-m pip install {tracker}" in found.fix


def tracked(name: str, offline: Path, *, again: int) -> None:
    """A run of three steps, and one that resumes with step `again`."""
    pytest.importorskip(name, reason=f"{name} is not installed: it is no part of the CPU stack")
    config = config_of(name, offline)
    made_run(config, steps=range(1, 4))
    made_run(config, steps=range(again, 6))


def test_wandb_gets_everything_and_goes_on_after_a_resume(offline: Path) -> None:
    tracked("wandb", offline, again=3)
    folders = sorted((offline / "my-run" / "wandb").rglob("run-abcdef0123456789.wandb"))
    assert len(folders) == 2  # one per start, of the same run
    first, second = (records_of(path) for path in folders)
    assert [row["step"] for row in first if "reward/mean" in row] == [1, 2, 3]
    assert [row["step"] for row in second if "reward/mean" in row] == [3, 4, 5]
    assert any(key.startswith("samples/") for row in first for key in row)
    require_public(offline)


def require_public(folder: Path) -> None:
    """Samples and settings were sent, but neither the password nor the key of the account."""
    everything = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    assert b"a best response" in everything and b"0.000125" in everything
    assert PASSWORD.encode() not in everything and b"0123456789" * 4 not in everything


def records_of(path: Path) -> list[dict[str, Any]]:
    """The rows of an offline run of wandb: protobuf records in the log format of LevelDB."""
    from wandb.proto import wandb_internal_pb2

    content = path.read_bytes()
    rows, place, record = [], 7, b""  # the file begins with a header of 7 bytes
    while place + 7 <= len(content):
        rest = 32768 - place % 32768
        if rest < 7:  # a record's header never crosses the end of a block
            place += rest
            continue
        length, kind = int.from_bytes(content[place + 4 : place + 6], "little"), content[place + 6]
        record += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or its last part
            parsed = wandb_internal_pb2.Record.FromString(record)
            items = parsed.history.item
            keys = [item.key or "/".join(item.nested_key) for item in items]
            values = [json.loads(item.value_json) for item in items]
            rows += [dict(zip(keys, values, strict=True))] if keys else []
            record = b""
    return rows


def test_trackio_gets_everything_and_goes_on_after_a_resume(offline: Path) -> None:
    tracked("trackio", offline, again=4)
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    (run,) = trackio.Api().runs("r3-test")
    assert run.name == "my-run-abcdef"
    logs = SQLiteStorage.get_logs("r3-test", run.name)
    assert [row["step"] for row in logs if "reward/mean" in row] == [1, 2, 3, 4, 5]
    require_public(offline)


def test_mlflow_gets_everything_and_goes_on_after_a_resume(offline: Path) -> None:
    tracked("mlflow", offline, again=4)
    from mlflow import MlflowClient

    client = MlflowClient()
    experiment = client.get_experiment_by_name("r3-test")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED" and run.info.run_name == "my-run"
    assert run.data.params["train.lr"] == "0.000125"
    history = client.get_metric_history(run.info.run_id, "reward/mean")
    assert [(each.step, each.value) for each in history] == [(n, n / 8) for n in range(1, 6)]
    require_public(offline)


def stand_in(monkeypatch: Patch, init: Callable[..., Any]) -> None:
    """A package with the names of wandb's that R3 uses."""
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Table=dict, Settings=dict))


def test_a_service_that_fails_is_said_once_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: dict[str, Any] = {}
    sent: list[object] = []

    def log(row: object) -> None:
        sent.append(row)
        raise ConnectionError("no route to host")

    def init(**given: Any) -> SimpleNamespace:
        started.update(given)
        return SimpleNamespace(log=log, define_metric=lambda *_, **__: None, finish=sent.append)

    stand_in(monkeypatch, init)
    tracker = extras.tracker(config_of("wandb", tmp_path), "id")
    tracker.log({"reward/mean": 1.0}, 1)
    tracker.close(failed=False)
    tracker.log({"reward/mean": 1.0}, 2)
    said = capsys.readouterr().err
    assert said.count("warning") == 1 and "log.tracker wandb failed" in said
    assert "no route to host. All rows are in metrics.jsonl" in said
    assert sent == [{"reward/mean": 1.0, "step": 1}], "a failed tracker gets nothing more"
    # What it was told of the run: addresses and requests are left out.
    settings = started["config"]
    assert PASSWORD not in json.dumps(settings)
    assert settings.keys().isdisjoint({"reward.url", "reward.request", "env.command"})
    assert (settings["reward.args"], settings["train.lr"]) == (["scale=2"], 1.25e-4)


def test_a_service_that_does_not_start_ends_the_run_with_its_reason(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    def refuse(**_: object) -> None:
        raise ConnectionError("api_key not configured")

    stand_in(monkeypatch, refuse)
    with pytest.raises(TrackerError, match="wandb could not start: api_key not configured"):
        extras.tracker(config_of("wandb", tmp_path), "id")
