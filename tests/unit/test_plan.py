"""The plan before a launch, against figures worked out by hand."""

import re
import time
from itertools import pairwise
from typing import Any

import pytest
import torch

from benchmarks.gpu import active_params, forward_flops
from r3 import extras
from r3.assets import TINY_MOE
from r3.checks import examine
from r3.config import OF_OBJECTIVE, Config, ParallelConfig, from_yaml, parse_value, with_values
from r3.configs import KNOWN_SHAPES, PRESETS
from r3.extras import dry_run, planner
from r3.models.shape import ModelShape
from r3.run import PIECE
from r3.tools.planning import memory_plan as plan
from tests.settings import TINY

TINY_SHAPE = ModelShape.read(TINY_MOE)
BIG = PRESETS["qwen3-moe-30b-a3b"]()
BIG_SHAPE = ModelShape.from_hf(KNOWN_SHAPES["Qwen/Qwen3-30B-A3B"])
DENSE_SHAPE = ModelShape.from_hf(KNOWN_SHAPES["Qwen/Qwen3-0.6B"])
GIB = 2**30
# 4 layers of 8 experts with three 128 x 64 matrices; an eighth of the experts, and all the rest.
TINY_EXPERTS = 4 * 8 * 3 * 128 * 64
BIG_EXPERTS = BIG_SHAPE.num_expert_params / 8
BIG_OTHERS = BIG_SHAPE.num_params - BIG_SHAPE.num_expert_params
describe = dry_run().describe
host_problems, memory_problems = planner().host_problems, planner().memory_problems
plan_for, verdict = planner().plan_for, planner().verdict


def test_route_bytes() -> None:
    assert plan.route_bytes_per_token(TINY_SHAPE) == 4 * 2
    assert plan.route_bytes_per_token(BIG_SHAPE) == 48 * 8  # ids 0 .. 127 and -1 fit one byte
    assert plan.route_bytes_per_token(DENSE_SHAPE) == 0
    many = ModelShape.from_hf({**KNOWN_SHAPES["Qwen/Qwen3-30B-A3B"], "num_experts": 256})
    assert plan.route_bytes_per_token(many) == 48 * 8 * 2


def test_experts_are_sharded_and_the_rest_is_not() -> None:
    others, experts = plan.params_per_rank(TINY, TINY_SHAPE)
    assert experts == TINY_EXPERTS // 2  # on a rank of two
    assert others == TINY_SHAPE.num_params - TINY_EXPERTS


def test_memory_of_tiny_by_hand() -> None:
    others = 1_119_616 - TINY_EXPERTS
    held = others + TINY_EXPERTS // 2
    phases = plan.memory(TINY, TINY_SHAPE, 2)
    # Context and graphs, and two communicators: of all ranks, which are those of data parallelism,
    # and of the experts.
    frameworks = plan.CONTEXT_BYTES + plan.CUDA_GRAPH_BYTES + 3 * plan.COMMUNICATOR_BYTES
    always = {"frameworks": frameworks, "policy weights": held * 4}
    embedding = 512 * 128 * 4  # which the engine's reload builds anew
    assert phases["SYNC"] == always | {"engine weights": 1_119_616 * 4, "sync buffers": embedding}
    # 16384 tokens: 4 D + 2 (q + k) and 2 experts of 3 F + D values; 16 bytes per logit of 128.
    buffers = 16384 * 4 * (4 * 128 + 2 * 192 + 2 * (3 * 64 + 128)) + 16 * 128 * 512
    generate = {"engine weights": 1_119_616 * 4, "engine buffers": buffers, "KV cache": GIB / 16}
    assert phases["GENERATE"] == always | generate
    train = phases["TRAIN"]
    assert (train["policy weights"], train["gradients"]) == (held * 4, held * 4)
    # Two float32 moments: the others' over both ranks, the experts' not again, for no other rank
    # holds them.
    assert train["optimizer"] == (others / 2 + TINY_EXPERTS / 2) * 8
    assert "engine weights" not in train


