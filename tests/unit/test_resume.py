"""Opening the folder of a run: what is compared, dropped, set aside, counted and refused."""

import json
import pickle
import re
import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.metadata import Metadata

from r3 import assets
from r3.config import Config, ConfigError, from_yaml
from r3.models import read_small_files
from r3.rollout import read_task
from r3.run import (
    Opened,
    ResumeError,
    RunDir,
    RunState,
    newest_whole,
    open_run,
    step_folders,
)
from r3.tools.beside.digests import digests_of
from tests.errors import Patch
from tests.run_folder import publish
from tests.tiny import ALONE, edit_json, tiny_config

REWARD = "def right(response, prompt):\n    return 1.0\n"


def started(run_dir: RunDir, config: Config | None = None, **options: Any) -> Opened:
    """Start or resume a run; the lock is released."""
    config = config or tiny_config(train={"steps": 9})
    start = open_run(run_dir, config, **{"writes": True} | options)
    if start.lock is not None:
        start.lock.release()
    return start


@dataclass(frozen=True)
class Place:
    """A run's folder, and what it depends on."""

    root: Path

    @property
    def run(self) -> RunDir:
        return RunDir(self.root / "run")

    def start(
        self, *allowed: str, writes: bool = True, only: bool = False, **sections: dict[str, Any]
    ) -> Opened:
        """Start or resume the run."""
        config = tiny_config(
            self.root / "model",
            data={"path": (str(self.root / "rows.jsonl"),)},
            reward={"function": (f"{self.root}/mine.py:right",)},
            algo={"teacher": (str(self.root / "teacher"),), "kl_coef": 0.1},
            lora={"rank": 4, "start": str(self.root / "adapter")},
            checkpoint={"allow_changed": allowed},
            eval={"path": (f"{assets.WORD_PROBLEMS_EVAL}[:16]",), "only": only},
            **sections,
        )
        with_task = read_task(config)
        digests = partial(digests_of, config, with_task, read_small_files(config.model.path))
        with closing(with_task):
            return started(self.run, config, writes=writes, digests=digests)

    def save(self, step: int) -> None:
        """A checkpoint, as far as `open_run` looks at it."""
        self.run.checkpoint(step).mkdir(parents=True)
        self.run.metrics.write_text("".join(f'{{"step": {i}}}\n' for i in range(1, step + 1)))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    for name in ("model", "teacher"):
        shutil.copytree(assets.TINY_MOE, tmp_path / name)
    rows = assets.WORD_PROBLEMS_TRAIN.read_text().splitlines()[:20]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows) + "\n")
    (tmp_path / "mine.py").write_text(REWARD)
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text('{"lora_alpha": 8}')
    save_file({"a": torch.zeros(4)}, tmp_path / "adapter" / "adapter_model.safetensors")
    place = Place(tmp_path)
    assert place.start().notes == ()
    place.save(1)
    return place


def retrained(root: Path, model: str = "model") -> None:
    """Other weights of the same shapes."""
    file = root / model / "model.safetensors"
    changed = {name: tensor + 0.01 for name, tensor in load_file(file).items()}
    save_file(changed, file, metadata={"format": "pt"})


def swap_rows(root: Path) -> None:
    first, second, *others = (root / "rows.jsonl").read_text().splitlines()
    (root / "rows.jsonl").write_text("\n".join([second, first, *others]))


def append_row(root: Path) -> None:
    with (root / "rows.jsonl").open("a") as file:
        file.write('{"question": "3+4?", "answer": "#### 7"}\n')


def edits(file: str, **values: Any) -> Callable[[Path], object]:
    return lambda root: edit_json(root / file, **values)


def template(root: Path) -> None:
    path = root / "model" / "chat_template.jinja"
    path.write_text(path.read_text().replace("<|im_start|>assistant", "<|im_start|>user", 1) + " ")


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a row more": (append_row, "data.path .* the rows changed since .*allow_changed data$"),
    "rows in another order": (swap_rows, "the rows changed since .*allow_changed data$"),
    "template": (template, "model.path .* the chat template changed .*allow_changed template$"),
    "tokenizer": (
        edits("model/tokenizer_config.json", add_prefix_space=True),
        "the tokenizer changed since .*allow_changed tokenizer$",
    ),
    "weights": (retrained, "the starting model's weights changed .*allow_changed weights$"),
    "end of a turn": (
        edits("model/generation_config.json", eos_token_id=[2, 0]),
        "the model's end tokens changed since",
    ),
    "config.json": (
        edits("model/config.json", rms_norm_eps=1e-5),
        "the model's config.json changed since",
    ),
    "teacher": (
        lambda root: retrained(root, "teacher"),
        "algo.teacher .* the teacher .*/teacher changed since .*allow_changed teacher$",
    ),
    "adapter": (
        edits("adapter/adapter_config.json", lora_alpha=16),
        "lora.start .* the adapter .*/adapter changed since .*allow_changed adapter$",
    ),
}


