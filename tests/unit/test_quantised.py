"""Quantised checkpoints: values are transformers' or the formula's, and exports are bfloat16."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from r3.models import (
    CheckpointReader,
    checkpoint_faults,
    joined,
    read_small_files,
    text_name,
    write_checkpoint,
)
from r3.models.shape import ModelShape, ShapeError
from tests.families import family_checkpoint, in_mxfp4, wrapped_checkpoint
from tests.tiny import edit_json

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}


MXFP4 = {"quant_method": "mxfp4"}
Tensors = dict[str, torch.Tensor]


def sizes_of(tensors: Tensors) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def store(folder: Path, tensors: Tensors, settings: object) -> None:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    edit_json(folder / "config.json", quantization_config=settings)


@contextmanager
def opened(folder: Path, kind: str) -> Iterator[tuple[ModelShape, CheckpointReader]]:
    """A checkpoint without faults, quantised in this way; "None" for one that is not."""
    shape = ModelShape.read(folder)
    assert str(shape.quantised) == kind and checkpoint_faults(folder, shape) == []
    with CheckpointReader(folder) as reader:
        reader.require(shape)
        yield shape, reader


def require_slices(reader: CheckpointReader, name: str, matrix: torch.Tensor) -> None:
    """The reader gives the matrix, and half of its rows and columns."""
    rows, columns = (n // 2 for n in matrix.shape)
    assert torch.equal(reader.read(name), matrix), name
    assert torch.equal(reader.read(name, 0, 1, 2), matrix[rows:])
    assert torch.equal(reader.read(name, -1, 1, 2), matrix[:, columns:])


def test_mxfp4_is_read_as_transformers_reads_it_and_exported_in_bfloat16(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    folder, out = family_checkpoint(tmp_path / "a", "gpt_oss", intermediate_size=32), tmp_path / "b"
    tensors = in_mxfp4(folder)
    for scales in (each for name, each in tensors.items() if name.endswith("_scales")):
        scales.copy_((torch.arange(scales.numel()) % 254 + 1).view(scales.shape))  # all exponents
    store(folder, tensors, MXFP4)
    name = "model.layers.1.mlp.experts"
    both, down = (
        convert_moe_packed_tensors(*(tensors[f"{name}.{x}_{y}"] for y in ("blocks", "scales")))
        for x in ("gate_up_proj", "down_proj")
    )
    with opened(folder, "mxfp4") as (shape, reader):
        for part, expected in ((0, both[5, :, 0::2]), (1, both[5, :, 1::2]), (2, down[5])):
            matrix = f"{name}.5.{('gate', 'up', 'down')[part]}_proj.weight"
            require_slices(reader, matrix, expected.t())
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
    with opened(out, "None"):
        pass
    store(out, exported, MXFP4)  # as tools leave it that dequantise
    (out / "model-00001.safetensors").unlink()
    (out / "model.safetensors.index.json").unlink()
    with CheckpointReader(out) as reader:
        reader.require(ModelShape.read(out))
        assert torch.equal(reader.read(f"{name}.5.down_proj.weight"), down[5].t())
    del tensors[f"{name}.down_proj_scales"]
    assert shape.faults(sizes_of(tensors)) == [f"missing {name}.down_proj_scales"]


def in_fp8(folder: Path) -> Tensors:
    """Store the matrices of layers in FP8, with random factors; return all tensors."""
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("_proj.weight", "_proj"))]:
        *experts, rows, columns = tensors[name].shape
        grid = *experts, -(-rows // 128), -(-columns // 128)
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.rand(grid) + 0.5
    store(folder, tensors, FP8)
    return tensors


def dequantised(tensors: Tensors, name: str) -> torch.Tensor:
    """Each number times the factor of its block of 128 rows and columns."""
    exact, factors = tensors[name].float(), tensors[f"{name}_scale_inv"]
    for row in range(exact.shape[-2]):
        for column in range(exact.shape[-1]):
            exact[..., row, column] *= factors[..., row // 128, column // 128]
    return exact.bfloat16()


def test_fp8_blocks_are_read_slice_by_slice(tmp_path: Path) -> None:
    sizes: dict[str, Any] = dict(hidden_size=192, moe_intermediate_size=264, num_hidden_layers=1)
    folder = family_checkpoint(tmp_path, "qwen3_moe", **sizes)
    tensors = in_fp8(folder)
    name = "model.layers.0.mlp.experts.2.up_proj.weight"
    with opened(folder, "fp8") as (shape, reader):
        require_slices(reader, name, dequantised(tensors, name))
        norm = "model.norm.weight"
        assert torch.equal(reader.read(norm), tensors[norm])
    wrong = sizes_of(tensors) | {f"{name}_scale_inv": (1, 2)}
    assert shape.faults(wrong) == [f"{name}_scale_inv has shape (1, 2), config.json implies (3, 2)"]


def test_fp8_experts_in_one_tensor_have_the_blocks_of_the_whole(tmp_path: Path) -> None:
    """Qwen3.5: gate and up of 200 rows share the second block of an expert's 400."""
    wrapped_checkpoint(tmp_path, stacked=True, hidden_size=160, moe_intermediate_size=200)
    tensors = in_fp8(tmp_path)
    layer = "layers.2.mlp.experts."
    both, down = (
        dequantised(tensors, f"model.language_model.{layer}{part}")[5]
        for part in ("gate_up_proj", "down_proj")
    )
    gate, up = both.chunk(2)
    with opened(tmp_path, "fp8") as (shape, reader):
        for name, matrix in (("gate", gate), ("up", up), ("down", down)):
            require_slices(reader, f"model.{layer}5.{name}_proj.weight", matrix)
        assert reader.largest_read <= gate.numel(), "one expert's matrix at a time"
    found = sizes_of(tensors)
    name = f"model.language_model.{layer}gate_up_proj_scale_inv"
    assert found[name] == (8, 4, 2)
    wrong = {text_name(each): size for each, size in (found | {name: (1, 4, 2)}).items()}
    (fault,) = shape.faults(wrong)
    assert fault.endswith("_scale_inv has shape (1, 4, 2), config.json implies (8, 4, 2)")


