"""The plan before a launch, against figures worked out by hand."""

from __future__ import annotations

import pytest

from r3.assets import TINY_MOE
from r3.cli import dry_run
from r3.cli import memory_plan as plan
from r3.config import Config, ParallelConfig, from_yaml, with_values
from r3.configs import KNOWN_SHAPES, PRESETS
from r3.models.shape import ModelShape

# In float32, so that what bfloat16 adds is one setting away.
TINY = with_values(
    PRESETS["tiny"](),
    {"model.dtype": "float32", "model.fp32_head": False, "engine.dtype": "float32"},
)
TINY_SHAPE = ModelShape.read(TINY_MOE)
BIG = PRESETS["qwen3-moe-30b-a3b"]()
BIG_SHAPE = ModelShape.from_hf(KNOWN_SHAPES["Qwen/Qwen3-30B-A3B"])
DENSE_SHAPE = ModelShape.from_hf(KNOWN_SHAPES["Qwen/Qwen3-0.6B"])
GIB = 2**30


def test_route_bytes() -> None:
    assert plan.route_bytes_per_token(TINY_SHAPE) == 4 * 2
    assert plan.route_bytes_per_token(BIG_SHAPE) == 48 * 8  # ids 0 .. 127 and -1 fit one byte
    assert plan.route_bytes_per_token(DENSE_SHAPE) == 0
    many = ModelShape.from_hf({**KNOWN_SHAPES["Qwen/Qwen3-30B-A3B"], "num_experts": 256})
    assert plan.route_bytes_per_token(many) == 48 * 8 * 2


def test_route_bytes_are_those_the_engine_makes() -> None:
    import numpy as np

    for experts, size in ((8, 1), (128, 1), (129, 2), (256, 2)):
        assert (
            np.min_scalar_type(-experts).itemsize == size
        )  # -128 is int8's last, as 127 is the last id of 128


def test_experts_are_sharded_and_the_rest_is_not() -> None:
    others, experts = plan.params_per_rank(TINY, TINY_SHAPE)
    # 4 layers of 8 experts with three 128 x 64 matrices, half of them on a rank of two.
    assert experts == 4 * 8 * 3 * 128 * 64 // 2
    assert others == TINY_SHAPE.num_params - 4 * 8 * 3 * 128 * 64


def test_memory_of_tiny_by_hand() -> None:
    experts = 4 * 8 * 3 * 128 * 64
    others = 1_119_616 - experts
    held = others + experts // 2
    phases = plan.memory(TINY, TINY_SHAPE, 2)
    assert phases["SYNC"] == {"policy weights": held * 4, "engine weights": 1_119_616 * 4}
    assert phases["GENERATE"] == phases["SYNC"] | {"KV cache": GIB / 16}
    train = phases["TRAIN"]
    assert (train["policy weights"], train["gradients"]) == (held * 4, held * 4)
    # Two float32 moments: the others' over both ranks, the experts' not again, for no other rank
    # holds them.
    assert train["optimizer"] == (others / 2 + experts / 2) * 8
    assert "engine weights" not in train


def test_activations_of_tiny_by_hand() -> None:
    # float32; hidden 128, query width 128, key width 64, heads of 32, 2 of 8 experts of width 64.
    norm = 12 * 128
    attention = norm + 4 * (128 + 2 * 64) + 8 * (128 + 64) + 4 * (3 * 128 + 64 + 4 * 32)
    experts = 4 * 2 * (128 + 5 * 64) + 9 * 8 + 24 * 2
    rest = 8 * 128 + 4 * (2 * 128 + 2 * (128 + 4 * 64))
    assert (
        plan.activation_bytes_per_token(TINY, TINY_SHAPE) == 4 * (attention + norm + experts) + rest
    )
    full = with_values(TINY, {"model.recompute": "full"})
    one_layer = attention + norm + experts
    assert plan.activation_bytes_per_token(full, TINY_SHAPE) == 4 * 4 * 128 + one_layer + rest
    only_moe = with_values(TINY, {"model.recompute": "moe"})
    assert (
        plan.activation_bytes_per_token(only_moe, TINY_SHAPE)
        == 4 * (attention + norm) + experts + rest
    )