def digests(place: Place) -> Any:
    """Those of the last start."""
    return json.loads((place.root / "run" / "run.json").read_text())["digests"]


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_what_shapes_learning_is_refused_once(name: str, place: Place) -> None:
    change, message = CHANGES[name]
    before = digests(place)
    change(place.root)
    with pytest.raises(ConfigError, match=f"config: 1 problem\n(.|\n)*{message}") as refused:
        place.start()
    assert digests(place) == before
    (group,) = re.findall(r"allow_changed (\w+)", str(refused.value))
    with pytest.raises(ConfigError):  # the preflight says it, too
        place.start(writes=False)
    _, note = place.start(group).notes
    assert note.startswith("changed since the last start: ")
    # The permission was for that start, and what it allowed is what the run now depends on.
    config = from_yaml((place.root / "run" / "config.yaml").read_text())
    assert config.checkpoint.allow_changed == ()
    assert len(place.start().notes) == 1


def test_all_changes_are_named_at_once_with_one_flag(place: Place) -> None:
    append_row(place.root)
    template(place.root)
    start = place.start(writes=False, only=True)
    assert start.notes[1:] == ("changed since the last start: the chat template",)
    retrained(place.root)
    with pytest.raises(ConfigError, match="config: 3 problems") as refused:
        place.start("teacher")
    assert str(refused.value).count("allow_changed teacher data template weights") == 3
    assert len(place.start("data", "template", "weights").notes) == 2


def test_code_and_versions_are_noted_and_the_run_goes_on(place: Place) -> None:
    (place.root / "mine.py").write_text(REWARD.replace("1.0", "0.5"))
    change = {**digests(place), "evaluation": {}}
    change["versions"] = {**change["versions"], "torch": "1.0"}
    edit_json(place.root / "run" / "run.json", digests=change)
    _, note = place.start().notes
    also = f"held-out set heldout, torch 1.0 -> {torch.__version__}"
    assert note == f"changed since the last start: {place.root}/mine.py, {also}"
    assert len(place.start().notes) == 1  # said once


def test_files_written_anew_with_the_same_content_change_nothing(place: Place) -> None:
    model = place.root / "model"
    settings = json.loads((model / "tokenizer_config.json").read_text())
    reordered = dict(reversed(settings.items()))
    (model / "tokenizer_config.json").write_text(json.dumps(reordered, indent=4))
    edit_json(model / "generation_config.json", temperature=0.3)  # has no effect on a run
    (model / "README.md").write_text("More words.")
    assert len(place.start().notes) == 1


def test_a_run_of_an_older_version_resumes_with_a_note(place: Place) -> None:
    edit_json(place.root / "run" / "run.json", digests=None)
    _, note = place.start().notes
    assert note.startswith("run.json has no digests: data, tokenizer and models were not compared")
    assert len(place.start().notes) == 1


def test_digests_in_a_file_of_their_own_are_compared_and_taken_over(place: Place) -> None:
    """R3 before 2026-12 wrote them to sources.json."""
    run, before = place.root / "run", digests(place)
    (run / "sources.json").write_text(json.dumps(before))
    edit_json(run / "run.json", digests=None)
    retrained(place.root)
    with pytest.raises(ConfigError, match="the starting model's weights changed"):
        place.start()
    place.start("weights")
    assert digests(place)["data"] == before["data"] and not (run / "sources.json").exists()


def test_a_copied_folder_is_another_run_for_trackers(tmp_path: Path) -> None:
    run, copy, moved = (RunDir(tmp_path / name) for name in ("run", "copy", "moved"))

    def tracker_of(run_dir: RunDir, *, notes: int) -> str:
        opened = started(run_dir)
        assert opened.state and len(opened.notes) == notes
        written = RunState.read(run_dir.path)
        assert written and written.tracker_id == opened.state.tracker_id
        return opened.state.tracker_id

    own = tracker_of(run, notes=0)
    shutil.copytree(run.path, copy.path)
    assert tracker_of(run, notes=0) == own
    other = tracker_of(copy, notes=1)
    assert other != own and tracker_of(copy, notes=0) == other
    run.path.rename(moved.path)  # the same folder under another name
    assert tracker_of(moved, notes=0) == own
    shutil.copytree(moved.path, tmp_path / "backup")
    shutil.rmtree(moved.path)
    shutil.copytree(tmp_path / "backup", moved.path)  # restored in its place
    assert tracker_of(moved, notes=0) == own