INT4: dict[str, Any] = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
INT4 |= {"group_size": 32, "actorder": None, "dynamic": False}


def packed_settings(weights: dict[str, Any] = INT4, **keys: Any) -> dict[str, Any]:
    """As Kimi-K2-Thinking has them; `ignore` says nothing that the files do not say."""
    scheme = {"input_activations": None, "targets": ["Linear"], "weights": weights}
    common: dict[str, Any] = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    common |= {"ignore": ["lm_head", "re:.*self_attn.*"], "config_groups": {"a": scheme}}
    return common | keys


@pytest.mark.parametrize(
    ("weights", "factors"),
    [
        (INT4, torch.bfloat16),
        (INT4 | {"group_size": 128, "symmetric": False}, torch.float16),
        # No width is a multiple of the eight values that share an int32.
        (INT4 | {"strategy": "channel", "group_size": None, "symmetric": False}, torch.float32),
    ],
)
def test_int4_is_read_as_compressed_tensors_reads_it(
    weights: dict[str, Any], factors: torch.dtype, tmp_path: Path
) -> None:
    """Kimi-K2-Thinking's experts: packed by groups, with factors in another file."""
    from compressed_tensors.compressors import PackedQuantizationCompressor as Packed
    from compressed_tensors.quantization import QuantizationScheme

    width = 100 if weights["strategy"] == "channel" else 256
    sizes = dict.fromkeys(("hidden_size", "moe_intermediate_size"), width)
    folder = family_checkpoint(tmp_path, "qwen3_moe", **sizes, num_hidden_layers=2)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    tensors = load_file(folder / "model.safetensors")
    exact, generator = Tensors(), torch.Generator().manual_seed(0)
    for name in [name for name in tensors if ".1.mlp.experts." in name]:
        rows, columns = tensors[name].shape
        groups = columns // (weights["group_size"] or columns)
        zeros = torch.randint(-8, 8, (rows, groups), generator=generator, dtype=torch.int8)
        matrix = {
            "weight": tensors.pop(name),
            "weight_scale": (torch.rand(rows, groups, generator=generator) / 8).to(factors),
            **({} if weights["symmetric"] else {"weight_zero_point": zeros}),
        }
        stored = Packed.compress(matrix, scheme)
        exact[name] = Packed.decompress(stored, scheme)["weight"].bfloat16()
        tensors |= {f"{name.removesuffix('weight')}{key}": value for key, value in stored.items()}
    store(folder, tensors, packed_settings(weights))
    aside = {name: tensors.pop(name) for name in [*tensors] if name.endswith("_scale")}
    save_file(tensors, folder / "model-00001-of-00002.safetensors")
    save_file(aside, folder / "model-00002-of-00002.safetensors")
    (folder / "model.safetensors").unlink()
    with opened(folder, "int4") as (shape, reader):
        for name, matrix in exact.items():
            require_slices(reader, name, matrix)
        assert reader.largest_read <= width * -(-width // 8) * 4, "a matrix at a time"
        plain = "model.layers.0.mlp.experts.3.up_proj.weight"
        assert torch.equal(reader.read(plain), tensors[plain])
    found = sizes_of(tensors | aside)
    del found[f"{name}_scale"]
    wrong = found | {f"{name}_packed": (width, 3)}
    missing, misshaped = shape.faults(wrong)
    assert missing == f"missing {name}_scale"
    assert misshaped.startswith(f"{name}_packed has shape ({width}, 3), config.json implies")


@pytest.mark.parametrize(
    ("settings", "shown"),
    [
        # Another number format with names of the same kind, and a factor per tensor beside them.
        (packed_settings(format="nvfp4-pack-quantized"), "format 'nvfp4"),
        (packed_settings(INT4 | {"num_bits": 8}), "num_bits 8"),
        (packed_settings(INT4 | {"actorder": "group"}), "actorder 'group'"),
        (packed_settings(INT4 | {"group_size": -1}), "group_size -1"),
        (packed_settings(transform_config={"config_groups": {"u": {}}}), "transform_config"),
        (packed_settings(sparsity_config={"format": "sparse-24"}), "sparsity_config"),
    ],
)
def test_other_packs_are_refused_by_name(settings: object, shown: str, tmp_path: Path) -> None:
    config = json.loads((family_checkpoint(tmp_path, "qwen3_moe") / "config.json").read_text())
    with pytest.raises(ShapeError, match=f"not supported with quant_method .* and {shown}"):
        ModelShape.from_hf({**config, "quantization_config": settings})


O_PROJ = "model.layers.0.self_attn.o_proj.weight"


def plain_files(tensors: Tensors) -> torch.Tensor:
    """What tools write that dequantise and leave config.json as it was."""
    return tensors[O_PROJ]


def powers_of_two(tensors: Tensors) -> torch.Tensor:
    """DeepSeek-V3.1: factors that are powers of two, in float32."""
    tensors |= {O_PROJ: (whole := tensors[O_PROJ].to(torch.float8_e4m3fn))}
    tensors[f"{O_PROJ}_scale_inv"] = torch.full((1, 1), 2.0**-9)
    return (whole.float() / 512).bfloat16()


def one_byte_powers(tensors: Tensors) -> None:
    powers_of_two(tensors)
    factors = f"{O_PROJ}_scale_inv"
    tensors[factors] = tensors[factors].to(torch.float8_e8m0fnu)


def bytes_alone(tensors: Tensors) -> None:
    tensors[O_PROJ] = tensors[O_PROJ].to(torch.float8_e4m3fn)


def factors_by_row(tensors: Tensors) -> None:
    bytes_alone(tensors)
    tensors[f"{O_PROJ}_scale"] = torch.ones(len(tensors[O_PROJ]), 1)


def factors_alone(tensors: Tensors) -> None:
    """Converted before, with the factors left in: they must not be applied again."""
    tensors |= {O_PROJ: tensors[O_PROJ].bfloat16(), f"{O_PROJ}_scale_inv": torch.ones(1, 1)}


def permuted(tensors: Tensors) -> None:
    rows, columns = tensors.pop(O_PROJ).shape
    tensors[f"{O_PROJ}_packed"] = torch.zeros(rows, columns // 8, dtype=torch.int32)
    tensors[f"{O_PROJ}_scale"] = torch.ones(rows, columns // 32)
    tensors[f"{O_PROJ}_shape"] = torch.tensor([rows, columns])
    tensors[f"{O_PROJ}_g_idx"] = torch.zeros(columns, dtype=torch.int32)


def integers(tensors: Tensors) -> None:
    tensors[O_PROJ] = tensors[O_PROJ].int()


# What reading says where nobody looked before.
UNREADABLE = {bytes_alone: "float8_e4m3fn without", factors_alone: "bfloat16 with model"}


@pytest.mark.parametrize(
    ("settings", "change", "said"),
    [
        (FP8, plain_files, ""),
        (packed_settings(), plain_files, ""),
        (FP8 | {"scale_fmt": "ue8m0", "modules_to_not_convert": ["lm_head"]}, powers_of_two, ""),
        # MiniMax-M2 names torch's data type; others have no such key.
        (FP8 | {"fmt": "float8_e4m3fn", "activation_scheme": "dynamic"}, powers_of_two, ""),
        ({key: FP8[key] for key in ("quant_method", "weight_block_size")}, powers_of_two, ""),
        (FP8, one_byte_powers, "_scale_inv in model.safetensors has data type F8_E8M0"),
        (FP8, factors_by_row, "has data type F8_E4M3 and no"),
        (FP8, bytes_alone, r"o_proj\.weight has data type F8_E4M3 and no model"),
        (FP8, factors_alone, r"o_proj\.weight_scale_inv and is not of type"),
        (packed_settings(), permuted, "_g_idx in model.safetensors has data type I32"),
        (packed_settings(), integers, "o_proj.weight in model.safetensors has data type I32"),
        (None, powers_of_two, "has data type F8_E4M3"),
    ],
)
def test_forms_that_users_report_are_read_or_refused(
    settings: object, change: Callable[[Tensors], torch.Tensor | None], said: str, tmp_path: Path
) -> None:
    folder = family_checkpoint(tmp_path, "qwen3_moe", num_hidden_layers=1)
    tensors = load_file(folder / "model.safetensors")
    expected = change(tensors)
    store(folder, tensors, settings)
    shape = ModelShape.read(folder)
    with CheckpointReader(folder) as reader:
        if not said:
            assert checkpoint_faults(folder, shape) == []
            reader.require(shape)
            assert expected is not None and torch.equal(reader.read(O_PROJ), expected)
            return
        with pytest.raises(ShapeError, match=said):
            checkpoint_faults(folder, shape)
        if change in UNREADABLE:
            reader.require(shape)
            with pytest.raises(ShapeError, match=UNREADABLE[change]):
                reader.read(O_PROJ)


def test_the_text_model_of_a_quantised_whole_is_read_with_its_factors(tmp_path: Path) -> None:
    """Qwen3.5 in FP8, whose names have another beginning."""
    wrapped_checkpoint(tmp_path, stacked=False)
    tensors = in_fp8(tmp_path)
    name = "layers.0.mlp.experts.0.down_proj.weight"
    with opened(tmp_path, "fp8") as (_, reader):
        expected = dequantised(tensors, f"model.language_model.{name}")
        assert torch.equal(reader.read(f"model.{name}"), expected)
