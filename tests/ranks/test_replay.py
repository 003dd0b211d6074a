"""Replay in Megatron's own routers: identity, oracle, reach of gradients, passes, wrong routes.

The numbers of the experiments are those of tests/README.md.
"""

from __future__ import annotations

import math
import re
from itertools import chain
from types import SimpleNamespace

import pytest
import torch

from tests.families import random_checkpoint
from tests.ranks import dose_cases, pass_cases, plan_cases, recompute_cases, router_cases
from tests.ranks.router_model import ROUTERS
from tests.sweeps import sweep
from tests.world import run_rows, run_world

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random Qwen3-MoE: 3 layers, one of them dense, 16 experts top-4."""
    return str(random_checkpoint(tmp_path_factory.mktemp("other"), tied=True, mlp_only_layers=[1]))


# ------------------------------------------------------------------------------------------------
# E1


@pytest.fixture(scope="module")
def routers() -> SimpleNamespace:
    """Everything of E1 to E3, in one process."""
    return run_world(router_cases.routers, 1)[0]


@pytest.mark.parametrize("router", ROUTERS)
def test_replaying_the_live_choice_changes_no_bit(router: str, routers: SimpleNamespace) -> None:
    """Outputs and every gradient against Megatron with no replay at all."""
    found = routers.identity[router]
    assert found.gradients == 27 and found.router_gradient > 0
    assert found.record == []
    assert found.replay == []
    assert found.agreed == [63, 63]
    assert len(found.foreign) == 28, "other routes must change all of it, or equality shows nothing"


@pytest.mark.parametrize("router", ROUTERS)
def test_rows_without_a_route_choose_as_live_routing_does(
    router: str, routers: SimpleNamespace
) -> None:
    found = routers.identity[router]
    assert 10 < found.missing < 30
    assert found.live_rows == []  # with recorded routes around them: bitwise the whole model
    # With foreign routes around them: bitwise what those states say
    assert found.live_rows_moved == 0
    assert found.foreign_rows_moved > 50


# ------------------------------------------------------------------------------------------------
# E2


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float32, 1e-5), (torch.float64, 1e-10)], ids=["float32", "float64"]
)
@pytest.mark.parametrize("mask", ["live", "random", "disjoint"])
@pytest.mark.parametrize("router", ROUTERS)
def test_outputs_and_gradients_equal_a_dense_float64_oracle(
    router: str, mask: str, dtype: torch.dtype, limit: float, routers: SimpleNamespace
) -> None:
    found = routers.oracle[f"{router} / {mask} / {dtype}"]
    wrong = {part: error for part, error in found.errors.items() if not error <= limit}
    assert wrong == {}
    assert found.router_gradient > 0.1
    if mask == "disjoint":
        assert found.shared_with_live == 0
    if "moe_router_pre_softmax" not in ROUTERS[router]:
        assert found.outside_mask == 0.0  # a softmax over all experts depends on all
    if router.startswith("softmax"):
        assert found.row_sum <= limit  # a softmax does not see what all its logits share
    if found.finite_difference is not None:
        # Of steps of 1e-6: rounding 1e-16 / 1e-6, curvature 1e-12
        assert found.finite_difference <= 1e-7


def test_softmax_over_one_expert_is_refused(routers: SimpleNamespace) -> None:
    found = routers.top_1
    assert "pre-softmax when topk is 1" in found.refusal
    assert found.router_gradient == 0.0
    assert found.expected <= 1e-12
    assert found.expert_gradient > 1.0


# ------------------------------------------------------------------------------------------------
# E3


def _reach_faults(found: SimpleNamespace) -> list[str]:
    """What of the gradients does not arrive where it must, or arrives where it must not."""
    is_right = {
        "router": found.router_gradient > 0,
        "gates of drifted experts": found.drifted_gate > 0,
        "logits of drifted experts": found.drifted_logit_gradient > 0,
        "experts that no route names": found.unused_gradient == 0,
        "experts that routes name": found.used_gradient > 0,
    }
    return [what for what, holds in is_right.items() if not holds]


def test_gradients_reach_router_and_drifted_experts_and_nobody_else(
    routers: SimpleNamespace,
) -> None:
    for name, found in routers.reach.items():
        assert found.drifted > 100 and found.unused_experts == 8
        if name.endswith("RouterTap"):
            assert _reach_faults(found) == [], name
        # the faulty tap gathers from scores that were zeroed outside the live choice: the check
        # must say so
        else:
            assert "logits of drifted experts" in _reach_faults(found), name


# ------------------------------------------------------------------------------------------------
# The plausibility filter, and what is refused


def test_an_implausible_expert_gives_way_to_the_best_live_one_left(
    routers: SimpleNamespace,
) -> None:
    """Gate scores 8 7 6 4 | 3 2.1 1.9 1 | 0.1 ...; the weakest live one is 4, so at ratio 0.5
    experts below 2 go.
    """
    for router in ("softmax over the top k", "softmax over all"):
        found = routers.filter.by_router[router]
        assert found.used == [[4, 1, 5, 0], [0, 1, 2, 3], [0, 1, 2, 5], [0, 1, 2, 3]]
        assert found.gathered
        agreed, margin, replaced = found.counts
        assert (agreed, replaced) == (0, 1 + 4)  # the row without a route is not counted
        weakest = (1.9, 0.1, 2.1)  # of each row's replayed experts
        margins = {
            "softmax over the top k": sum(math.log(4 / score) for score in weakest),
            "softmax over all": sum(4 - score for score in weakest)
            / 33.8,  # 33 of eight experts, 0.8 of the others
        }
        assert margin == pytest.approx(margins[router], rel=1e-6)  # float32
    # Expert 7 is live by its bias; its gate score of 0.1 is the weakest live one, and half of it
    # the limit.
    for router in ("sigmoid, bias", "softmax, bias"):
        biased = routers.filter.by_router[router]
        assert biased.used == [[4, 6, 5, 0], [7, 0, 1, 2], [0, 1, 2, 5], [7, 0, 1, 2]]
        assert biased.gathered and biased.counts[2] == 3


def test_router_entropy_and_gap_by_hand(routers: SimpleNamespace) -> None:
    """Of the scores above: the gates are 8 / 33.8, 7 / 33.8, ...; three rows alike are captured."""
    gates = [score / 33.8 for score in (8, 7, 6, 4, 3, 2.1, 1.9, 1, *[0.1] * 8)]
    entropy = -sum(gate * math.log(gate) for gate in gates)
    # The weakest live score less the best of the others; with the bias 6 and 4, in tenths.
    gaps = {"softmax over the top k": math.log(4 / 3), "softmax over all": 1 / 33.8}
    gaps |= {"sigmoid, bias": 0.2, "softmax, bias": 2 / 33.8}
    for router, gap in gaps.items():
        found = routers.filter.by_router[router].shapes
        # float32: 1e-7 of scores of 1 in differences of 0.03
        assert found == pytest.approx([3 * entropy, 3 * gap], rel=1e-5), router


def test_the_filter_off_changes_no_bit_and_at_1_is_the_live_choice(
    routers: SimpleNamespace,
) -> None:
    found = routers.filter
    assert found.nearly_0_differs == []
    assert found.ratio_1_is_live
    assert found.replaced["0.0"] is None and found.replaced["1e-30"] == 0.0
    # Random top 4 of 16 shares one in four with the live one
    assert 0.5 < found.replaced["1.0"] < 1.0


def test_replay_refuses_routers_that_would_break_it_silently(routers: SimpleNamespace) -> None:
    said = routers.refusals
    settings = [name for name in said if " = " in name]
    assert len(settings) == 10
    for setting in settings:
        assert said[setting].startswith(f"AssertionError: {setting}, and replay needs "), setting
    assert "has decoder layer 1; MoE layers are [2]" in said["a router in a dense layer"]
    assert (
        "have routers in layers [[1, 2]], the model in [1, 2, 5]"
        in said["a layer without a router"]
    )
    assert "is a Quantile, not a plain top-k router" in said["another router"]
    assert "router stray.0 has decoder layer -1" in said["an orphan"]
    assert said["a head of multi-token prediction"] == "nothing was raised"
    assert said["of the head"] == "True None 0", (
        "in Megatron's list when built; live and unlisted when attached"
    )


# ------------------------------------------------------------------------------------------------
# Modes


@pytest.fixture(scope="module")
def modes(other_model: str) -> SimpleNamespace:
    return run_world(pass_cases.modes, 1, model=other_model)[0]


def test_every_mode_reports_agreement_at_the_rollouts_weights_only(modes: SimpleNamespace) -> None:
    assert not [
        key
        for key in modes.reports["off"].row
        if key.startswith("routing/") or key.endswith("_live")
    ]
    recorded = modes.reports["r2"].row
    assert recorded["routing/agreement"] == recorded["routing/agreement_update_1"] == 1.0
    assert recorded["routing/agreement_update_2"] < 1.0, (
        "the second update routes with changed weights"
    )
    assert "mismatch/k3_live" not in recorded
    for name in ("r3", "r3, one update"):
        found = modes.reports[name]
        assert found.agreement_slots == found.all_slots > 200  # each slot once
        assert found.row["routing/agreement"] == found.agreement
        assert found.row["routing/margin"] > 0
        assert {key for key in found.row if "_layer/" in key} == {
            f"routing/{name}_layer/{i}"
            for name in ("agreement", "load_max", "load_entropy", "load_dead")
            for i in (0, 2)
        }
    assert {"routing/agreement_update_1", "routing/agreement_update_2"} <= modes.reports[
        "r3"
    ].row.keys()
    assert "routing/agreement_update_1" not in modes.reports["r3, one update"].row


def test_the_first_batch_is_scored_before_only_to_record_its_routes(modes: SimpleNamespace) -> None:
    for name, kind in (("off", "live"), ("r3", "replay")):
        first, second = modes.reports[name].sizes
        # Of all batches; the shadow pass comes after both
        old, reference, *_ = modes.reports[name].scored
        assert old == [kind, second] and reference == ["live", first + second] and first > 0
    assert ["record", sum(modes.reports["r2"].sizes)] in modes.reports["r2"].scored


def test_the_shadow_pass_compares_both_arms_on_one_micro_batch(modes: SimpleNamespace) -> None:
    for name in ("r3", "r3, one update"):
        row = modes.reports[name].row
        # Step 2 samples the second micro-batch of the first update, whose own pass is the other arm
        assert modes.reports[name].scored[-1] == ["live", 1]
        assert ["replay", 1] not in modes.reports[name].scored
        # Bit for bit for the whole micro-batch. The update packs a part of it with other sequences,
        # where sums of float32 differ in their last bits.
        bound = 0.0 if name == "r3" else 1e-6
        assert row["mismatch/k3_ratio"] == pytest.approx(
            modes.reports[name].k3_ratio, rel=bound, abs=0.0
        )
        assert row["mismatch/k3_ratio"] == pytest.approx(
            row["mismatch/k3_live"] / row["mismatch/k3_replay"]
        )
        for figure in ("f2", "abs_p99", "abs_max"):
            assert {f"mismatch/{figure}_live", f"mismatch/{figure}_replay"} <= row.keys()
    # Other tokens would show: a hundred times the bound above.
    part = modes.reports["r3, one update"]
    assert abs(part.k3_ratio / part.whole_k3_ratio - 1) > 1e-4


def test_the_reference_replays_only_when_asked(modes: SimpleNamespace) -> None:
    """Before the first update the reference is the policy: any KL between them is of other
    routes.
    """
    assert modes.reports["r3, one update"].row["loss/kl_ref"] == pytest.approx(0.0, abs=1e-9)
    assert modes.reports["r3"].row["loss/kl_ref"] > 1e-2


def test_a_schedule_that_fails_half_way_leaves_nothing_behind(modes: SimpleNamespace) -> None:
    accident = modes.accident
    assert accident.message == "OSError: in the middle of a schedule"
    assert accident.state == ["live", False, 0, "", [], "live"]
    assert accident.same, "bitwise"
    assert accident.grad_norm > 0


# ------------------------------------------------------------------------------------------------
# E7


@pytest.mark.parametrize(("ranks", "ep"), [(1, 1), (2, 2)], ids=["single", "ep2"])
def test_old_pass_and_first_update_are_one_policy(ranks: int, ep: int, other_model: str) -> None:
    for result in run_world(pass_cases.consistency, ranks, model=other_model, ep=ep):
        for old_pass in ("replay", "record"):
            found = result.old_passes[old_pass]
            assert found.tokens > 50
            assert found.off_by <= 1e-6
            assert found.clipped == 0
        assert result.old_passes["live"].off_by > 1e-2, (
            "a live old pass before replayed updates is another policy"
        )

        recorded = result.old_passes["record"]  # R2
        assert recorded.agreed == recorded.slots > 200
        assert result.agreement[0] == 1.0
        assert result.agreement[-1] < 0.9, (
            "the router must have moved, or the next line shows nothing"
        )
        assert result.kept_routes == [True] * 4


# ------------------------------------------------------------------------------------------------
# E8


@pytest.fixture(
    scope="module",
    params=sweep(
        ("fused float32", "fused bfloat16", "sorted bfloat16", "grouped bfloat16"),
        kept=("fused float32",),
    ),
)
def recomputation(other_model: str, request: pytest.FixtureRequest) -> SimpleNamespace:
    experts, dtype = request.param.split()
    case = recompute_cases.recomputation
    return run_world(case, 1, model=other_model, experts=experts, dtype=dtype)[0]


def test_recomputation_changes_no_bit_of_any_gradient(recomputation: SimpleNamespace) -> None:
    micro_batches = recomputation.micro_batches
    assert micro_batches == 4
    assert recomputation.recomputed == {
        "none": 0,
        "selective": 0,
        "moe": 2 * micro_batches,
        "full": 2 * micro_batches,
    }
    for recompute in ("none", "selective", "moe", "full"):
        for order in ("one by one", "in flight"):
            found = recomputation.difference[f"{recompute}, {order}"]
            assert found == 0.0, f"{recompute}, {order}"


@pytest.mark.parametrize("recompute", ["moe", "full"])
def test_recomputation_from_the_wrong_end_shows(
    recompute: str, recomputation: SimpleNamespace
) -> None:
    name = f"{recompute}, stack"
    assert name in recomputation.messages or recomputation.difference[name] > 1e-3


@pytest.mark.parametrize("order", ["last first", "shuffled", "in one pass"])
@pytest.mark.parametrize("recompute", ["selective", "moe", "full"])
def test_recomputation_takes_its_own_routes_in_any_order(
    recompute: str, order: str, recomputation: SimpleNamespace
) -> None:
    assert f"{recompute}, {order}" not in recomputation.messages
    # Gradients of four micro-batches are summed in another order: rounding of float32, and of
    # bfloat16 (2^-9 each time) where they meet before they reach the float32 buffer.
    in_half = recomputation.dtype == "bfloat16" and order == "in one pass"
    assert recomputation.difference[f"{recompute}, {order}"] <= (2**-7 if in_half else 1e-6)


@pytest.mark.parametrize("recompute", ["moe", "full"])
def test_a_second_recomputation_with_the_same_routes_is_refused(
    recompute: str, recomputation: SimpleNamespace
) -> None:
    assert (
        "a recomputation for forward 3, whose routes are taken"
        in recomputation.messages[f"{recompute}, twice"]
    )


# ------------------------------------------------------------------------------------------------
# Sizes of what ranks exchange


def test_replayed_layers_exchange_no_sizes_of_their_own(other_model: str) -> None:
    rows = [{"experts": experts} for experts in ("fused", "sorted")]
    for found in chain(*run_rows(plan_cases.plans, 2, rows, model=other_model)):
        layers, micro_batches = found.layers, found.micro_batches
        assert micro_batches > 1 and layers > 1
        assert found.exchanges == {
            "replay": 0,
            "live": layers * micro_batches,
            # in forward and recomputation
            "replay without a plan": 2 * layers * micro_batches,
        }
        assert found.same
        assert "layer 0: the tokens for each rank are not those that were planned" in found.message
        counts = re.search(r"per rank: (.*), planned: (.*)", found.other_tokens)
        assert counts and counts[1] == counts[2], found.other_tokens


# ------------------------------------------------------------------------------------------------
# E6


@pytest.mark.e2e
def test_flips_show_in_agreement_one_for_one_and_raise_k3_with_the_dose() -> None:
    """A float32 engine: without flips engine and policy agree to rounding, so every effect is the
    flips'.
    """
    (result,) = run_world(dose_cases.dose_response, 1, engine_dtype="float32")
    doses = [result.doses[str(share)] for share in dose_cases.DOSES]
    # slots that two float32 stacks may decide differently; on the machines seen there was none
    near_ties = 2
    for dose in doses:
        assert dose.rows > 1000
        assert dose.wrong == 0  # what is installed is used, however wrong
        # Nothing routes before the first MoE layer: there flips alone part the live choice from the
        # replayed one.
        assert dose.agreed[0] == pytest.approx(dose.rows - dose.hits[0], abs=near_ties)
    for layer, found in enumerate(result.one_layer):
        assert found.hits[layer] > 100 and sum(found.hits) == found.hits[layer]
        expected = [found.rows] * layer + [found.rows - found.hits[layer]]
        assert found.agreed[: layer + 1] == pytest.approx(expected, abs=near_ties)
    # E4: without replay too, two float32 stacks give one probability and make one choice.
    assert result.live.figures["abs_max"] <= 1e-4
    assert doses[0].agreed == pytest.approx([doses[0].rows] * len(doses[0].agreed), abs=near_ties)
    k3 = [dose.figures["k3"] for dose in doses]
    assert k3 == sorted(set(k3)), f"k3 of the doses {dose_cases.DOSES}: {k3}"
    assert k3[0] < 1e-10 < 1e-7 < k3[1]


@pytest.mark.e2e
def test_misaligned_routes_raise_k3_tenfold_over_correct_ones() -> None:
    """A bfloat16 engine: correct replay leaves the mismatch of real runs, about 6e-5 here, and is
    the yardstick.
    """
    (result,) = run_world(dose_cases.dose_response, 1, engine_dtype="bfloat16")
    correct = result.doses["0.0"]
    assert 1e-5 < correct.figures["k3"] < 1e-3
    assert min(correct.agreed) > 0.98 * correct.rows
    assert len(result.misaligned) == 6
    for name, found in result.misaligned.items():
        assert found.wrong == 0, name
        assert found.figures["k3"] >= 10 * correct.figures["k3"], (
            f"{name}: {found.figures} over {correct.figures}"
        )