def test_fewer_steps_than_the_checkpoint_has_are_refused(place: Place) -> None:
    place.save(3)
    with pytest.raises(ConfigError, match=r"train\.steps = 2: .*of step 3.*r3\.export .*--step 2"):
        place.start()
    assert place.start(train={"steps": 3}).step == 3


def saved(run_dir: RunDir, step: int, state: RunState | None = None) -> Path:
    """A whole checkpoint without tensors."""
    partial = run_dir.checkpoints / f".step_{step:06d}.partial"
    partial.mkdir(parents=True)
    (partial / ".metadata").write_bytes(pickle.dumps(Metadata({}, storage_data={})))
    publish(run_dir.checkpoints, step, state=state)
    return run_dir.checkpoint(step)


def test_a_checkpoint_that_is_damaged_again_is_moved_aside_again(tmp_path: Path) -> None:
    """One that kept its name would count as the newest, and `checkpoint.keep` delete later ones."""
    run_dir = RunDir(tmp_path)
    first = saved(run_dir, 1)
    for _ in range(2):
        damaged = saved(run_dir, 2)
        (damaged / "manifest.json").unlink()
        opened = Opened(checkpoint=damaged, step=2)
        opened = newest_whole(opened, run_dir, tiny_config(), ALONE, writes=True)
        assert (opened.checkpoint, opened.step) == (first, 1)
        assert step_folders(run_dir.checkpoints) == [(1, first)]
    assert (run_dir.checkpoints / "damaged_step_000002").is_dir()


def test_a_restart_after_all_checkpoints_are_damaged_begins_no_new_run(tmp_path: Path) -> None:
    """As the launcher's: without their names, there would be nothing to resume from."""
    run_dir = RunDir(tmp_path)
    for step in (1, 2):
        (saved(run_dir, step) / "manifest.json").unlink()
    for _ in range(2):
        with pytest.raises(ResumeError, match="no checkpoint of the run is whole"):
            newest_whole(started(run_dir), run_dir, tiny_config(), ALONE, writes=True)


def test_run_json_is_written_again_and_was_never_needed(tmp_path: Path) -> None:
    """Removed in mid-run, and before a start: all checkpoints stay those of the run."""
    run_dir, file = RunDir(tmp_path), tmp_path / "run.json"

    def start() -> Opened:
        return newest_whole(started(run_dir), run_dir, tiny_config(), ALONE, writes=True)

    own = start().state
    assert own is not None
    saved(run_dir, 1, own)
    file.unlink()
    saved(run_dir, 2, own)
    written = RunState.read(tmp_path)
    assert written is not None and (written.run_id, written.key) == (own.run_id, own.key)
    assert file.stat().st_mode & 0o777 == 0o600
    saved(run_dir, 3, replace(own, key=""))  # as versions did that read the file at each save
    saved(run_dir, 4)
    file.unlink()
    resumed = start()
    assert resumed.step == 4
    assert resumed.state is not None and resumed.state.run_id == own.run_id
    note, _ = resumed.notes[1:]
    assert note.startswith("run.json is missing: checkpoints with suspended conversations do not")
    assert len(start().notes) == 2, "a note about rows, and none about run.json"
    # Control: of another run.
    replace(own, run_id="another").write(tmp_path)
    assert start().step == 4, "without an id: of any run"
    shutil.rmtree(run_dir.checkpoint(4))
    with pytest.raises(ResumeError, match=f"it is of run {own.run_id}, not another"):
        start()


STATE_OF_THE_VERSION_BEFORE = """{"run_id": "0123456789abcdef", "key": "KEY", "last_start": 3,
"fruitless": 1, "failed_step": 4, "failures": 1, "place": [7, "/somewhere/else"], "tracker": ""}"""


def test_a_folder_of_the_version_before_resumes(place: Place) -> None:
    run = place.run.path
    (run / "run.json").write_text(STATE_OF_THE_VERSION_BEFORE.replace("KEY", "ab" * 32))
    place.save(3)
    opened = place.start(train={"steps": 5})
    assert opened.step == 3 and opened.state is not None
    assert (opened.state.run_id, opened.state.key) == ("0123456789abcdef", "ab" * 32)
    assert opened.state.last_start == 3 and opened.state.tracker_id != opened.state.run_id
    (run / "run.json").write_text(STATE_OF_THE_VERSION_BEFORE)
    with pytest.raises(ConfigError, match=r"run\.json cannot be read .*Fix: remove run"):
        place.start(train={"steps": 5})