def test_output_layer_by_hand() -> None:
    # Qwen3-30B-A3B: hidden 2048, vocabulary 151936, bfloat16, 8192 tokens of which 1024 have logits
    # at a time.
    logits, weight, hidden = 1024 * 151_936, 2048 * 151_936, 8192 * 2 * 2048
    assert plan.head_bytes(BIG, BIG_SHAPE) == logits * 6 + weight * 6 + hidden
    exact = with_values(BIG, {"model.fp32_head": True})
    assert plan.head_bytes(exact, BIG_SHAPE) == logits * 4 + weight * 8 + hidden + weight * 4
    whole = with_values(BIG, {"train.logprob_chunk_tokens": 0})
    assert plan.head_bytes(whole, BIG_SHAPE) == 8 * logits * 8 + hidden
    cut = with_values(BIG, {"parallel.tp": 2, "parallel.cp": 2})
    assert plan.head_bytes(cut, BIG_SHAPE) == (logits * 6 + weight * 6 + hidden) / 2
    assert plan.memory(BIG, BIG_SHAPE, 8)["TRAIN"]["output layer"] == plan.head_bytes(
        BIG, BIG_SHAPE
    )


def test_bfloat16_keeps_a_float32_copy_and_the_optimizer_is_sharded() -> None:
    experts = BIG_SHAPE.num_expert_params / 8
    others = BIG_SHAPE.num_params - BIG_SHAPE.num_expert_params
    assert plan.memory(BIG, BIG_SHAPE, 8)["TRAIN"]["optimizer"] == (others / 8 + experts) * 12
    assert plan.memory(BIG, BIG_SHAPE, 16)["TRAIN"]["optimizer"] == (others / 16 + experts / 2) * 12


def test_the_preset_fits_the_devices_it_names() -> None:
    phases = plan.memory(BIG, BIG_SHAPE, 8)
    device = 141e9
    assert all(sum(parts.values()) < 0.8 * device for parts in phases.values())
    kept = phases["GENERATE"]["policy weights"] + BIG.engine.memory_fraction * device
    assert kept < 0.85 * device
    assert (
        phases["GENERATE"]["engine weights"] < 0.7 * BIG.engine.memory_fraction * device
    )  # the rest is KV cache


def test_a_reference_model_is_another_copy_of_the_weights() -> None:
    config = with_values(TINY, {"algo.kl_coef": 0.01})
    weights = plan.memory(config, TINY_SHAPE, 2)["TRAIN"]["policy weights"]
    assert weights == 2 * plan.memory(TINY, TINY_SHAPE, 2)["TRAIN"]["policy weights"]


def test_kv_cache_demand_by_hand() -> None:
    # 64 conversations on a rank, 512 tokens each; 2 * 4 layers * 2 heads * 32 numbers of 4 bytes.
    assert plan.kv_cache_demand(TINY, TINY_SHAPE, 2) == 64 * 512 * (2 * 4 * 2 * 32) * 4
    few = with_values(TINY, {"engine.max_num_seqs": 8})
    assert plan.kv_cache_demand(few, TINY_SHAPE, 2) == 8 * 512 * (2 * 4 * 2 * 32) * 4


def test_the_layout_follows_megatron_order() -> None:
    text = dry_run.describe(TINY, TINY_SHAPE, 4)
    rows = [line.split() for line in text.split("ranks (4)\n")[1].split("\n\n")[0].splitlines()]
    columns = [rows[0].index(name) for name in ("rank", "dp", "ep", "tp", "experts")]
    assert [[row[i] for i in columns] for row in rows[1:]] == [
        ["0", "0", "0", "0", "0..3"],
        ["1", "1", "1", "0", "4..7"],
        ["2", "2", "0", "0", "0..3"],
        ["3", "3", "1", "0", "4..7"],
    ]