def test_activations_of_tiny_by_hand() -> None:
    # float32; hidden 128, query width 128, key width 64, 2 of 8 experts of width 64.
    norm = 8 * 128
    attention = norm + 4 * (128 + 2 * 64) + 4 * (3 * 128 + 64)
    experts = 4 * 2 * (128 + 5 * 64) + 9 * 8 + 24 * 2
    rest = 4 * 128 + 4 * (2 * 128 + 2 * (128 + 4 * 64))
    seen = plan.activation_bytes_per_token(TINY, TINY_SHAPE)
    assert seen == 4 * (attention + norm + experts) + rest
    full = with_values(TINY, {"model.recompute": "full"})
    one_layer = attention + norm + experts
    assert plan.activation_bytes_per_token(full, TINY_SHAPE) == 4 * 4 * 128 + one_layer + rest
    # Of a norm only its input, the output of attention once, of an expert only gate and up.
    chosen = with_values(TINY, {"model.recompute": "selective"})
    kept = (attention - norm + 4 * 128 - 4 * 128) + 4 * 128 + (experts - 4 * 2 * 3 * 64)
    again = norm + 4 * 2 * 3 * 64
    assert plan.activation_bytes_per_token(chosen, TINY_SHAPE) == 4 * kept + again + rest
    only_moe = with_values(TINY, {"model.recompute": "moe"})
    seen = plan.activation_bytes_per_token(only_moe, TINY_SHAPE)
    assert seen == 4 * (attention + norm) + experts + rest


def test_output_layer_by_hand() -> None:
    # Qwen3-30B-A3B: hidden 2048, vocabulary 151936, bfloat16, 8192 tokens of which 1024 have logits
    # at a time.
    logits, weight, hidden = 1024 * 151_936, 2048 * 151_936, 8192 * 2 * 2048

    def head(**values: Any) -> float:
        changed = {name.replace("_", ".", 1): value for name, value in values.items()}
        return plan.head_bytes(with_values(BIG, changed), BIG_SHAPE)

    assert head() == logits * 6 + weight * 6 + hidden
    assert head(model_fp32_head=True) == logits * 4 + weight * 8 + hidden + weight * 4
    assert head(train_logprob_chunk_tokens=0) == 8 * logits * 4 + weight * 6 + hidden
    assert head(parallel_tp=2, parallel_cp=2) == (logits * 6 + weight * 6 + hidden) / 2
    assert head(algo_entropy_coef=0.001) == logits * 8 + weight * 6 + hidden
    seen = plan.memory(BIG, BIG_SHAPE, 8)["TRAIN"]["output layer"]
    assert seen == plan.head_bytes(BIG, BIG_SHAPE)


def test_bfloat16_keeps_a_float32_copy_and_the_optimizer_is_sharded() -> None:
    eight, sixteen = (plan.memory(BIG, BIG_SHAPE, n)["TRAIN"]["optimizer"] for n in (8, 16))
    assert eight == (BIG_OTHERS / 8 + BIG_EXPERTS) * 12
    assert sixteen == (BIG_OTHERS / 16 + BIG_EXPERTS / 2) * 12


def test_optimizer_step_and_checkpoint_by_hand() -> None:
    phases = plan.memory(BIG, BIG_SHAPE, 8)
    # An eighth of all that is not an expert is less than the embedding.
    assert phases["OPTIMIZER"]["clipping"] == BIG_OTHERS / 8 * 4
    # On one pipeline stage of 8, 128 experts of a layer, gate and up in one tensor.
    stage = with_values(BIG, {"parallel.pp": 8, "parallel.ep": 1})
    clipping = plan.memory(stage, BIG_SHAPE, 8)["OPTIMIZER"]["clipping"]
    assert clipping == 128 * 2 * 768 * 2048 * 4
    assert "activations" not in phases["OPTIMIZER"]
    # Pieces of 16 million values, and the rank's own part of them.
    assert phases["SAVE"]["gathered state"] == 4 * 2 * PIECE
    host = plan.host_memory(BIG, BIG_SHAPE, 8)
    assert host["optimizer"] == phases["TRAIN"]["optimizer"]
    # The gathered state in float32, and a copy of the weights in bfloat16.
    assert host["checkpoint"] == (12 + 2) * (BIG_EXPERTS + BIG_OTHERS)
    assert host["rollouts"] == 256 * 4608 * (24 + 384)
    masked = with_values(BIG, {"rollout.top_k": 512, "parallel.cp": 2})
    assert plan.host_memory(masked, BIG_SHAPE, 8)["rollouts"] == 512 * 4608 * (24 + 384 + 4 * 512)
    assert plan.memory(masked, BIG_SHAPE, 8)["TRAIN"]["sampling masks"] == 8 * 512 * 8192 / 2
    assert "sampling masks" not in phases["TRAIN"]
    assert "engine weights" not in host and "reference policy" not in host


