"""Checkpoints are read slice by slice and written file by file, never held as a whole."""

import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from r3 import assets
from r3.models import CheckpointReader, Kind, read_small_files, with_end_tokens, write_checkpoint
from r3.models.shape import ModelShape
from r3.policy.weight_slots import Slot, join_shards, load, split
from tests.tiny import edit_json

MIB = 2**20
SHAPE = replace(ModelShape.read(assets.TINY_MOE), num_heads=8, num_kv_heads=4, head_dim=4)
# kind -> HF tensors of one Megatron tensor: hidden size 6, 4 key-value groups of 2 query heads of 4
PARTS: dict[Kind, list[tuple[int, ...]]] = {
    "replicated": [(5, 6)],
    "column": [(8, 6)],
    "row": [(6, 8)],
    "gated": [(8, 6), (8, 6)],
    "qkv": [(32, 6), (16, 6), (16, 6)],
}


def _memory(key: str) -> int:
    """Bytes of this process: RssAnon (now, without mapped files) or VmHWM (most, ever since it was
    reset).
    """
    found = re.search(rf"^{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def _slot(kind: Kind, names: list[str], tensor: torch.Tensor, index: int, count: int) -> Slot:
    return Slot(
        name="it",
        hf=tuple(names),
        kind=kind,
        index=index,
        count=count,
        shape=tuple(tensor.shape),
        rows=0,
        item_size=tensor.element_size(),
        tensor=tensor,
    )


@pytest.mark.parametrize("kind", PARTS)
def test_every_cut_is_read_by_itself_and_together_they_are_the_tensors(
    kind: Kind, tmp_path: Path
) -> None:
    tensors = {f"{kind}.{i}": torch.randn(shape) for i, shape in enumerate(PARTS[kind])}
    save_file(tensors, str(tmp_path / "model.safetensors"))
    rows = sum(tensor.shape[0] for tensor in tensors.values())
    for count in (1,) if kind == "replicated" else (1, 2, 4):
        slices = []
        for index in range(count):
            size = (rows, 8 // count) if kind == "row" else (rows // count, 6)
            held = torch.full(size, torch.nan)
            with CheckpointReader(tmp_path) as reader:
                load([_slot(kind, [*tensors], held, index, count)], reader.read, SHAPE)
                # A rank reads what it holds and not a byte more.
                assert reader.bytes_read == held.nbytes >= reader.largest_read
            slices.append(held)
        whole = split(kind, join_shards(kind, slices), SHAPE)
        assert all(map(torch.equal, whole, tensors.values()))


def test_interleaving_puts_each_group_of_queries_before_its_key_and_value(tmp_path: Path) -> None:
    """Megatron's rows: for each key-value group its queries, its key, its value."""
    tensors = {
        name: torch.arange(rows).float()[:, None] + 100 * i
        for i, (name, rows) in enumerate(zip("qkv", (32, 16, 16), strict=True))
    }
    save_file(tensors, str(tmp_path / "model.safetensors"))
    second = torch.empty(32, 1)
    with CheckpointReader(tmp_path) as reader:
        load([_slot("qkv", ["q", "k", "v"], second, 1, 2)], reader.read, SHAPE)
    groups = [(16, 24), (108, 112), (208, 212), (24, 32), (112, 116), (212, 216)]
    assert second[:, 0].tolist() == [row for first, end in groups for row in range(first, end)]


def test_rows_of_a_padded_vocabulary_are_zero(tmp_path: Path) -> None:
    vocabulary = torch.randn(5, 6)
    save_file({"embed": vocabulary}, str(tmp_path / "model.safetensors"))
    slices = [torch.full((2, 6), torch.nan) for _ in range(4)]
    with CheckpointReader(tmp_path) as reader:
        slots = [_slot("column", ["embed"], part, i, 4) for i, part in enumerate(slices)]
        load(slots, reader.read, SHAPE)
        assert reader.bytes_read == vocabulary.nbytes
    assert torch.equal(torch.cat(slices), torch.cat([vocabulary, torch.zeros(3, 6)]))


@pytest.mark.parametrize("dim", [0, -1])
def test_reading_a_cut_takes_no_more_memory_than_the_cut(dim: int, tmp_path: Path) -> None:
    save_file({"large": torch.randn(4096, 4096)}, str(tmp_path / "model.safetensors"))
    with CheckpointReader(tmp_path) as reader:
        before = _memory("RssAnon")
        piece = reader.read("large", dim, 1, 4)
        # Every number of it is looked at
        assert piece.numel() == 4096 * 1024 and torch.isfinite(piece.max())
        # 64 MiB the whole, 16 a part; 8 for what python and the allocator keep
        assert _memory("RssAnon") - before <= 24 * MIB


def exported(folder: Path, **config: object) -> Path:
    """An export of one tensor beside the small files of `folder`, which is then deleted."""
    edit_json(folder / "config.json", **config)
    small_files, out = read_small_files(folder), folder.with_name("export")
    shutil.rmtree(folder)  # an export depends on nothing that may have changed since the start
    weights = [("model.norm.weight", torch.ones(4, dtype=torch.bfloat16))]
    kind: dict[str, Any] = {"dtype": torch.bfloat16, "metadata": {"step": 2}}
    write_checkpoint(out, iter(weights), small_files=small_files, **kind)
    return out


def test_an_export_renders_prompts_as_its_starting_model(model: Path) -> None:
    from transformers import AutoTokenizer

    own = (model / "chat_template.jinja").read_text()
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tool_use.jinja").write_text("TOOLS " + own)
    for name in ("vocab.txt", "tiktoken.model", "tekken.json", "extra_special_tokens.json"):
        (model / name).write_text("{}")
    for name in ("adapter_config.json", "pytorch_model.bin", "r3.json", "README.md"):
        (model / name).write_text("{}")
    asked = [{"role": "user", "content": "3+4?"}]
    call = {"type": "function", "function": {"name": "calc", "parameters": {}}}

    def rendered(folder: Path) -> list[str]:
        render = AutoTokenizer.from_pretrained(folder).apply_chat_template
        return [render(asked, tools=tools, tokenize=False) for tools in (None, [call])]

    before = rendered(model)
    names = {path.name for path in model.iterdir()}
    out = exported(model)
    assert rendered(out) == before and before[1].startswith("TOOLS")
    left_out = {"adapter_config.json", "pytorch_model.bin", "README.md", "model.safetensors"}
    weights = {"model-00001.safetensors", "model.safetensors.index.json"}
    assert {path.name for path in out.iterdir()} == (names - left_out) | weights
    assert json.loads((out / "r3.json").read_text()) == {"step": 2}


def test_generation_config_names_all_tokens_that_ended_a_turn(model: Path) -> None:
    from transformers import GenerationConfig

    files = read_small_files(model)
    assert with_end_tokens(files, [2]) == files  # nothing to add: byte for byte as it was
    base = {**files, "generation_config.json": b'{"eos_token_id": 0, "top_p": 0.9}'}
    added = with_end_tokens(base, [2, 0])["generation_config.json"]
    (model / "generation_config.json").write_bytes(added)
    read = GenerationConfig.from_pretrained(model)
    assert (read.eos_token_id, read.top_p) == ([0, 2], 0.9)
    del base["generation_config.json"]  # then config.json counts
    keys = json.loads(files["config.json"]) | {"eos_token_id": 0}
    base["config.json"] = json.dumps(keys).encode()
    added = with_end_tokens(base, [2])["generation_config.json"]
    assert json.loads(added) == {"eos_token_id": [0, 2]}


@pytest.mark.parametrize("has_code", [True, False])
def test_auto_map_is_kept_with_its_files_or_dropped(model: Path, has_code: bool) -> None:
    from transformers import AutoConfig

    auto_map = {"AutoConfig": "configuration_own.OwnConfig", "AutoModel": "them/repo--m.Model"}
    if has_code:
        (model / "configuration_own.py").write_text(
            "from transformers import Qwen3MoeConfig\nclass OwnConfig(Qwen3MoeConfig): pass\n"
        )
    out = exported(model, auto_map=auto_map)
    name = type(AutoConfig.from_pretrained(out, trust_remote_code=True)).__name__
    assert name == ("OwnConfig" if has_code else "Qwen3MoeConfig")
    assert type(AutoConfig.from_pretrained(out)).__name__ == "Qwen3MoeConfig"
    assert ("auto_map" in json.loads((out / "config.json").read_text())) == has_code


@pytest.mark.parametrize("umask", [0o022, 0o027])
def test_files_of_an_export_have_the_mode_of_the_umask(model: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        out = exported(model)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in out.iterdir()} == {0o666 & ~umask}


def test_writing_holds_one_file_of_tensors_and_not_the_model(tmp_path: Path) -> None:
    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for i in range(8):  # 36 MiB each: what is larger than 32, malloc gives back at once
            yield f"model.layers.{i}.weight", torch.full((2304, 4096), float(i))

    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
    before = _memory("VmHWM")
    out = tmp_path / "out"
    kind: dict[str, Any] = {"dtype": torch.float32, "metadata": {}, "bytes_per_file": 72 * MIB}
    write_checkpoint(out, stream(), small_files=read_small_files(assets.TINY_MOE), **kind)
    # 288 MiB in all. A file's worth, the tensor under way and its copy, 16 for the rest.
    assert _memory("VmHWM") - before <= (72 + 36 + 36 + 16) * MIB
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 4
    for i, name in ((i, f"model.layers.{i}.weight") for i in (0, 7)):
        assert (load_file(out / index["weight_map"][name])[name] == i).all()
    shutil.rmtree(out)
