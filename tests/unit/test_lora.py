"""Which matrices have adapters, what is refused, the plan of memory, and PEFT's files."""

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
from r3.checks import warnings
from r3.config import LoraConfig
from r3.configs import KNOWN_SHAPES, PRESETS
from r3.lora import (
    QuantisedWeight,
    adapted_tensors,
    adapter_config,
    adapter_fault,
    adapter_notes,
    adapter_reader,
    joined_in,
    lost_in_peft,
    matrices,
    other_base,
    quantised_tensors,
    scale_in,
    write_adapter,
)
from r3.models import CheckpointReader, write_checkpoint
from r3.models.shape import ModelShape
from r3.tools.planning.memory_plan import fit, host_memory, memory
from tests.errors import Patch
from tests.families import (
    FAMILIES,
    MOE_FAMILIES,
    family_checkpoint,
    random_pairs,
    wrapped_checkpoint,
)
from tests.settings import changed, found
from tests.sweeps import sweep
from tests.tables import table

SHAPE = ModelShape.read(TINY_MOE)
"""Four layers of 8 experts."""


def write_random(
    folder: Path, ranks: dict[str, int], shape: ModelShape = SHAPE, *, base: str = "", **keys: Any
) -> Path:
    """Write a random adapter; `keys` are further ones of its adapter_config.json."""
    lora = LoraConfig(rank=8)
    config = adapter_config(shape, lora, ranks, base) | keys
    write_adapter(folder, random_pairs(shape, ranks), config, lora)
    return folder


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
    with pytest.raises(ValueError, match="the embedding too in this model"):
        adapted_tensors(replace(SHAPE, tied=True), lora)


def test_the_scale_is_that_of_lora_or_rslora() -> None:
    assert LoraConfig(rank=16, alpha=32).scale(16) == 2
    assert LoraConfig(rank=16, alpha=32, rslora=True).scale(16) == 8


@pytest.mark.parametrize(("settings", "field", "rule"), table("lora_settings"))
def test_what_adapters_cannot_do_is_a_config_error(settings: str, field: str, rule: str) -> None:
    assert rule in found({"lora.rank": "8"} | json.loads(settings))[field]


@pytest.mark.parametrize(
    ("pattern", "count"), [("model.embed_tokens.weight", 1), ("*.[qkv]_proj.weight", 0)]
)
def test_what_adapters_freeze_anyway_is_said_to_have_no_effect(pattern: str, count: int) -> None:
    said = warnings(changed({"lora.rank": 8, "train.freeze": [pattern]}), 2)
    assert len(said) == count and all(each.startswith("train.freeze = ") for each in said)


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
    started = replace(one, lora=replace(one.lora, start="adapter"))
    for kl_coef, copies in ((0.0, 1), (0.1, 2)):  # of the reference policy
        run = replace(started, algo=replace(one.algo, kl_coef=kl_coef))
        assert memory(run, shape, 1)["TRAIN"]["adapters"] == copies * 4 * values


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
    ranks = {"model.layers.0.self_attn.q_proj.weight": 8}
    folder = write_random(tmp_path / "adapter", ranks, **{key: value})
    found = adapter_fault(str(folder), SHAPE, ranks)
    assert found.startswith(fault) and bool(found) == bool(fault)


def test_an_adapter_with_whole_modules_is_refused(tmp_path: Path) -> None:
    """PEFT's modules_to_save: a start without them would be another model."""
    ranks = adapted_tensors(SHAPE, LoraConfig(rank=8))
    folder = write_random(tmp_path / "adapter", ranks)
    assert adapter_fault(str(folder), SHAPE, ranks) == ""
    file, head = folder / "adapter_model.safetensors", "base_model.model.lm_head.weight"
    save_file(load_file(file) | {head: torch.zeros(512, 128)}, file)
    fault = adapter_fault(str(folder), SHAPE, ranks)
    assert fault == f"differs in 1 tensors, such as {head}"


