"""Which matrices have adapters, what is refused, the plan of memory, and PEFT's files."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from r3.assets import TINY_MOE
from r3.checks import problems, warnings
from r3.config import Config, ConfigError, LoraConfig, fixed_changes
from r3.configs import KNOWN_SHAPES, PRESETS
from r3.models.hf_checkpoint import CheckpointReader, write_checkpoint
from r3.models.lora import adapted_tensors, adapter_fault, quantised_tensors, scale_in
from r3.models.peft import (
    adapter_config,
    adapter_reader,
    dropped_by_peft,
    joined_in,
    write_adapter,
)
from r3.models.shape import ModelShape
from r3.planning.memory_plan import fit, host_memory, memory
from r3.policy.quantised_weight import QuantisedWeight
from tests.families import family_checkpoint, random_pairs
from tests.settings import changed, found
from tests.sweeps import sweep

pytestmark = pytest.mark.unit

SHAPE = ModelShape.read(TINY_MOE)
"""Four layers of 8 experts."""


def test_targets_are_matrices_of_the_checkpoint() -> None:
    assert adapted_tensors(SHAPE, LoraConfig()) == {}
    ranks = adapted_tensors(SHAPE, LoraConfig(rank=8, expert_rank=4))
    assert {name.split(".")[3] for name in ranks} == {"self_attn", "mlp"}
    experts = {name for name in ranks if ".experts." in name}
    assert len(experts) == 3 * SHAPE.num_experts * SHAPE.num_layers
    assert len(ranks) - len(experts) == 4 * SHAPE.num_layers  # q, k, v, o; no norm
    assert {ranks[name] for name in experts} == {4}
    routers = adapted_tensors(SHAPE, LoraConfig(rank=8, targets=("router",)), ["model.layers.0.*"])
    assert sorted(routers) == [f"model.layers.{n}.mlp.gate.weight" for n in (1, 2, 3)]


def test_a_tied_output_layer_has_no_adapter() -> None:
    lora = LoraConfig(rank=8, targets=("head",))
    assert list(adapted_tensors(replace(SHAPE, tied=False), lora)) == ["lm_head.weight"]
    with pytest.raises(ConfigError, match="the embedding too in this model"):
        adapted_tensors(replace(SHAPE, tied=True), lora)


def test_the_scale_is_that_of_lora_or_rslora() -> None:
    assert LoraConfig(rank=16, alpha=32).scale(16) == 2
    assert LoraConfig(rank=16, alpha=32, rslora=True).scale(16) == 8


@pytest.mark.parametrize(
    ("values", "field", "rule"),
    [
        (
            {"lora.targets": ["attention", "shared"]},
            "lora.targets",
            "include shared, which this model",
        ),
        ({"lora.targets": "router", "train.freeze": "*.gate.weight"}, "lora.targets", "nothing to"),
        ({"lora.targets": ""}, "lora.targets", "is empty"),
        ({"lora.start": "/nowhere"}, "lora.start", "is no folder of a PEFT adapter"),
        ({"lora.dropout": "0.1"}, "lora.dropout", "must be between 0 and 0: the engine samples"),
        ({"lora.rank": "-1"}, "lora.rank", "at least 0"),
        ({"lora.alpha": "0"}, "lora.alpha", "above 0"),
        (
            {"model.base": "int8", "lora.rank": "0"},
            "model.base",
            "without lora.rank all are trained",
        ),
        ({"model.experts": "sequential"}, "model.experts", "all experts of a rank as one tensor"),
        ({"parallel.etp": "2", "parallel.ep": "1"}, "parallel.etp", "neither 1 nor parallel.tp"),
        (
            {"parallel.pp": "2", "parallel.ep": "1", "train.freeze": "model.layers.[01].*"},
            "lora.targets",
            "give chunk 0 of the pipeline nothing to train",
        ),
    ],
)
def test_what_adapters_cannot_do_is_a_config_error(
    values: dict[str, Any], field: str, rule: str
) -> None:
    assert rule in found({"lora.rank": "8"} | values)[field]


def test_settings_without_a_rank_have_no_effect() -> None:
    assert "lora.alpha = 8.0 has no effect" in " ".join(warnings(changed({"lora.alpha": "8"}), 2))
    assert problems(changed({"lora.rank": "8"}), 2) == []
    values = {"lora.rank": "8", "lora.targets": "attention", "lora.expert_rank": "2"}
    assert "lora.expert_rank = 2 has no effect" in " ".join(warnings(changed(values), 2))


def test_a_resumed_run_has_the_same_adapters() -> None:
    assert list(fixed_changes(Config(), Config(lora=LoraConfig(rank=8)))) == ["lora.rank"]


def test_the_plan_of_memory_counts_adapters_and_not_the_base() -> None:
    shape = ModelShape.from_hf(KNOWN_SHAPES["Qwen/Qwen3-30B-A3B"])
    config = PRESETS["qwen3-30b-a3b-lora"]()
    one = replace(config, parallel=replace(config.parallel, ep=1, engine_tp=1))
    assert fit(config, shape, 2, 80).fits and fit(one, shape, 1, 141).fits
    full = replace(one, lora=LoraConfig())
    assert not fit(full, shape, 1, 141).fits
    ranks = adapted_tensors(shape, one.lora)
    values = sum(rank * sum(shape.tensor_shapes[name]) for name, rank in ranks.items())
    train = memory(one, shape, 1)["TRAIN"]
    assert train["gradients"] == train["adapters"] == 4 * values
    assert train["optimizer"] == 8 * values
    base = 2 * sum(shape.tensor_shapes[x][0] * shape.tensor_shapes[x][1] for x in ranks)
    assert host_memory(one, shape, 1)["base weights"] == base


@pytest.mark.parametrize(
    "model", sweep(["qwen3-30b-a3b", "qwen3.5-35b-a3b"], kept=["qwen3-30b-a3b"])
)
def test_the_plan_with_a_quantised_base_fits_one_or_two_gpus(model: str) -> None:
    config = PRESETS[f"{model}-lora"]()
    shape = ModelShape.from_hf(KNOWN_SHAPES[config.model.path])
    for base in ("int8", "fp8"):
        two = replace(config, model=replace(config.model, base=base))
        one = replace(two, parallel=replace(config.parallel, ep=1, engine_tp=1))
        assert fit(two, shape, 2, 80).fits and fit(one, shape, 1, 141).fits
    sizes = {name: math.prod(shape.tensor_shapes[name]) for name in quantised_tensors(shape)}
    # Embedding, output layer, routers, norms and convolutions are 2 bytes.
    rest = 2 * (shape.num_params - sum(sizes.values()))
    weights = memory(one, shape, 1)["GENERATE"]["policy weights"]
    assert weights == pytest.approx(sum(sizes.values()) * (1 + 4 / 128) + rest, rel=1e-6)
    layer = sum(size for name, size in sizes.items() if name.startswith("model.layers.0."))
    assert memory(one, shape, 1)["TRAIN"]["layer"] == pytest.approx(2 * layer, rel=0.05)
    assert "base weights" not in host_memory(one, shape, 1)
    if model == "qwen3.5-35b-a3b":
        plain = replace(one, model=replace(config.model, base="dtype"))
        assert fit(plain, shape, 1, 141).lacking_gib


def test_an_adapter_is_written_as_peft_names_it(tmp_path: Path) -> None:
    lora = LoraConfig(rank=8, expert_rank=4, alpha=16)
    ranks = adapted_tensors(SHAPE, lora)
    config = adapter_config(SHAPE, lora, ranks, "base")
    assert config["target_modules"] == [
        *("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")
    ]
    # One scale for all, that of experts: 16 / 4. vLLM has no other, and PEFT's patterns keep it.
    assert (config["r"], config["lora_alpha"], set(config["rank_pattern"].values())) == (4, 16, {8})
    assert {scale_in(config, name) for name in ranks} == {4.0}
    part = adapted_tensors(SHAPE, lora, ["model.layers.0.self_attn.[qkv]_proj.weight"])
    named = adapter_config(SHAPE, lora, part, "base")["target_modules"]
    assert "model.layers.1.self_attn.q_proj" in named and "q_proj" not in named
    pairs = [("model.layers.0.self_attn.q_proj.weight", torch.ones(8, 4), torch.ones(6, 8))]
    write_adapter(tmp_path / "adapter", pairs, config, lora)
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    stem = "base_model.model.model.layers.0.self_attn.q_proj"
    assert {name: tuple(x.shape) for name, x in tensors.items()} == {
        f"{stem}.lora_A.weight": (8, 4),
        f"{stem}.lora_B.weight": (6, 8),
    }
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["r"] == 4
    assert tensors[f"{stem}.lora_B.weight"].unique().tolist() == [0.5], "16 / 8 in place of 16 / 4"
    for other in (lora, replace(lora, alpha=1.0)):  # the product is the same
        a, b = adapter_reader(str(tmp_path / "adapter"), other)(pairs[0][0])
        assert float((other.scale(8) * b @ a).mean()) == 16.0
    assert joined_in(SHAPE, ranks) == ""


@pytest.mark.parametrize(
    ("key", "value", "fault"),
    [
        ("init_lora_weights", "gaussian", ""),
        ("init_lora_weights", False, ""),
        # PEFT changes the base weights before such an adapter is trained: W + scale * B A is not
        # the model (logits of a random Qwen3 were off by a third of what training had moved them).
        ("init_lora_weights", "pissa_niter_16", "belongs to other base weights: init_lora_weights"),
        ("init_lora_weights", "olora", "belongs to other base weights: init_lora_weights olora"),
        ("use_dora", True, "is no plain LoRA adapter: it has use_dora"),
        ("alora_invocation_tokens", [1, 2], "is no plain LoRA adapter: it has alora_invocation"),
        ("peft_type", "LOHA", "is no LoRA adapter, but LOHA"),
    ],
)
def test_only_plain_adapters_are_started_from(
    key: str, value: Any, fault: str, tmp_path: Path
) -> None:
    lora = LoraConfig(rank=8)
    name = "model.layers.0.self_attn.q_proj.weight"
    rows, width = SHAPE.tensor_shapes[name]
    config = adapter_config(SHAPE, lora, {name: 8}, "base") | {key: value}
    pairs = [(name, torch.ones(8, width), torch.ones(rows, 8))]
    write_adapter(tmp_path / "adapter", pairs, config, lora)
    found = adapter_fault(str(tmp_path / "adapter"), SHAPE, {name: 8})
    assert found.startswith(fault) and bool(found) == bool(fault)


def test_an_adapter_with_whole_modules_is_refused(tmp_path: Path) -> None:
    """PEFT's modules_to_save: a start without them would be another model."""
    lora = LoraConfig(rank=8)
    ranks = adapted_tensors(SHAPE, lora)
    config = adapter_config(SHAPE, lora, ranks, "")
    write_adapter(tmp_path / "adapter", random_pairs(SHAPE, ranks), config, lora)
    assert adapter_fault(str(tmp_path / "adapter"), SHAPE, ranks) == ""
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    head = "base_model.model.lm_head.weight"
    save_file(load_file(file) | {head: torch.zeros(512, 128)}, file)
    fault = adapter_fault(str(tmp_path / "adapter"), SHAPE, ranks)
    assert fault == f"differs in 1 tensors, such as {head}"


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_a_block_has_its_largest_value_and_zeros_stay(kind: Literal["int8", "fp8"]) -> None:
    """One outlier costs its own block alone; 200 values end with a block of 72."""
    weight = torch.randn(3, 200, generator=torch.Generator().manual_seed(0))
    weight[0, :128], weight[1, 5] = 0.0, 1000.0
    for rows, by_columns in ((weight, False), (weight.T.contiguous(), True)):
        read = QuantisedWeight.of(rows, kind, by_columns=by_columns).read(torch.float32)
        read = read.T if by_columns else read
        assert read.shape == weight.shape and not read[0, :128].any()
        assert read[1, 5] == pytest.approx(1000.0, rel=1e-6)
        block = weight[2, 128:], read[2, 128:]
        assert float((block[0] - block[1]).norm() / block[0].norm()) < 0.03


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "targets", "drops"),
    [
        ("", LoraConfig().targets, False),
        ("deepseek_v3", ("attention", "experts"), False),
        # Experts beside dense layers and shared experts, which PEFT 0.21 drops without an error.
        ("deepseek_v3", LoraConfig().targets, True),
    ],
)
def test_peft_computes_the_logits_of_the_merged_model(
    family: str, targets: tuple[Any, ...], drops: bool, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    path = family_checkpoint(tmp_path / family, family) if family else TINY_MOE
    shape, lora = ModelShape.read(path), LoraConfig(rank=8, expert_rank=4, targets=targets)
    ranks = adapted_tensors(shape, lora)
    pairs = random_pairs(shape, ranks)
    write_adapter(tmp_path / "adapter", pairs, adapter_config(shape, lora, ranks, ""), lora)
    with CheckpointReader(path) as reader:
        tensors = {name: reader.read(name).float() for name in reader.shapes}
    for name, a, b in pairs:
        tensors[name] += lora.scale(len(a)) * b @ a
    write_checkpoint(
        tmp_path / "merged",
        iter(tensors.items()),
        small_files={"config.json": (path / "config.json").read_bytes()},
        dtype=torch.float32,
        metadata={},
    )
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    tokens = torch.arange(24)[None]
    base, expected = plain(tokens).logits, whole(tokens).logits
    got = peft.PeftModel.from_pretrained(plain, str(tmp_path / "adapter"))(tokens).logits
    error = float((got - expected).abs().max() / (expected - base).abs().max())
    assert error > 0.1 if drops else error < 1e-4, error
    assert dropped_by_peft(ranks) == drops, "an export says so"
