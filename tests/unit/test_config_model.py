"""What the checks of a config say about the model folder; sizes in config.json."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from r3.assets import TINY_MOE
from r3.models import CheckpointReader, checkpoint_faults, checkpoint_tensors, weight_files
from r3.models.shape import ModelShape, ShapeError
from tests.families import family_checkpoint
from tests.settings import found
from tests.tiny import edit_json

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
HF_TINY = json.loads((TINY_MOE / "config.json").read_text())


def rename(name: str, other: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).rename(folder / other)


def without(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


def with_hf(**changes: Any) -> Callable[[Path], object]:
    return lambda folder: (folder / "config.json").write_text(json.dumps(HF_TINY | changes))


def write(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


def weight_map(*names: str, file: str = "model-00001-of-00002.safetensors") -> bytes:
    """An index: these tensors, or those of the embedded model, are in one file."""
    tensors = names or ModelShape.read(TINY_MOE).tensor_shapes
    return json.dumps({"weight_map": dict.fromkeys(tensors, file)}).encode()


@pytest.mark.parametrize(
    ("spoil", "rule"),
    [
        (without("config.json"), "no config.json"),
        (write("config.json", b"{"), "config.json is not JSON"),
        (write("config.json", b"[]"), "not a JSON object"),
        (with_hf(architectures=None), "architecture None is not known"),
        (with_hf(architectures=["NemotronHForCausalLM"]), "not supported: R3 has no Mamba-2"),
        (with_hf(hidden_size="wide"), "hidden_size must be a positive integer, got 'wide'"),
        (with_hf(num_hidden_layers=5), "missing model.layers."),
        (with_hf(vocab_size=500), "model.embed_tokens.weight has shape (512, 128), config.json"),
        (without("tokenizer.json"), "no tokenizer.json"),
        (rename("tokenizer.json", "tiktoken.model"), 'see "Models without tokenizer.json" in docs'),
        (without("chat_template.jinja"), "no chat template"),
        (without("model.safetensors"), "no *.safetensors files"),
        (write(WEIGHTS, b"version https://git-lfs.github.com/spec/v1\n"), "git-lfs pointer"),
        (write(WEIGHTS, (TINY_MOE / WEIGHTS).read_bytes()[:-1]), "unfinished download"),
        (write(INDEX, weight_map()), "1 of 1 shards are missing: model-00001-of-00002.safetensors"),
        (write(INDEX, weight_map("a")), "missing model.embed_tokens.weight"),
    ],
)
def test_broken_model_is_refused(model: Path, spoil: Callable[[Path], object], rule: str) -> None:
    spoil(model)
    problems = found({"model.path": str(model)})
    assert problems.keys() == {"model.path"} and rule in problems["model.path"]


@pytest.mark.parametrize(
    ("names", "rule", "fix"),
    [
        (["adapter_config.json"], "is an adapter", "as lora.start"),
        (["r3.json", "manifest.json"], "is a checkpoint of a run", "r3.export RUN --step N"),
        (["run.json"], "is the folder of a run", "r3.export RUN"),
    ],
)
def test_folder_of_no_model_is_named(tmp_path: Path, names: list[str], rule: str, fix: str) -> None:
    for name in names:
        write(name, b"{}")(tmp_path)
    problems = found({"model.path": str(tmp_path)})
    said, _, how = problems["model.path"].partition(". Fix: ")
    assert problems.keys() == {"model.path"} and f"': {rule}" in said and fix in how


def two_of_three_shards(folder: Path) -> None:
    """The weights under the names of shards, without an index."""
    for number in (1, 3):
        shutil.copy(folder / WEIGHTS, folder / f"model-{number:05}-of-00003.safetensors")
    (folder / WEIGHTS).unlink()


def index_of_another(folder: Path) -> None:
    """An index that does not name the file transformers would read."""
    shutil.copy(folder / "model.safetensors", folder / "one.safetensors")
    write(INDEX, weight_map("a", file="one.safetensors"))(folder)


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (two_of_three_shards, "1 of 3 shards are missing: model-00002-of-00003.safetensors"),
        (index_of_another, "model.safetensors is not in model.safetensors.index.json"),
    ],
)
def test_part_of_a_model_is_named(model: Path, make: Callable[[Path], object], rule: str) -> None:
    make(model)
    with pytest.raises(ShapeError, match=re.escape(rule)):
        checkpoint_tensors(model)
    with pytest.raises(ShapeError, match=re.escape(rule)):
        CheckpointReader(model)


@pytest.mark.parametrize("has_index", [False, True])
def test_weights_of_others_beside_the_model_are_left_out(model: Path, has_index: bool) -> None:
    whole = model / "model.safetensors"
    for name in ("consolidated.safetensors", "adapter_model.safetensors"):
        shutil.copy(whole, model / name)
    if has_index:
        whole = whole.rename(model / "model-00001-of-00001.safetensors")
        write(INDEX, weight_map(file=whole.name))(model)
    assert weight_files(model) == [whole]
    assert found({"model.path": str(model)}) == {}
    with CheckpointReader(model) as reader:
        reader.require(ModelShape.read(model))


def test_an_output_head_of_its_own_in_a_tied_model_is_refused(tmp_path: Path) -> None:
    folder = family_checkpoint(tmp_path, "qwen3", tied=True)
    shape = ModelShape.read(folder)
    tensors = load_file(folder / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors | {"lm_head.weight": head}, folder / "model.safetensors")
    assert checkpoint_faults(folder, shape) == []  # an equal copy
    head[-1, -1] += 0.5
    save_file(tensors | {"lm_head.weight": head}, folder / "model.safetensors")
    (fault,) = checkpoint_faults(folder, shape)
    assert "tie_word_embeddings is true and lm_head.weight differs" in fault


def test_a_chat_template_may_stand_in_the_tokenizer_config(model: Path) -> None:
    template = (model / "chat_template.jinja").read_text()
    edit_json(model / "tokenizer_config.json", chat_template=template)
    (model / "chat_template.jinja").unlink()
    assert found({"model.path": str(model)}) == {}


def test_spellings_of_config_json() -> None:
    older = {name: HF_TINY[name] for name in HF_TINY.keys() - {"num_local_experts"}}
    older |= {"num_experts": 8, "rope_parameters": None, "rope_theta": 10000.0}
    assert ModelShape.from_hf(older) == ModelShape.from_hf(HF_TINY)
    every_other = {"num_hidden_layers": 6, "mlp_only_layers": [3], "decoder_sparse_step": 2}
    mixed = ModelShape.from_hf(HF_TINY | every_other)
    assert mixed.moe_layers == (1, 5)
    assert "model.layers.3.mlp.gate_proj.weight" in mixed.tensor_shapes
    with pytest.raises(ShapeError, match="num_experts_per_tok"):
        ModelShape.from_hf(HF_TINY | {"num_experts_per_tok": None})