@pytest.mark.parametrize(
    ("named", "path", "warns"),
    [
        ("", "Qwen3-30B-A3B", False),
        ("Qwen/Qwen3-30B-A3B", "hub:Qwen/Qwen3-30B-A3B@main", False),
        ("Qwen/Qwen3-30B-A3B", "/models/qwen3-30b-a3b/", False),
        ("/x/models--Qwen--Qwen3-30B-A3B/snapshots/4c44", "/models/Qwen3-30B-A3B", False),
        ("Qwen/Qwen3-30B-A3B", "hub:Qwen/Qwen3-30B-A3B-Base", True),
        ("Qwen/Qwen3-30B-A3B-Base", "/models/Qwen3-30B-A3B", True),
    ],
)
def test_the_base_of_an_adapter_is_compared_by_name(
    named: str, path: str, warns: bool, tmp_path: Path
) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": named}))
    assert other_base(str(tmp_path), path) == (named if warns else "")


def test_an_adapter_of_another_base_is_noted(model: Path, tmp_path: Path) -> None:
    ranks = adapted_tensors(SHAPE, LoraConfig(rank=8))
    values = {"lora.rank": "8", "lora.start": str(tmp_path / "adapter"), "model.path": str(model)}
    for base, count in ((TINY_MOE, 1), (model, 0)):
        write_random(tmp_path / "adapter", ranks, base=str(base))
        notes = [note for note in warnings(changed(values), 2) if "lora.start" in note]
        assert len(notes) == count and all(f"was trained on {str(base)!r}" in n for n in notes)


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


ALL = LoraConfig().targets
OWN = ("attention", "experts")
CONVERTED = (
    *("qwen3_moe", "olmoe", "qwen3_next", "mixtral", "deepseek_v3", "glm-4.5-air", "glm-5"),
    *("glm-4.7-flash", "minimax-m2", "ernie4_5_moe", "deepseek_v3.2", "solar_open", "dots1"),
)
_GATE_UP, _DOWN = "*.experts.*.{gate,up}_proj.*", "*.experts.*.down_proj.*"