def test_the_layout_of_every_axis_follows_megatron_order() -> None:
    config = with_values(
        TINY, {"parallel.tp": 2, "parallel.pp": 2, "parallel.ep": 2, "parallel.engine_tp": 2}
    )
    text = dry_run.describe(config, TINY_SHAPE, 8)
    rows = [line.split() for line in text.split("ranks (8)\n")[1].split("\n\n")[0].splitlines()]
    columns = [rows[0].index(name) for name in ("pp", "dp", "tp", "ep", "etp", "layers", "engine")]
    assert [[row[i] for i in columns] for row in rows[1:]] == [
        ["0", "0", "0", "0", "0", "0..1", "0"],
        ["0", "0", "1", "0", "1", "0..1", "0"],
        ["0", "1", "0", "1", "0", "0..1", "1"],
        ["0", "1", "1", "1", "1", "0..1", "1"],
        ["1", "0", "0", "0", "0", "2..3", "2"],
        ["1", "0", "1", "0", "1", "2..3", "2"],
        ["1", "1", "0", "1", "0", "2..3", "3"],
        ["1", "1", "1", "1", "1", "2..3", "3"],
    ]


def test_uneven_and_interleaved_stages_have_the_layers_they_are_given() -> None:
    assert ParallelConfig(pp=2).pieces(3) == (range(2), range(2, 3))
    assert ParallelConfig(pp=2, pp_layers=(1, 2)).pieces(3) == (range(1), range(1, 3))
    assert ParallelConfig(pp=2, vpp=2).pieces(5) == (
        range(2),
        range(2, 3),
        range(3, 4),
        range(4, 5),
    )
    with pytest.raises(ValueError, match="are not 2 positive numbers that add up to 3 layers"):
        ParallelConfig(pp=2, pp_layers=(2, 2)).pieces(3)
    config = with_values(TINY, {"parallel.pp": 2, "parallel.vpp": 2, "parallel.ep": 1})
    text = dry_run.describe(config, TINY_SHAPE, 2)
    rows = [line.split() for line in text.split("ranks (2)\n")[1].split("\n\n")[0].splitlines()]
    assert [row[rows[0].index("layers")] for row in rows[1:]] == ["0..0,2..2", "1..1,3..3"]


def test_memory_is_that_of_the_fullest_stage() -> None:
    even, uneven = (
        plan.params_per_rank(
            with_values(TINY, {"parallel.pp": 2, "parallel.ep": 1, "parallel.pp_layers": sizes}),
            TINY_SHAPE,
        )
        for sizes in ((), (1, 3))
    )
    assert even[1] == TINY_SHAPE.num_expert_params // 2
    assert uneven[1] == TINY_SHAPE.num_expert_params * 3 // 4
    assert uneven[0] == pytest.approx(1.5 * even[0], abs=1)


def test_a_long_layout_is_cut() -> None:
    text = dry_run.describe(BIG, BIG_SHAPE, 64)
    assert "... and 48 more" in text
    assert "\n  15 " in text and "\n  16 " not in text


def test_the_batch_plan() -> None:
    text = dry_run.describe(BIG, BIG_SHAPE, 8)
    assert "128 per step, 16 samples each: 2048 rollouts" in text
    assert "256 per engine, 256 in flight" in text
    assert "at most 512 prompt + 4096 response = 4608 tokens" in text
    assert "2 per step of 1024 rollouts; 400 in 200 steps" in text
    # One sequence of 4608 tokens fits a micro-batch of 8192, so at worst each of a rank's 128 has
    # its own.
    assert "at most 128 per update and rank" in text
    assert f"384 bytes per token, at most {256 * 4608 * 384 / 2**20:,.1f} MiB" in text


@pytest.mark.parametrize(
    ("config", "shape", "world_size"), [(TINY, TINY_SHAPE, 2), (BIG, BIG_SHAPE, 8)]
)
def test_the_config_in_the_plan_can_be_read_back(
    config: Config, shape: ModelShape, world_size: int
) -> None:
    text = dry_run.describe(config, shape, world_size)
    block = text.removeprefix("config\n").split("\n\nmodel\n")[0]
    assert from_yaml("\n".join(line[2:] for line in block.splitlines())) == config


def test_a_dense_plan_has_neither_experts_nor_routes() -> None:
    text = dry_run.describe(PRESETS["qwen3-0.6b"](), DENSE_SHAPE, 1)
    assert "596.05 M parameters, 28 layers, dense" in text
    assert "routes " not in text