def test_a_streamed_optimizer_is_on_the_device_in_parts() -> None:
    streamed = with_values(BIG, {"train.optimizer": "streamed"})
    resident, phases = (plan.memory(one, BIG_SHAPE, 8) for one in (BIG, streamed))
    assert "optimizer" not in phases["TRAIN"]
    part = max(1 << 25, phases["OPTIMIZER"]["clipping"] / 4)
    assert phases["OPTIMIZER"]["optimizer"] == 2 * part * 12, "one is updated, one comes"
    # A checkpoint has it whole, where the gradients were.
    assert phases["SAVE"]["optimizer"] == resident["SAVE"]["optimizer"]
    assert "gradients" not in phases["SAVE"]
    hosts = [plan.host_memory(one, BIG_SHAPE, 8) for one in (BIG, streamed)]
    assert hosts[0] == hosts[1]
    assert plan.STREAMED_VALUES == extras.streamed().PART_VALUES


def test_a_kept_optimizer_is_on_the_device_while_the_engine_generates() -> None:
    kept = with_values(BIG, {"train.optimizer": "kept"})
    phases, resident = (plan.memory(one, BIG_SHAPE, 8) for one in (kept, BIG))
    state = resident["TRAIN"]["optimizer"]
    for phase in ("SYNC", "GENERATE"):
        assert phases[phase].pop("optimizer") == state
    assert phases == resident
    assert "optimizer" not in plan.host_memory(kept, BIG_SHAPE, 8)


@pytest.mark.parametrize("place", ["resident", "streamed"])
def test_a_part_of_the_optimizer_that_is_kept_is_in_all_phases(place: str) -> None:
    whole = with_values(BIG, {"train.optimizer": place})
    part = with_values(whole, {"train.optimizer_kept_gib": 7.0})
    without, phases = (plan.memory(one, BIG_SHAPE, 8) for one in (whole, part))
    for phase, added in dict(SYNC=7, GENERATE=7, TRAIN=7 * (place == "streamed"), SAVE=0).items():
        more = phases[phase].get("optimizer", 0) - without[phase].get("optimizer", 0)
        assert more == added * plan.GIB, phase
    # Two parts of a streamed one come beside what is kept.
    more = phases["OPTIMIZER"]["optimizer"] - without["OPTIMIZER"]["optimizer"]
    assert more == (place == "streamed") * 7 * plan.GIB
    hosts = [plan.host_memory(one, BIG_SHAPE, 8)["optimizer"] for one in (whole, part)]
    assert hosts[0] - hosts[1] == 7 * plan.GIB
    # More than there is: all of it.
    more = plan.memory(with_values(whole, {"train.optimizer_kept_gib": 1e4}), BIG_SHAPE, 8)
    assert more["GENERATE"]["optimizer"] == without["SAVE"]["optimizer"]


def test_both_directions_of_the_link_are_busy_while_the_optimizer_streams() -> None:
    # A cut of Qwen3-30B-A3B: 6 layers, 128 experts, in the order of the model.
    layer = [19 << 20, 128 * 1536 * 2048, 128 * 2048 * 768]
    sizes = [151936 * 2048, *(layer * 6), 151936 * 2048]
    parameters = [torch.empty(size, device="meta") for size in sizes]

    def link_time(parts: list[int]) -> int:
        """The first part comes alone; then each one goes while the next one comes."""
        return parts[0] + sum(max(pair) for pair in pairwise([*parts, 0]))

    parts = [sum(one.numel() for one in part) for part in extras.streamed().parts_of(parameters)]
    assert sum(parts) == sum(sizes) and len(parts) == 20
    assert link_time(parts) == sum(sizes) + max(sizes)  # nothing waits but the first part
    # In the order of the model, large parts would wait for small ones.
    assert link_time(sizes) > 1.4 * sum(sizes)


