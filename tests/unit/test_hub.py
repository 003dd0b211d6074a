"""Models by name: what is downloaded and when, what the cache is good for, what is said.

Against a server of this machine in the hub's protocol (tests/hub.py). The cases are those of
reports about other programs: parts of a model taken for all of it, the same weights in two forms,
ranks that download together, a plan that leaves a cache which looks complete.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from r3 import assets, extras
from r3.cli import parse as cli
from r3.models import CheckpointReader, read_small_files
from r3.models.shape import ModelShape, ShapeError
from tests.errors import Capsys, Patch
from tests.hub import Hub, serving, sha_of
from tests.runs import soon
from tests.tiny import embedded
from tests.world import ROOT

download = extras.downloads()
NAME = "hub:owner/tiny"
WEIGHTS = "model.safetensors"
TWICE = ("consolidated.safetensors", "pytorch_model.bin", "original/params.json")


def sharded(folder: Path) -> Path:
    """The embedded model in two shards, with the same weights in two forms that nobody reads."""
    (embedded(folder) / WEIGHTS).unlink()
    whole = AutoModelForCausalLM.from_pretrained(assets.TINY_MOE)
    whole.save_pretrained(folder, max_shard_size="1200KB")
    (folder / "original").mkdir()
    for name in TWICE:
        (folder / name).write_bytes(b"twice")
    return folder


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: Patch) -> Iterator[Hub]:
    """A hub with the embedded model, and an empty cache."""
    with serving(Hub({"owner/tiny": {"main": embedded(tmp_path / "tiny")}})) as found:
        files = "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", found.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", found.url + files)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.chdir(tmp_path)
        start_again()
        yield found
    start_again()


def start_again() -> None:
    """Forget what this process knows: the next start asks anew."""
    download._fetched.cache_clear()


def fetch(name: str = NAME) -> Path:
    start_again()
    download.fetch_weights(name, lambda _: None)
    return download.fetch_small(name)


def printed(capsys: Capsys, *argv: str) -> tuple[int | str | None, str]:
    start_again()
    with pytest.raises(SystemExit) as ended:
        cli.parse(["tiny", "--model.path", *argv])
    out, err = capsys.readouterr()
    return ended.value.code, out + err


def test_a_plan_takes_the_small_files_and_says_what_a_start_downloads(
    hub: Hub, capsys: Capsys
) -> None:
    code, plan = printed(capsys, NAME, "--dry-run", "--device-gib", "80")
    assert code == 0 and "2.1 MiB of weights are not in the cache" in plan
    assert "a start downloads them" in plan and "Qwen3MoeForCausalLM" in plan
    assert hub.sent["config.json"] and not hub.sent[WEIGHTS]
    # What the plan left in the cache is not taken for the model.
    start_again()
    invocation = cli.parse(["tiny", "--model.path", NAME, "--parallel.ep", "1"])
    assert invocation.config.model.path == NAME  # what the run's config.yaml holds
    assert "downloading hub:owner/tiny: 2.1 MiB" in capsys.readouterr().out
    assert hub.sent[WEIGHTS] == (assets.TINY_MOE / WEIGHTS).stat().st_size


def test_neither_a_check_nor_a_start_with_a_mistake_downloads_weights(
    hub: Hub, capsys: Capsys
) -> None:
    cli.parse(["tiny", "--model.path", NAME, "--check"])
    assert "note: model.path hub:owner/tiny: 2.1 MiB of weights" in capsys.readouterr().out
    code, text = printed(capsys, NAME, "--parallel.ep", "1", "--train.lr", "-1")
    assert code == 2 and "train.lr" in text and "weights" not in text
    assert not hub.sent[WEIGHTS]


def test_a_model_by_name_is_read_like_its_folder(hub: Hub, tmp_path: Path) -> None:
    folder = fetch()
    assert ModelShape.read(NAME) == ModelShape.read(assets.TINY_MOE)
    assert read_small_files(NAME) == read_small_files(assets.TINY_MOE)
    with CheckpointReader(NAME) as reader, CheckpointReader(assets.TINY_MOE) as expected:
        assert reader.shapes == expected.shapes
        name = next(iter(reader.shapes))
        assert torch.equal(reader.read(name), expected.read(name))
    assert folder.is_relative_to(tmp_path / "cache")


def test_a_model_in_the_cache_needs_no_network_and_stays_as_it_is(
    hub: Hub, monkeypatch: Patch, tmp_path: Path
) -> None:
    first, asked = fetch(), sum(hub.asked.values())
    (tmp_path / "tiny" / "generation_config.json").write_text("{}")  # the branch moves
    assert fetch() == first and sum(hub.asked.values()) == asked
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert fetch() == first
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch() == first
    with pytest.raises(ShapeError, match=r"HF_HUB_OFFLINE forbids.*hf download owner/tiny --rev"):
        fetch(f"{NAME}@v2")


def test_a_revision_is_a_branch_or_a_commit(hub: Hub, tmp_path: Path) -> None:
    other = embedded(tmp_path / "other")
    (other / "generation_config.json").write_text("{}")
    hub.models["owner/tiny"]["v2"] = other
    assert read_small_files(fetch())["generation_config.json"] != b"{}"
    for revision in ("v2", sha_of(other)):
        folder = fetch(f"{NAME}@{revision}")
        assert (folder / "generation_config.json").read_text() == "{}"
        assert folder.name == sha_of(other)


def test_only_missing_shards_and_no_second_form_are_downloaded(hub: Hub, tmp_path: Path) -> None:
    hub.models["owner/tiny"]["main"] = sharded(tmp_path / "shards")
    folder = fetch()
    assert not hub.sent.keys() & {*TWICE}
    with CheckpointReader(folder) as reader:
        assert len(reader.shapes) == len(load_file(assets.TINY_MOE / WEIGHTS))
    lost, kept = (f"model-0000{i}-of-00002.safetensors" for i in (2, 1))
    (folder / lost).resolve().unlink()
    (folder / lost).unlink()
    hub.sent.clear()
    fetch()
    assert set(hub.sent) == {lost} and (folder / kept).is_file()


def test_an_interrupted_download_goes_on_with_the_files_that_are_missing(
    hub: Hub, tmp_path: Path
) -> None:
    hub.models["owner/tiny"]["main"] = folder = sharded(tmp_path / "shards")
    whole, cut = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    hub.stalls[cut] = 1000
    child = started(hub, tmp_path)
    there = tmp_path / "cache" / "models--owner--tiny" / "snapshots" / sha_of(folder) / whole
    assert hub.stalled.wait(100) and soon(there.exists, 100)
    child.kill()
    child.communicate()
    hub.sent.clear()
    fetch()
    assert dict(hub.sent) == {cut: (folder / cut).stat().st_size}


CHILD = """
from r3.tools import download as d
d.fetch_small('hub:owner/tiny')
d.fetch_weights('hub:owner/tiny', print)
"""


def started(hub: Hub, tmp_path: Path) -> subprocess.Popen[str]:
    """A process that downloads the model into the cache."""
    cache = {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path / "cache")}
    own = {**os.environ, **cache, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-c", CHILD], env=own, stdout=subprocess.PIPE, text=True
    )


def test_one_process_downloads_and_the_others_wait(hub: Hub, tmp_path: Path) -> None:
    children = [started(hub, tmp_path) for _ in range(3)]
    texts = [child.communicate(timeout=200)[0] for child in children]
    assert [child.returncode for child in children] == [0, 0, 0]
    assert sum("downloading hub:owner/tiny" in text for text in texts) == 1
    sizes = {file.name: file.stat().st_size for file in assets.TINY_MOE.iterdir()}
    assert dict(hub.sent) == sizes


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hub:owner/none", "is not on the hub, or is private. Fix: check the name"),
        ("hub:owner/closed", "is gated: its owners let in whom they accept. Fix: accept its terms"),
        (f"{NAME}@v9", "has no revision 'v9'. Fix: name a branch, tag or commit of owner/tiny"),
        ("hub:tiny", "is not a name on the hub. Fix: write hub:OWNER/NAME[@REVISION]"),
        ("hub:owner/tiny:train", "is not a name on the hub"),
        ("hub:owner/adapter", "has no config.json. Fix: give a model that transformers loads"),
        ("owner/tiny", "there is no such folder. Fix: write hub:owner/tiny for a model of the hub"),
    ],
)
def test_a_model_that_the_hub_does_not_give_is_named(
    name: str, message: str, hub: Hub, tmp_path: Path, capsys: Capsys
) -> None:
    hub.models["owner/closed"] = hub.models["owner/tiny"]
    hub.gated.add("owner/closed")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    hub.models["owner/adapter"] = {"main": tmp_path / "adapter"}
    code, text = printed(capsys, name, "--parallel.ep", "1")
    assert code == 2 and f"model.path = '{name}': {message}" in text


def test_weights_in_another_format_are_named(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "tiny" / WEIGHTS).rename(tmp_path / "tiny" / "pytorch_model.bin")
    with pytest.raises(ShapeError, match=r"has no \*\.safetensors files"):
        fetch()


def test_no_answer_names_the_mirror_and_the_cache(
    hub: Hub, monkeypatch: Patch, capsys: Capsys
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    code, text = printed(capsys, NAME, "--parallel.ep", "1")
    assert code == 2 and "the hub gives no answer: [Errno 111] Connection refused" in text
    assert "`hf download owner/tiny`" in text and "HF_ENDPOINT" in text


@pytest.mark.parametrize("mode", [(), ("--check",), ("--dry-run",)])
def test_a_full_disk_is_said_before_the_download(
    mode: tuple[str, ...], hub: Hub, capsys: Capsys
) -> None:
    hub.claimed[WEIGHTS] = 2**60
    code, text = printed(capsys, NAME, "--parallel.ep", "1", *mode)
    assert code == 2 and "1,073,741,824.0 GiB are to be downloaded, and the disk of" in text
    assert "HF_HUB_CACHE" in text and not hub.sent[WEIGHTS]


def test_a_teacher_and_a_reward_model_may_be_names_too(hub: Hub, capsys: Capsys) -> None:
    flags = ["--parallel.ep", "1", "--algo.teacher", NAME, "--dry-run"]
    code, text = printed(capsys, str(assets.TINY_MOE), *flags)
    assert code == 0 and "algo.teacher = 'hub:owner/tiny': 2.1 MiB of weights" in text
    flags = ["--reward.function", "model", "--reward.model_path", NAME, "--dry-run"]
    code, text = printed(capsys, str(assets.TINY_MOE), *flags)
    assert code == 2 and "is a checkpoint of Qwen3MoeForCausalLM, not of a sequence class" in text


def test_tensors_that_do_not_fit_are_named_before_the_download(
    hub: Hub, capsys: Capsys, tmp_path: Path
) -> None:
    """By the index. Prediction layers are left out, whether config.json counts them or not."""
    shape = ModelShape.read(assets.TINY_MOE)
    names = [*shape.tensor_shapes, "mtp.fc.weight", "mtp.layers.0.mlp.gate.weight"]
    index = tmp_path / "tiny" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, WEIGHTS)}))
    hub.models["owner/tiny"]["v2"] = other = embedded(tmp_path / "other")
    extra = f"model.layers.{shape.num_layers}.input_layernorm.weight"
    wrong = {"weight_map": dict.fromkeys([*names[1:], extra], WEIGHTS)}
    (other / index.name).write_text(json.dumps(wrong))
    cli.parse(["tiny", "--model.path", NAME, "--check"])
    assert "2.1 MiB of weights" in capsys.readouterr().out
    code, text = printed(capsys, f"{NAME}@v2")
    assert code == 2
    assert f"its tensors differ from what config.json implies: missing {names[0]}" in text
    assert f"unknown {extra}" in text
    assert not hub.sent[WEIGHTS]
