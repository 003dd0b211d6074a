"""Every family's sizes and tensor names, against what transformers writes to disk; and what is
refused, by key.
"""

import ast
import dataclasses
import json
import re
from dataclasses import asdict
from importlib import util
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from r3 import assets
from r3.configs import KNOWN_SHAPES
from r3.models import (
    CheckpointReader,
    checkpoint_faults,
    checkpoint_tensors,
    families,
    implied_keys,
    joined,
    read_small_files,
    with_end_tokens,
    write_checkpoint,
)
from r3.models.shape import ModelShape, ShapeError
from r3.tools.dry_run import left_out
from r3.tools.planning.memory_plan import state_bytes
from tests.families import FAMILIES, MOE_FAMILIES, family_checkpoint, wrapped_checkpoint
from tests.published import LAYOUTS
from tests.tables import table

# Ling has no class there, and no tied embeddings in vLLM.
OF_TRANSFORMERS = [name for name in FAMILIES if name != "ling"]

Folders = dict[str, Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """A checkpoint of every family."""
    base = tmp_path_factory.mktemp("families")
    return {name: family_checkpoint(base / name, name) for name in FAMILIES}


@pytest.fixture
def hf(name: str, folders: Folders) -> dict[str, Any]:
    """Keys of config.json of the family of a case."""
    return dict(json.loads((folders[name] / "config.json").read_text()))


def test_every_known_architecture_is_tried_here() -> None:
    assert {model_type for model_type, _ in FAMILIES.values()} == {
        family.model_type for family in families.FAMILIES.values()
    }


def test_what_is_proved_of_a_family_is_what_is_tried() -> None:
    proved: dict[str, set[str]] = {proof: set() for proof in families.PROOFS}
    for family in families.FAMILIES.values():
        for proof in family.proved:
            proved[proof].add(family.model_type)
    assert proved["policy"] == {model_type for model_type, _ in FAMILIES.values()}
    layouts = {FAMILIES[each.family][0] for each in LAYOUTS.values()}
    assert proved["engine"] == layouts, "tests/matrix runs them"
    embedded = json.loads((assets.TINY_MOE / "config.json").read_text())
    assert proved["runs"] == {embedded["model_type"]}


@pytest.mark.parametrize("name", FAMILIES)
def test_tensor_shapes_are_those_that_transformers_writes(name: str, folders: Folders) -> None:
    shape = ModelShape.read(folders[name])
    tensors = checkpoint_tensors(folders[name])
    assert shape.stored_shapes == {
        tensor: size for tensor, size in tensors.items() if not shape.is_kept(tensor)
    }
    assert shape.faults(checkpoint_tensors(folders[name])) == []
    assert bool(shape.moe_layers) == (name in MOE_FAMILIES)


@pytest.mark.parametrize("name", OF_TRANSFORMERS)
def test_tied_embeddings_are_one_tensor(name: str, tmp_path: Path) -> None:
    folder = family_checkpoint(tmp_path, name, tied=True)
    shape, tensors = ModelShape.read(folder), checkpoint_tensors(folder)
    tensors = {tensor: size for tensor, size in tensors.items() if not shape.is_kept(tensor)}
    assert shape.tied and "lm_head.weight" not in shape.tensor_shapes
    assert shape.stored_shapes == tensors
    # Some checkpoints store the copy all the same.
    assert shape.faults(tensors | {"lm_head.weight": (512, 64)}) == []


@pytest.mark.parametrize("name", OF_TRANSFORMERS)
@pytest.mark.parametrize("defaults", [False, True])
def test_facts_of_config_json_match_transformers(
    defaults: bool, name: str, hf: dict[str, Any], tmp_path: Path
) -> None:
    if defaults:
        del hf["rope_parameters"]["rope_theta"], hf["rms_norm_eps"]
    (tmp_path / "config.json").write_text(json.dumps(hf))
    shape, theirs = ModelShape.from_hf(hf), AutoConfig.from_pretrained(tmp_path)
    assert shape.rope_theta == theirs.rope_parameters["rope_theta"]
    assert shape.norm_eps == theirs.rms_norm_eps
    assert shape.topk == (theirs.num_experts_per_tok if name in MOE_FAMILIES else 0)
    assert shape.norm_topk_prob == getattr(theirs, "norm_topk_prob", True)


def test_rope_keys_of_published_files_are_read_under_both_their_names(folders: Folders) -> None:
    hf = json.loads((folders["deepseek_v3"] / "config.json").read_text())
    published = {  # of DeepSeek-V3's config.json
        **{"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0},
        **{"original_max_position_embeddings": 4096, "type": "yarn"},
    }
    del hf["rope_parameters"]
    hf |= {"rope_theta": 10000, "rope_scaling": published, "max_position_embeddings": 163840}
    shape = ModelShape.from_hf(hf)
    assert shape.rope_theta == 10000.0 and shape.max_position_embeddings == 163840
    assert shape.rope_scaling is not None
    assert asdict(shape.rope_scaling) == {
        **{"kind": "yarn", "factor": 40.0, "original": 4096, "fast": 32.0, "slow": 1.0},
        **{"truncate": True, "attention_factor": 1.0, "mscale_all_dim": 1.0},
    }


def test_rope_keys_of_published_gpt_oss_are_read(folders: Folders) -> None:
    hf = json.loads((folders["gpt_oss"] / "config.json").read_text())
    rope = dict(hf.pop("rope_parameters"))
    old = {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    expected = ModelShape.read(folders["gpt_oss"])
    assert ModelShape.from_hf(hf | old) == expected
    assert expected.rope_scaling and not expected.rope_scaling.truncate
    with pytest.raises(ShapeError, match="with rope_type 'yarn'"):
        ModelShape.from_hf(hf | {"rope_theta": 1e4})


@pytest.mark.parametrize(
    "name",
    [*("llama", "llama3.1", "qwen3-yarn", "deepseek_v3", "glm-4.5", "minimax-m2"), "untruncated"],
)
def test_rotary_frequencies_are_those_of_transformers_bit_for_bit(
    name: str, folders: Folders, tmp_path: Path
) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    from r3.layers import inverse_frequencies

    folder = folders.get(name, tmp_path)
    if name == "untruncated":
        rope = dict(truncate=False, attention_factor=1.3, rope_theta=1e6, beta_fast=4)
        rope = FAMILIES["qwen3-yarn"][1]["rope_parameters"] | rope
        family_checkpoint(folder, "qwen3-yarn", rope_parameters=rope, head_dim=128)
    shape, theirs = ModelShape.read(folder), AutoConfig.from_pretrained(folder)
    dim = shape.rotary_size
    ours = inverse_frequencies(dim, shape.rope_theta, shape.rope_scaling)
    if shape.rope_scaling is None:
        expected, factor = 1.0 / (shape.rope_theta ** (torch.arange(0, dim, 2).float() / dim)), 1.0
    else:
        expected, factor = ROPE_INIT_FUNCTIONS[shape.rope_scaling.kind](theirs, "cpu")
        assert shape.rope_scaling.attention_factor == factor
    assert torch.equal(ours, expected)
    assert dim == {"glm-4.5": 6, "minimax-m2": 6}.get(name, dim)


def test_latent_attention_caches_one_vector_a_token(folders: Folders) -> None:
    for name in ("moonlight", "glm-4.7-flash"):
        assert ModelShape.read(folders[name]).kv_values(1) == 3 * (32 + 8)
    assert ModelShape.read(folders["llama"]).kv_values(1) == 2 * 3 * 4 * 8


def test_windows_bound_the_cache_as_vllm_allocates_it(tmp_path: Path) -> None:
    """Measured on vLLM 0.30's CPU engine: blocks of 32 tokens of two layers, window or not, that a
    request holds after so many tokens. A plan without whole blocks lacks up to two per kind.
    """
    sizes = dict(num_hidden_layers=4, sliding_window=64) | dict(num_key_value_heads=2, head_dim=32)
    shape = ModelShape.read(family_checkpoint(tmp_path, "gpt_oss", **sizes))
    for tokens, blocks in ((202, 10), (350, 14), (500, 19), (650, 24)):
        planned = shape.kv_values(tokens) / (2 * 2 * 2 * 32 * 32)
        assert blocks - 4 < planned <= blocks
    full = dataclasses.replace(shape, window_layers=())
    assert full.kv_values(650) / (2 * 2 * 2 * 32 * 32) > 24 + 16  # what was planned before


def test_states_take_what_vllm_allocates(tmp_path: Path) -> None:
    """vLLM 0.30's CPU engine has 35,840 bytes per layer of these sizes in bfloat16."""
    sizes = dict(linear_key_head_dim=64, linear_value_head_dim=64)
    hf = family_checkpoint(tmp_path, "qwen3_5_moe", **sizes) / "config.json"
    values = json.loads(hf.read_text())
    assert state_bytes(ModelShape.from_hf(values), "bfloat16") == 2 * 35_840
    wide = ModelShape.from_hf(values | {"mamba_ssm_dtype": "float32"})  # as published
    assert state_bytes(wide, "bfloat16") == 2 * (35_840 + 2 * 4 * 64 * 64)
    with pytest.raises(ShapeError, match="mamba_ssm_dtype 'fp8' must be"):
        ModelShape.from_hf(values | {"mamba_ssm_dtype": "fp8"})


@pytest.mark.parametrize("name", ["moonlight", "glm-4.5-air", "glm-4.7-flash"])
def test_multi_token_prediction_layers_are_left_out(hf: dict[str, Any]) -> None:
    hf.pop("num_mtp_layers", None)
    without, with_one = (ModelShape.from_hf(hf | {"num_nextn_predict_layers": n}) for n in (0, 1))
    assert with_one.num_mtp_layers == 1
    assert with_one.tensor_shapes == without.tensor_shapes
    head: dict[str, tuple[int, ...]] = {"model.layers.3.eh_proj.weight": (64, 128)}
    head["model.layers.3.shared_head.norm.weight"] = (64,)
    assert with_one.faults(with_one.tensor_shapes | head) == []
    assert len(without.faults(without.tensor_shapes | head)) == 2


def test_prediction_layers_that_config_json_does_not_count_are_left_out(folders: Folders) -> None:
    """As Qwen3-Next is published."""
    shape = ModelShape.read(folders["qwen3_next"])
    names = "mtp.fc.weight", "mtp.norm.weight", "mtp.layers.0.mlp.experts.7.up_proj.weight"
    assert shape.faults(shape.tensor_shapes | dict.fromkeys(names, (64, 64))) == []
    others = "mtp_fc.weight", "model.mtp.fc.weight", "model.layers.3.mlp.gate.weight"
    assert shape.faults(shape.tensor_shapes | dict.fromkeys(others, (64, 64))) == [
        f"unknown {name}" for name in others
    ]


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("glm-4.5-air", "num_nextn_predict_layers"),
        ("glm-4.5-air", "num_mtp_layers"),
        ("minimax-m2", "num_mtp_modules"),
    ],
)
def test_the_config_of_an_export_counts_no_prediction_layers(
    key: str, hf: dict[str, Any], tmp_path: Path
) -> None:
    hf = {other: value for other, value in hf.items() if "mtp" not in other} | {key: 1}
    assert ModelShape.from_hf(hf).num_mtp_layers == 1
    small = {"config.json": json.dumps(hf).encode()}
    write_checkpoint(tmp_path / "out", (), small_files=small, dtype=torch.float32, metadata={})
    exported = json.loads((tmp_path / "out" / "config.json").read_text())
    assert ModelShape.from_hf(exported).num_mtp_layers == 0


def test_published_ernie_has_a_prediction_layer_and_may_leave_keys_out(folders: Folders) -> None:
    hf = json.loads((folders["ernie4_5_moe"] / "config.json").read_text())
    assert ModelShape.from_hf(hf).moe_layers == (1,)
    absent = ("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval")
    plain = {key: value for key, value in hf.items() if key not in absent}
    shape = ModelShape.from_hf(plain | {"num_nextn_predict_layers": 1})
    assert shape.moe_layers == (1, 2)
    assert shape == ModelShape.from_hf(
        hf | {"moe_layer_end_index": -1, "moe_layer_interval": 1, "num_nextn_predict_layers": 1}
    )
    head = {"model.mtp_linear_proj.0.weight": (64, 128)}
    assert shape.faults(shape.stored_shapes | head) == []
    assert len(ModelShape.from_hf(plain).faults(shape.stored_shapes | head)) == 1
    del plain["tie_word_embeddings"]
    assert ModelShape.from_hf(plain).tied  # as in transformers


def test_tensors_of_stacked_experts_are_read_and_written_bit_for_bit(folders: Folders) -> None:
    folder = folders["granitemoe"]
    shape = ModelShape.read(folder)
    (file,) = folder.glob("*.safetensors")
    on_disk = load_file(file)
    with CheckpointReader(folder) as reader:
        reader.require(shape)
        written = dict(joined(((name, reader.read(name)) for name in shape.tensor_shapes), shape))
        assert written.keys() == on_disk.keys()
        assert all(torch.equal(written[name], on_disk[name]) for name in on_disk)
        stack = "model.layers.1.block_sparse_moe"
        up, down = (f"{stack}.experts.3.{part}_proj.weight" for part in ("up", "down"))
        # Slices of tensor-parallel ranks. Gate comes before up.
        first, second = (on_disk[f"{stack}.{name}_linear.weight"] for name in ("input", "output"))
        assert torch.equal(reader.read(up, 0, 1, 2), first[3, 60:])
        assert torch.equal(reader.read(down, -1, 1, 2), second[3, :, 20:])


@pytest.mark.parametrize("kind", ["", "stacked", "dense"])
def test_the_text_model_of_a_model_that_sees_images_is_read_and_exported(
    kind: str, tmp_path: Path
) -> None:
    """Exports load as text models: no other model, prefix or stack is in files and config.json."""
    folder, out = tmp_path / "model", tmp_path / "export"
    whole = wrapped_checkpoint(folder, stacked=kind == "stacked", dense=kind == "dense").eval()
    shape = ModelShape.read(folder)
    assert checkpoint_faults(folder, shape) == []
    assert left_out(shape) == ("1 multi-token-prediction layers and the vision model")
    with CheckpointReader(folder) as reader:
        reader.require(shape)
        weights = {name: reader.read(name) for name in shape.tensor_shapes}
        up = f"model.layers.1.mlp.{'' if kind == 'dense' else 'experts.3.'}up_proj.weight"
        half = reader.read(up, 0, 1, 2)
    assert torch.equal(half, weights[up].chunk(2)[1])
    small = with_end_tokens(read_small_files(folder), [2])
    assert small == read_small_files(folder), "the section names this end token"
    write_checkpoint(out, weights.items(), small_files=small, dtype=torch.float32, metadata={})
    exported = ModelShape.read(out)
    assert exported == dataclasses.replace(shape, is_wrapped=False, num_mtp_layers=0)
    assert checkpoint_faults(out, exported) == []
    tokens = torch.arange(3, 40)[None]
    alone = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    assert torch.equal(alone(tokens).logits, whole(tokens).logits)
    # What is not the text model's is refused where nothing says that there is more, but for
    # prediction layers: transformers and vLLM leave them out, counted or not.
    faults = exported.faults(checkpoint_tensors(folder))
    assert faults and all(fault.startswith("unknown model.visual.") for fault in faults)


def test_a_section_of_the_text_model_is_required() -> None:
    with pytest.raises(ShapeError, match="key text_config must be the text model's keys, got None"):
        ModelShape.from_hf({"architectures": ["Qwen3_5MoeForConditionalGeneration"]})
    hf = KNOWN_SHAPES["Qwen/Qwen3.5-35B-A3B"]
    with pytest.raises(ShapeError, match="quantization_config is not supported"):
        ModelShape.from_hf({**hf, "quantization_config": {"quant_method": "fp8"}})


def test_a_misshaped_stack_is_named_as_it_is_on_disk(folders: Folders) -> None:
    shape = ModelShape.read(folders["granitemoe"])
    tensors = checkpoint_tensors(folders["granitemoe"])
    stack = "model.layers.1.block_sparse_moe.output_linear.weight"
    faults = shape.faults(tensors | {stack: (8, 64, 39)})
    assert f"{stack} has shape (8, 64, 39), config.json implies (8, 64, 40)" in faults
    del tensors[stack]
    tensors["model.layers.0.self_attn.q_proj.bias"] = (64,)
    faults = shape.faults(tensors)
    assert faults == [f"missing {stack}", "unknown model.layers.0.self_attn.q_proj.bias"]
    refused = pytest.raises(ShapeError, match="none was loaded")
    with CheckpointReader(folders["granitemoe"]) as reader, refused:
        reader.require(ModelShape.read(folders["mixtral"]))


@pytest.mark.parametrize(("name", "keys", "rule"), table("refused_keys"))
def test_what_is_not_supported_is_refused_by_its_key(
    name: str, keys: str, rule: str, hf: dict[str, Any]
) -> None:
    with pytest.raises(ShapeError, match=rule):
        ModelShape.from_hf(hf | json.loads(keys))


# Keys that transformers or vLLM read, and that change nothing R3 computes.
WITHOUT_EFFECT = {
    *("_attn_implementation", "initializer_range", "output_router_logits", "router_aux_loss_coef"),
    *("get_text_config", "use_cache", "max_model_len", "target_layer_count"),
    *("attention_dropout", "embedding_dropout", "router_jitter_noise"),  # in training mode only
    # These act with use_sliding_window, which is refused, or beyond index_topk tokens.
    *("sliding_window", "max_window_layers", "index_head_dim", "index_n_heads", "index_topk_freq"),
    *("index_topk_pattern", "index_skip_topk_offset", "indexer_rope_interleave", "indexer_types"),
    # Read by R3 out of a copy, or in another place of its own.
    *("partial_rotary_factor", "rope_parameters", "num_experts_per_tok", "moe_router_dtype"),
    # Of the models beside a text model.
    *("vision_config", "text_config", "deepstack_visual_indexes", "depth", "in_channels"),
    *("image_token_id", "video_token_id", "num_heads", "num_position_embeddings", "patch_size"),
    *("out_hidden_size", "spatial_merge_size", "temporal_patch_size", "intermediate_size"),
}


class Recorded(dict[str, Any]):
    """A config.json that knows which of its keys were read."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.read.add(str(key))
        return super().__contains__(key)


def keys_read_by(file: Path) -> set[str]:
    """Attributes of a model's configuration that a file of transformers or vLLM reads."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            if re.fullmatch(r"(self\.)?(hf_|text_|hf_text_)?config", owner):
                found.add(node.attr)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            owner, key = node.args[:2]
            if "config" in ast.unparse(owner) and isinstance(key, ast.Constant):
                found.add(str(key.value))
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_every_key_that_a_reader_of_the_family_follows_is_read(name: str, folders: Folders) -> None:
    """A key that R3 does not read, and that changes what is computed, must be refused by name."""
    hf = Recorded(json.loads((folders[name] / "config.json").read_text()))
    ModelShape.from_hf(hf)
    (transformers,) = util.find_spec("transformers").submodule_search_locations
    (vllm,) = util.find_spec("vllm").submodule_search_locations
    models = Path(vllm) / "model_executor/models"
    folder = Path(transformers, "models", hf["model_type"].removesuffix("_text"))
    code, registry = [*folder.glob("modeling_*.py")], (models / "registry.py").read_text()
    listed = re.search(rf'"{hf["architectures"][0]}": \(\s*"(\w+)"', registry)
    code += [models / f"{listed[1]}.py"] if listed else []
    assert code
    followed = set().union(*map(keys_read_by, code))
    assert "hidden_size" in followed
    if name == "qwen2":
        assert "dual_chunk_attention_config" in followed, "Qwen2.5-1M crashed vLLM with it"
    unread = followed - hf.read - WITHOUT_EFFECT
    assert not unread, f"{unread} change what {name} computes and R3 reads nothing of them"


def test_all_refused_keys_are_in_one_message(folders: Folders) -> None:
    hf = json.loads((folders["moonlight"] / "config.json").read_text())
    wrong = {"scoring_func": "softmax", "attention_bias": True, "v_head_dim": 0, "n_group": None}
    with pytest.raises(ShapeError) as refused:
        ModelShape.from_hf(hf | wrong)
    assert str(refused.value).split("; ") == [  # nothing that follows from a fault
        "scoring_func 'softmax' is not supported, only 'sigmoid' is",
        "attention_bias is not supported yet",
        "key n_group must be a positive integer, got None",
        "key v_head_dim must be a positive integer, got 0",
    ]


def test_keys_of_one_value_may_be_absent_as_transformers_leaves_them(folders: Folders) -> None:
    hf = json.loads((folders["moonlight"] / "config.json").read_text())
    implied = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    absent = {name: value for name, value in hf.items() if name not in implied}
    assert ModelShape.from_hf(absent) == ModelShape.from_hf(hf | implied)
    assert ModelShape.from_hf(absent | dict.fromkeys(implied)) == ModelShape.from_hf(hf)
    assert implied_keys("DeepseekV3ForCausalLM") == implied
    assert not implied_keys("MixtralForCausalLM")


NO_ROPE = {"partial_rotary_factor": None, "rope_parameters": None, "rope_theta": 10000.0}
NO_TOKENS = {"pad_token_id": -1, "bos_token_id": None}
# Without key-value heads there are as many as heads.
OLD = ("num_key_value_heads", "head_dim", "rope_parameters", "hidden_act", "mlp_bias")


@pytest.mark.parametrize(
    ("name", "changes", "absent"),
    [
        # Half of a head is rotated where config.json does not say.
        ("glm-4.5-air", NO_ROPE, ()),
        # Granite 3.0 has the first, Mixtral's users the second: both act in training mode only.
        ("mixtral", {"attention_dropout": 0.1, "router_jitter_noise": 0.01}, ()),
        ("mixtral", {"hidden_dropout": 0.1}, ()),
        ("deepseek_v3", {"model_type": "kimi_k2"}, ()),
        # The authors of dots call the router by another name, and give no groups.
        ("dots1", {"scoring_func": "noaux_tc", "n_group": None, "topk_group": None}, ()),
        ("llama", {}, OLD),
        # The same said twice is no contradiction.
        ("qwen3_moe", {"num_experts": 8, "num_local_experts": 8} | NO_TOKENS, ()),
    ],
)
def test_keys_of_published_and_old_files_mean_the_same(
    changes: dict[str, Any], absent: tuple[str, ...], hf: dict[str, Any]
) -> None:
    hf |= {"num_key_value_heads": 8} if absent else {}
    other = {key: value for key, value in (hf | changes).items() if key not in absent}
    assert ModelShape.from_hf(other) == ModelShape.from_hf(hf)