def test_sync_buffers_and_cache_follow_the_layout() -> None:
    embedding = 151_936 * 2048 * 2
    assert plan.sync_buffer_bytes(BIG, BIG_SHAPE) == embedding
    split = with_values(BIG, {"parallel.tp": 4, "parallel.engine_tp": 2})
    assert plan.sync_buffer_bytes(split, BIG_SHAPE) == embedding * 1.5  # joined, and half of it
    one = 2 * 48 * 4 * 128 * 2 * 4608
    assert plan.sequence_bytes(BIG, BIG_SHAPE) == one
    assert plan.sequence_bytes(split, BIG_SHAPE) == one / 2
    # Each of 8 ranks has a whole one of the 4 key-value heads.
    wide = with_values(BIG, {"parallel.engine_tp": 8})
    assert plan.sequence_bytes(wide, BIG_SHAPE) == one / 4


def test_the_engine_fills_its_share_of_the_device() -> None:
    parts = plan.memory(BIG, BIG_SHAPE, 8, device_gib=141)["GENERATE"]
    share = parts["engine weights"] + parts["engine buffers"] + parts["KV cache"]
    assert share == pytest.approx(0.7 * 141 * GIB)
    assert plan.memory(BIG, BIG_SHAPE, 8)["GENERATE"]["KV cache"] == 0  # device not known
    # On 80 GiB the weights are more than the share.
    assert plan.memory(BIG, BIG_SHAPE, 8, device_gib=80)["GENERATE"]["KV cache"] == 0


def test_the_presets_fit_the_devices_they_name() -> None:
    assert plan.fit(BIG, BIG_SHAPE, 8, device_gib=141).fits
    assert plan.fit(PRESETS["qwen3-0.6b"](), DENSE_SHAPE, 1, device_gib=40).fits
    assert not plan.fit(BIG, BIG_SHAPE, 8, device_gib=80).fits
    small = plan.fit(PRESETS["qwen3-moe-30b-80gb"](), BIG_SHAPE, 8, device_gib=80)
    # With 5 % kept free, and as much again for what the estimates do not know.
    assert max(small.needs_gib.values()) < 0.9 * 80
    assert small.cached_sequences > 256


def test_a_reference_model_is_kept_on_the_host() -> None:
    config = with_values(TINY, {"algo.kl_coef": 0.01})
    weights = plan.memory(config, TINY_SHAPE, 2)["TRAIN"]["policy weights"]
    assert weights == plan.memory(TINY, TINY_SHAPE, 2)["TRAIN"]["policy weights"]
    # And the policy's own, while the reference policy scores.
    assert plan.host_memory(config, TINY_SHAPE, 2)["reference policy"] == 2 * weights


def test_kv_cache_demand_by_hand() -> None:
    # 64 conversations on a rank, 512 tokens each; 2 * 4 layers * 2 heads * 32 numbers of 4 bytes.
    assert plan.kv_cache_demand(TINY, TINY_SHAPE, 2) == 64 * 512 * (2 * 4 * 2 * 32) * 4
    few = with_values(TINY, {"engine.max_num_seqs": 8})
    assert plan.kv_cache_demand(few, TINY_SHAPE, 2) == 8 * 512 * (2 * 4 * 2 * 32) * 4


def test_layouts_with_the_same_figures_are_one_choice() -> None:
    fits, text = plan_for(BIG, BIG_SHAPE, 8, 141)
    entries = [part.split("\n", 1) for part in text.split("\n\n")[1:]]
    assert fits and len(entries) == 3
    assert [first[:3] for first, _ in entries] == ["1. ", "2. ", "3. "]
    assert len({figures for _, figures in entries}) == 3


def columns_of(text: str, names: str) -> list[str]:
    """Some columns of the table of ranks."""
    table = re.split(r"\nranks \(\d+\)\n", text)[1].split("\n\n")[0]
    head, *rows = [line.split() for line in table.splitlines()]
    return [" ".join(row[head.index(name)] for name in names.split()) for row in rows]


