"""Quantised checkpoints: values are transformers' or the formula's, and exports are bfloat16."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from r3.models.hf_checkpoint import (
    CheckpointError,
    CheckpointReader,
    joined,
    read_small_files,
    write_checkpoint,
)
from r3.models.shape import ModelShape, ShapeError, checkpoint_faults
from tests.families import family_checkpoint, in_mxfp4

pytestmark = pytest.mark.unit

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}


def test_mxfp4_is_read_as_transformers_reads_it_and_exported_in_bfloat16(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    folder, out = family_checkpoint(tmp_path / "a", "gpt_oss", intermediate_size=32), tmp_path / "b"
    tensors = in_mxfp4(folder)
    shape = ModelShape.read(folder)
    assert shape.quantised == "mxfp4" and checkpoint_faults(folder, shape) == []
    name = "model.layers.1.mlp.experts"
    both, down = (
        convert_moe_packed_tensors(*(tensors[f"{name}.{x}_{y}"] for y in ("blocks", "scales")))
        for x in ("gate_up_proj", "down_proj")
    )
    with CheckpointReader(folder) as reader:
        reader.require(shape)
        for part, expected in ((0, both[5, :, 0::2]), (1, both[5, :, 1::2]), (2, down[5])):
            matrix = f"{name}.5.{('gate', 'up', 'down')[part]}_proj.weight"
            assert torch.equal(reader.read(matrix), expected.t())
            assert torch.equal(reader.read(matrix, 0, 1, 2), expected.t()[len(expected.t()) // 2 :])
            assert torch.equal(reader.read(matrix, -1, 0, 2), expected.t()[:, : len(expected) // 2])
        assert reader.largest_read <= tensors[f"{name}.gate_up_proj_blocks"][0].nbytes // 2
        weights = joined(((each, reader.read(each)) for each in shape.tensor_shapes), shape)
        small = read_small_files(folder)
        write_checkpoint(out, weights, small_files=small, dtype=torch.bfloat16, metadata={})
    exported = load_file(out / "model-00001.safetensors")
    assert torch.equal(exported[f"{name}.gate_up_proj"], both)
    assert torch.equal(exported[f"{name}.down_proj"], down)
    config = json.loads((out / "config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == "bfloat16"
    assert (
        ModelShape.read(out).quantised == "" and checkpoint_faults(out, ModelShape.read(out)) == []
    )
    (lost,) = shape.faults(
        {
            key: tuple(each.shape)
            for key, each in tensors.items()
            if key != f"{name}.down_proj_scales"
        }
    )
    assert lost == f"missing {name}.down_proj_scales"


def in_fp8(folder: Path) -> dict[str, torch.Tensor]:
    """Store the matrices of layers in FP8, with random factors; return all tensors."""
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        grid = [-(-n // 128) for n in tensors[name].shape]
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.rand(grid) + 0.5
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = FP8
    (folder / "config.json").write_text(json.dumps(config))
    return tensors


def test_fp8_blocks_are_read_slice_by_slice(tmp_path: Path) -> None:
    sizes = dict(hidden_size=192, moe_intermediate_size=264, num_hidden_layers=1)
    folder = family_checkpoint(tmp_path, "qwen3_moe", **sizes)
    tensors = in_fp8(folder)
    shape = ModelShape.read(folder)
    assert shape.quantised == "fp8" and checkpoint_faults(folder, shape) == []
    name = "model.layers.0.mlp.experts.2.up_proj.weight"
    exact, factors = tensors[name].float(), tensors[f"{name}_scale_inv"]
    for row in range(exact.shape[0]):
        for column in range(exact.shape[1]):
            exact[row, column] *= factors[row // 128, column // 128]
    exact = exact.bfloat16()
    with CheckpointReader(folder) as reader:
        reader.require(shape)
        assert torch.equal(reader.read(name), exact)
        assert torch.equal(reader.read(name, 0, 1, 2), exact[132:])
        assert torch.equal(reader.read(name, -1, 1, 2), exact[:, 96:])
        norm = "model.norm.weight"
        assert torch.equal(reader.read(norm), tensors[norm])
    wrong = {key: tuple(each.shape) for key, each in tensors.items()} | {
        f"{name}_scale_inv": (1, 2)
    }
    assert shape.faults(wrong) == [f"{name}_scale_inv has shape (1, 2), config.json implies (3, 2)"]


def test_bytes_without_factors_are_refused(tmp_path: Path) -> None:
    folder = family_checkpoint(tmp_path, "qwen3_moe", num_hidden_layers=1)
    tensors = in_fp8(folder)
    name = "model.layers.0.self_attn.o_proj.weight"
    del tensors[f"{name}_scale_inv"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    shape = ModelShape.read(folder)
    with pytest.raises(ShapeError, match=r"o_proj\.weight has data type F8_E4M3 and no model"):
        checkpoint_faults(folder, shape)
    with CheckpointReader(folder) as reader:
        reader.require(shape)
        with pytest.raises(CheckpointError, match=r"is torch\.float8_e4m3fn without"):
            reader.read(name)


@pytest.mark.parametrize(
    ("settings", "shown"),
    [
        (FP8 | {"weight_block_size": [1, 128]}, r"'fp8' and weight_block_size \[1, 128\]"),
        (FP8 | {"fmt": "e5m2"}, "'fp8'"),
        ({"quant_method": "mxfp4"}, "'mxfp4'"),  # the layout of gpt-oss, which Qwen3-MoE has not
        ({"quant_method": "compressed-tensors"}, "'compressed-tensors'"),
        (["fp8"], "None"),
    ],
)
def test_other_ways_are_refused_by_name(settings: object, shown: str, tmp_path: Path) -> None:
    config = json.loads((family_checkpoint(tmp_path, "qwen3_moe") / "config.json").read_text())
    with pytest.raises(ShapeError, match=f"not supported with quant_method {shown}"):
        ModelShape.from_hf({**config, "quantization_config": settings})