def adapted_logits(
    path: Path, place: Path, lora: LoraConfig, ranks: dict[str, int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits of the base, of the merged model, and of the base with the adapter in PEFT."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    shape = ModelShape.read(path)
    pairs = random_pairs(shape, ranks)
    adapter = place / "adapter"
    write_adapter(adapter, pairs, adapter_config(shape, lora, ranks, str(path)), lora)
    with CheckpointReader(path) as reader:
        tensors = {name: reader.read(name).float() for name in reader.shapes}
    for name, a, b in pairs:
        tensors[name] += lora.scale(len(a)) * b @ a
    small = {"config.json": (path / "config.json").read_bytes()}
    kind: dict[str, Any] = {"small_files": small, "dtype": torch.float32, "metadata": {}}
    write_checkpoint(place / "merged", iter(tensors.items()), **kind)
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    whole = AutoModelForCausalLM.from_pretrained(place / "merged", dtype=torch.float32)
    tokens = torch.arange(24)[None]
    base, merged = plain(tokens).logits, whole(tokens).logits
    return base, merged, peft.PeftModel.from_pretrained(plain, str(adapter))(tokens).logits


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:Found missing adapter keys", "ignore:The following .*_pattern")
@pytest.mark.parametrize(
    ("family", "targets", "frozen", "lost"),
    [
        *((family, OWN, "", "") for family in CONVERTED),
        *((family, OWN, _DOWN, "experts") for family in CONVERTED),
        *((family, OWN, _GATE_UP, "") for family in CONVERTED),
        # All adapters of a layer but the last are missing: what is there is applied.
        ("qwen3_moe", OWN, "model.layers.[01].*", ""),
        ("qwen3_moe", OWN, "model.layers.2.mlp.experts.*.down_proj.*", ""),
        # Dense layers and shared experts are named as experts, also where experts have no adapter.
        ("deepseek_v3", ALL, "", "dense shared"),
        ("deepseek_v3", ("attention", "shared"), "", "shared"),
        ("deepseek_v3", ("attention", "dense"), "", "dense"),
        ("qwen3_next", ALL, "", "shared"),
        ("qwen2_moe", ALL, "", "experts"),
        ("qwen2_moe", ("attention", "dense", "shared"), "", ""),
        ("qwen3_5_moe", ALL, "", "experts"),
        ("qwen3_5_moe", ("attention", "shared"), "", ""),
        ("gpt_oss", ("attention",), "", ""),
        ("granitemoe", ("attention",), "", ""),
        *((family, ALL, "", "") for family in ("qwen2", "qwen3", "llama")),
    ],
)
def test_an_export_says_what_peft_does_not_apply(
    family: str, targets: tuple[Any, ...], frozen: str, lost: str, tmp_path: Path
) -> None:
    """The table of PEFT's model types, read from what it computes for all of them."""
    path = family_checkpoint(tmp_path / family, family)
    shape, lora = ModelShape.read(path), LoraConfig(rank=8, expert_rank=4, targets=targets)
    patterns = [frozen.replace("{gate,up}", part) for part in ("gate", "up")] if frozen else []
    if family in ("mixtral", "minimax-m2"):
        names = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
        for published, own in names.items():
            patterns = [pattern.replace(published, own) for pattern in patterns]
    ranks = adapted_tensors(shape, lora, patterns)
    base, merged, got = adapted_logits(path, tmp_path, lora, ranks)
    # Rounding of float32 is 1e-5 of what the adapter moves. Lost adapters leave 0.06 and more.
    error = float((got - merged).abs().max() / (merged - base).abs().max())
    assert (error > 1e-2) == bool(lost) and (error < 1e-4) != bool(lost), error
    assert " ".join(sorted({matrices(shape)[x] for x in lost_in_peft(shape, ranks)})) == lost
    notes = adapter_notes(shape, ranks)
    assert len(notes) == bool(lost) and all(part in "".join(notes) for part in lost.split())


def test_every_family_with_experts_is_tried_in_peft() -> None:
    untried = {"qwen2_moe", "qwen3_5_moe", "gpt_oss", "granitemoe"}  # rows of their own
    # Ling is code of its authors: transformers stacks nothing.
    tried = {FAMILIES[family][0] for family in {*CONVERTED, *untried, "ling"}}
    assert tried == {FAMILIES[family][0] for family in MOE_FAMILIES}


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:Found missing adapter keys")
def test_an_adapter_of_a_wrapped_model_is_for_its_text_model(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    whole = wrapped_checkpoint(tmp_path / "model", stacked=False)
    path = tmp_path / "model"
    shape = ModelShape.read(path)
    ranks = adapted_tensors(shape, LoraConfig(rank=8, targets=("attention",)))
    write_random(tmp_path / "adapter", ranks, shape, base=str(path))
    tokens, moved = torch.arange(24)[None], []
    for model in (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), whole):
        base = model(tokens).logits
        adapted = peft.PeftModel.from_pretrained(model, str(tmp_path / "adapter"))
        moved.append(float((adapted(tokens).logits - base).abs().max()))
    assert moved[0] > 0.1 and moved[1] == 0
    (note,) = adapter_notes(shape, ranks)
    assert "Programs that load the model as Qwen3_5MoeForConditionalGeneration" in note


def test_an_adapter_names_its_base_as_peft_loads_it(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    lora = LoraConfig(rank=8)
    for path, name, revision in (
        ("hub:Qwen/Qwen3-30B-A3B@4c446470", "Qwen/Qwen3-30B-A3B", "4c446470"),
        ("hub:Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-30B-A3B", "main"),
        ("models/mine", str(tmp_path / "models/mine"), None),
    ):
        config = adapter_config(SHAPE, lora, adapted_tensors(SHAPE, lora), path)
        assert (config["base_model_name_or_path"], config["revision"]) == (name, revision)