def test_the_layout_of_every_axis_follows_megatron_order() -> None:
    text = describe(TINY, TINY_SHAPE, 4)
    expected = [*("0 0 0 0 0..3", "1 1 1 0 4..7", "2 2 0 0 0..3", "3 3 1 0 4..7")]
    assert columns_of(text, "rank dp ep tp experts") == expected
    axes = ("tp", "pp", "ep", "engine_tp")
    config = with_values(TINY, {f"parallel.{axis}": 2 for axis in axes})
    text = describe(config, TINY_SHAPE, 8)
    assert columns_of(text, "pp dp tp ep etp layers engine") == [
        *("0 0 0 0 0 0..1 0", "0 0 1 0 1 0..1 0", "0 1 0 1 0 0..1 1", "0 1 1 1 1 0..1 1"),
        *("1 0 0 0 0 2..3 2", "1 0 1 0 1 2..3 2", "1 1 0 1 0 2..3 3", "1 1 1 1 1 2..3 3"),
    ]


def test_uneven_and_interleaved_stages_have_the_layers_they_are_given() -> None:
    assert ParallelConfig(pp=2).pieces(3) == (range(2), range(2, 3))
    assert ParallelConfig(pp=2, pp_layers=(1, 2)).pieces(3) == (range(1), range(1, 3))
    assert [len(piece) for piece in ParallelConfig(pp=2, vpp=2).pieces(5)] == [2, 1, 1, 1]
    with pytest.raises(ValueError, match="are not 2 positive numbers that add up to 3 layers"):
        ParallelConfig(pp=2, pp_layers=(2, 2)).pieces(3)
    config = with_values(TINY, {"parallel.pp": 2, "parallel.vpp": 2, "parallel.ep": 1})
    text = describe(config, TINY_SHAPE, 2)
    assert columns_of(text, "layers") == ["0..0,2..2", "1..1,3..3"]


def test_memory_is_that_of_the_fullest_stage() -> None:
    stages = with_values(TINY, {"parallel.pp": 2, "parallel.ep": 1})
    even, uneven = (
        plan.params_per_rank(with_values(stages, {"parallel.pp_layers": sizes}), TINY_SHAPE)
        for sizes in ((), (1, 3))
    )
    assert even[1] == TINY_SHAPE.num_expert_params // 2
    assert uneven[1] == TINY_SHAPE.num_expert_params * 3 // 4
    assert uneven[0] == pytest.approx(1.5 * even[0], abs=1)


def test_a_long_layout_is_cut() -> None:
    text = describe(BIG, BIG_SHAPE, 64)
    assert "... and 48 more" in text
    assert "\n  15 " in text and "\n  16 " not in text


def test_the_batch_plan() -> None:
    text = describe(BIG, BIG_SHAPE, 8)
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
def test_a_planned_config_can_be_read(config: Config, shape: ModelShape, world_size: int) -> None:
    text = describe(config, shape, world_size)
    block = text.rpartition("\n\nconfig\n")[2]  # it comes last
    assert from_yaml("\n".join(line[2:] for line in block.splitlines())) == config


def test_a_dense_plan_has_neither_experts_nor_routes() -> None:
    text = describe(PRESETS["qwen3-0.6b"](), DENSE_SHAPE, 1)
    assert "596.05 M parameters, 28 layers, dense" in text and "routes " not in text


# ---- verdict and search


def values_of(flags: str) -> dict[str, Any]:
    """Settings by name, from the flags of a proposal."""
    words = [word.removeprefix("--") for word in flags.split()]
    pairs = zip(words[::2], words[1::2], strict=True)
    return {name: parse_value(name, value) for name, value in pairs}


def test_what_the_verdict_proposes_fits() -> None:
    assert verdict(BIG, BIG_SHAPE, 8, 141).startswith("fits: GENERATE needs most, ")
    text = verdict(BIG, BIG_SHAPE, 16, 80)
    assert text.startswith("does not fit 76.0 GiB (80 less 5% kept free for fragmentation): ")
    flags = re.search(r"^(--.*) make it fit", text, re.MULTILINE)
    assert flags is not None, text
    values = values_of(flags[1])
    assert not plan.fit(BIG, BIG_SHAPE, 16, 80).fits
    assert plan.fit(with_values(BIG, values), BIG_SHAPE, 16, 80).fits
    described = describe(BIG, BIG_SHAPE, 8, 141)
    assert "verdict\n  fits: GENERATE needs most, " in described