def test_what_kills_and_abandoned_steps_left_goes_at_the_next_start(place: Place) -> None:
    """The last checkpoint is of step 1: samples of later steps are made again."""
    run = place.run.path
    files = [".config.yaml.7.tmp", "errors/.rank_00000.txt.7.tmp", "rollouts/.a.jsonl.7.tmp"]
    files += ["rollouts/step_000002.scores.safetensors", "eval/step_000003.jsonl"]
    folders = ["checkpoints/.step_000002.partial", "checkpoints/.step_000001.old"]
    stay = ["rollouts/.step_000001.scores.safetensors.7.tmp", "errors/rank_00000.txt"]
    stay += ["rollouts/step_000001.jsonl", "eval/step_000001.jsonl", "eval/alone.json"]
    for name in files + stay:
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).touch()
    for name in folders:
        (run / name / "a").mkdir(parents=True)
    place.start(writes=False)
    assert all((run / name).exists() for name in files + folders), "another rank changes nothing"
    place.start()
    assert [name for name in files + folders + stay if (run / name).exists()] == stay
    assert (run / "checkpoints" / "step_000001").is_dir()


def test_the_model_of_an_abandoned_attempt_loses_its_name(place: Place) -> None:
    for step in (1, 2):
        place.run.hf(step).mkdir(parents=True)
    (place.run.hf(2) / "r3.json").write_text("{}")
    _, note = place.start().notes  # from the checkpoint of step 1: step 2 is made again
    assert note.endswith("is given up: renamed to abandoned_step_000002")
    assert place.run.hf(1).exists() and not place.run.hf(2).exists()
    assert (place.run.hf(2).with_name("abandoned_step_000002") / "r3.json").exists()


def test_a_checkpoint_that_was_never_complete_is_none(place: Place) -> None:
    place.run.checkpoint(1).rename(place.run.checkpoints / ".step_000001.partial")
    (place.run.checkpoints / "latest").symlink_to("step_000001")
    start = place.start()
    assert start.checkpoint is None and "unfinished run without a checkpoint" in start.notes[0]
    assert [path.name for path in place.run.checkpoints.iterdir()] == ["latest"]


def test_an_unfinished_run_without_a_checkpoint_is_set_aside_and_said(place: Place) -> None:
    shutil.rmtree(place.run.checkpoints)
    rows, aside = place.run.metrics.read_text(), place.run.path / "aborted_001"
    (note,) = place.start().notes
    assert f"has an unfinished run without a checkpoint: moved to {aside}, " in note
    assert (aside / "metrics.jsonl").read_text() == rows and not place.run.metrics.exists()


def attempt(folder: Path, *, reaches: int, saves: int = 0) -> None:
    """Start a run, report steps up to `reaches`, save the state after step `saves`."""
    start = started(RunDir(folder))
    for step in range(start.step + 1, reaches + 1):
        RunDir(folder).append_metrics({"step": step})
    if saves:
        (folder / "checkpoints" / f"step_{saves:06d}").mkdir(parents=True, exist_ok=True)


def test_step_that_fails_twice_ends_a_run(tmp_path: Path, monkeypatch: Patch) -> None:
    attempt(tmp_path, reaches=2, saves=2)  # a person starts the run; step 3 fails
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    attempt(tmp_path, reaches=2)  # step 3 fails again
    (tmp_path / "errors").mkdir()
    (tmp_path / "errors" / "first_failure").write_text("RewardError on rank 0: broken\n  more\n")
    twice = r"step 3 failed twice(.|\n)*RewardError on rank 0: broken\n"
    with pytest.raises(ResumeError, match=twice):
        attempt(tmp_path, reaches=2)
    with pytest.raises(ResumeError, match="step 3 failed 3 times"):
        attempt(tmp_path, reaches=2)
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT")
    attempt(tmp_path, reaches=3, saves=3)  # a person may try again, with full patience
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    for step in range(4, 8):
        attempt(tmp_path, reaches=step, saves=step)  # restarts with progress never end
    assert json.loads((tmp_path / "run.json").read_text())["failures"] == 1


def test_steps_that_are_never_saved_are_no_progress(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    for reached in (5, 3):  # both attempts begin with step 1
        attempt(tmp_path, reaches=reached)
    with pytest.raises(ResumeError, match="automatic restarts in a row ended before a checkpoint"):
        for reached in (4, 2):
            attempt(tmp_path, reaches=reached)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        *((text, "metrics.jsonl:2: not a JSON object") for text in ("{", "[1]", "[" * 100_000)),
        *((text, "a row has no step") for text in ('{"reward/mean": 1}', '{"step": "two"}')),
    ],
)
def test_a_bad_middle_row_is_one_message(line: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n')
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(ResumeError, match=text):
        started(RunDir(tmp_path))
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