@pytest.mark.parametrize(
    ("config", "shape", "count", "gib"),
    [
        (BIG, BIG_SHAPE, 8, 141),
        (BIG, BIG_SHAPE, 16, 80),
        pytest.param(BIG, BIG_SHAPE, 64, 80, marks=pytest.mark.large),
        (PRESETS["qwen3-0.6b"](), DENSE_SHAPE, 8, 24),
        pytest.param(TINY, TINY_SHAPE, 4, 16, marks=pytest.mark.large),
    ],
)
def test_every_proposal_fits(config: Config, shape: ModelShape, count: int, gib: float) -> None:
    started, given = time.process_time(), config.model.recompute
    fits, text = plan_for(config, shape, count, gib)
    assert time.process_time() - started < 5
    assert fits and "3. " in text and "4. " not in text
    kinds, missing = [], ("model.path", "data.path", "eval.path")
    for words in re.findall(r"^\d\. (--.*)", text, re.MULTILINE):
        candidate = with_values(config, values_of(words))
        problems = examine(candidate, count, shape).problems
        assert [each for each in problems if each.place not in missing] == [], words
        assert plan.fit(candidate, shape, count, gib).fits, words
        kinds.append(values_of(words).get("model.recompute", given))
    order = ["none", "selective", "moe", "full"]
    assert kinds and kinds == sorted(kinds, key=order.index), "what recomputes least comes first"


def test_a_batch_that_does_not_divide_is_no_lack_of_memory() -> None:
    config = PRESETS["qwen3-0.6b"]()
    fits, text = plan_for(config, DENSE_SHAPE, 6, 80)
    first, problem, proposal = text.splitlines()
    assert not fits and first == "memory is enough on 6 devices of 80 GiB, but"
    assert "rollout.prompts_per_step = 64: must be a multiple of the 6 ranks" in problem
    assert proposal.startswith("--rollout.prompts_per_step 66 ") and "fit (tried" in proposal
    larger = with_values(config, {"rollout.prompts_per_step": 66})
    assert plan_for(larger, DENSE_SHAPE, 6, 80)[0]


def test_a_model_that_fits_nowhere_is_said_to() -> None:
    fits, text = plan_for(BIG, BIG_SHAPE, 1, 80)
    assert not fits
    assert text.startswith("none of 1 layouts of 1 devices of 80 GiB fits")
    fits, text = plan_for(BIG, BIG_SHAPE, 4, 80)
    assert not fits and "8 such devices would fit: --plan-for 8x80" in text
    assert "ask again with --lora.rank 32 --lora.expert_rank 4 (docs/lora.md)" in text
    assert "make it fit" not in verdict(BIG, BIG_SHAPE, 1, 80)


def test_the_check_refuses_only_what_cannot_fit() -> None:
    problems, warnings = memory_problems(BIG, BIG_SHAPE, 8, 141)
    assert (problems, warnings) == ([], [])
    (problem,), _ = memory_problems(BIG, BIG_SHAPE, 8, 80)
    assert problem.place == "engine.memory_fraction"  # 0.7 of 80 is less than the weights
    split = with_values(BIG, {"parallel.engine_tp": 4})
    (problem,), _ = memory_problems(split, BIG_SHAPE, 8, 70)
    assert "TRAIN needs 71.5 GiB on each rank without any buffers" in str(problem)
    problems, (warning,) = memory_problems(split, BIG_SHAPE, 8, 80)
    assert problems == [] and "TRAIN needs 80.5" in warning  # with buffers, an estimate


def test_the_check_refuses_what_cannot_fit_the_host() -> None:
    # Qwen3-30B-A3B on 8 ranks: 42.7 GiB of optimizer's state each; a checkpoint needs 57.7 more.
    assert host_problems(BIG, BIG_SHAPE, 8, 1024, ranks=8) == ([], [])
    (problem,), _ = host_problems(BIG, BIG_SHAPE, 8, 300, ranks=8)
    assert (problem.place, problem.value) == ("host memory", "300.0 GiB")
    assert "8 ranks need 341." in problem.rule and "optimizer 42.7" in problem.rule
    problems, (warning,) = host_problems(BIG, BIG_SHAPE, 8, 512, ranks=8)
    assert not problems and "checkpoint" in warning
    kept = with_values(BIG, {"engine.sleep_level": 1, "algo.kl_coef": 0.1})
    (problem,), _ = host_problems(kept, BIG_SHAPE, 8, 512, ranks=8)
    assert "or set engine.sleep_level 2, or algo.kl_coef 0" in problem.fix
    assert host_problems(BIG, BIG_SHAPE, 8, 512, ranks=4) == ([], [])


def test_a_run_without_gpus_is_refused_where_its_weights_alone_do_not_fit() -> None:
    # 4 bytes of policy and 4 of gradient per parameter of the rank; of all parameters, half of the
    # two moments, and the engine's 4 bytes.
    held = 1_119_616 - TINY_EXPERTS // 2
    needs = 2 * (8 * held + 8 * 1_119_616 / 2 + 4 * 1_119_616) / GIB
    assert host_problems(TINY, TINY_SHAPE, 2, 1.01 * needs, ranks=2, on_gpu=False) == ([], [])
    (problem,), _ = host_problems(TINY, TINY_SHAPE, 2, 0.99 * needs, ranks=2, on_gpu=False)
    assert "2 ranks need 0.0 GiB on the host (policy weights" in problem.rule
    assert "engine weights" in problem.rule


def test_devices_are_named_or_measured() -> None:
    assert planner().read_device("h200") == 141 and planner().read_device("12.5") == 12.5
    assert planner().read_plan_for("8x80") == (8, 80)
    assert planner().read_plan_for("16xh100") == (16, 80)
    for wrong in ("8", "x80", "0x80", "8x", "8x-1", "8xinf", "8xtpu", "axb"):
        with pytest.raises(ValueError, match="must be"):
            planner().read_plan_for(wrong)


def test_operations_per_token_by_hand() -> None:
    """What `benchmarks/gpu.py` divides by a device's peak."""
    # Of 30.5 B parameters: attention, norms, routers, output layer, and 8 of 128 experts.
    active = BIG_OTHERS - 151_936 * 2048 + BIG_SHAPE.num_expert_params / 16
    assert active_params(BIG_SHAPE) == active
    assert forward_flops(BIG_SHAPE, 4608) == 2 * active + 2 * 4608 * 32 * 128 * 48


def test_a_plan_without_an_engine_has_nothing_of_one() -> None:
    values = {**OF_OBJECTIVE["sft"], "train.objective": "sft", "eval.path": ()}
    config = with_values(BIG, values)
    assert [*plan.memory(config, BIG_SHAPE, 8)] == ["TRAIN", "OPTIMIZER", "SAVE"]
    assert "optimizer" not in plan.host_memory(config, BIG_SHAPE, 8), "it never leaves the device"
    streamed = with_values(config, {"train.optimizer": "streamed"})
    assert plan.host_memory(streamed, BIG_SHAPE, 8)["optimizer"] > 0
    described = describe(config, BIG_SHAPE, 8, 141)
    fits, proposed = plan_for(config, BIG_SHAPE, 8, 80)
    assert fits
    for text in (described.rpartition("\n\nconfig\n")[0], proposed):
        assert not re.search(r"engine_tp|inf |SYNC|GENERATE|weight sync|KV cache| prompts", text)
    # Control: what evaluates has an engine.
    evaluates = with_values(config, {"eval.path": BIG.eval.path})
    described = describe(with_values(evaluates, {"rollout.prompts_per_step": 8}), BIG_SHAPE, 8)
    assert "weight sync" in described and "up to 256 conversations in flight" in described
    larger = with_values(config, {"parallel.engine_tp": 2, "lora.rank": 8, "lora.expert_rank": 1})
    fits, proposed = plan_for(larger, BIG_SHAPE, 1, 141)
    assert fits and "--parallel.engine_tp 1" in proposed, "the rule about it needs no engine"


def test_ranks_broadcast_what_they_make_of_a_quantised_base() -> None:
    values = {"lora.rank": 8, "lora.expert_rank": 1}
    rows = []
    for base in ("dtype", "int8"):
        text = describe(with_values(BIG, values | {"model.base": base}), BIG_SHAPE, 8)
        rows.append(text.split("read per rank\n")[1].splitlines()[1].split())
    (rank, own, same_machine, none), made = rows
    assert none == "-" and made == [rank, own, "-", same_machine]
