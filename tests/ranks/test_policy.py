"""The Megatron shard computes what transformers computes, and the layout changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from r3 import assets
from r3.policy.weights import join_shards
from tests.families import family_checkpoint
from tests.ranks import cases
from tests.tiny import random_checkpoint
from tests.world import run_world

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random Qwen3-MoE of other sizes: 4 layers, one of them dense, 16 experts top-4, tied
    embeddings.
    """
    return str(
        random_checkpoint(
            tmp_path_factory.mktemp("other"), tied=True, mlp_only_layers=[1], num_hidden_layers=4
        )
    )


@pytest.mark.parametrize(("ranks", "ep"), [(1, 1), (2, 2), (2, 1)], ids=["single", "ep2", "dp2"])
@pytest.mark.parametrize("which", ["shipped", "random"])
def test_logits_equal_transformers(which: str, ranks: int, ep: int, other_model: str) -> None:
    model = str(assets.TINY_MOE) if which == "shipped" else other_model
    # float32 on both sides: rounding leaves about 1e-5 on logits of size 10; a wrong weight or mask
    # leaves 1e-1 and more
    assert max(run_world(cases.logits, ranks, model=model, ep=ep)) <= 1e-4


def _gradients(
    tmp: Path, model: str, name: str, ranks: int, **arguments: Any
) -> tuple[dict, dict[str, torch.Tensor]]:
    """Figures of the first rank, and gradients of all ranks put together; "updated" are the weights
    after an update.
    """
    folder = tmp / name
    folder.mkdir()
    results = run_world(cases.gradients, ranks, model=model, out=str(folder), **arguments)
    merged, updated = (
        _merged([folder / f"{what}_{rank}.pt" for rank in range(ranks)])
        for what in ("rank", "updated")
    )
    slots = sum(result["agreement_slots"] for result in results)
    loaded = {
        name: max(result[name] for result in results) for name in ("read", "largest_read", "share")
    }
    by_layer: dict[str, list[float]] = {}
    for result in results:
        for layer, part in result["by_layer"].items():
            by_layer[layer] = [
                a + b for a, b in zip(by_layer.get(layer, (0, 0)), part, strict=True)
            ]
    return results[0] | loaded | {
        "agreement_slots": slots,
        "by_layer": by_layer,
        "updated": updated,
    }, merged


def _merged(files: list[Path]) -> dict[str, torch.Tensor]:
    """Whole tensors from the cuts that each rank wrote."""
    parts: dict[str, dict[int, torch.Tensor]] = {}
    kinds: dict[str, Any] = {}
    for file in files:
        for tensor, (kind, index, value) in torch.load(file).items():
            parts.setdefault(tensor, {})[index] = value
            kinds[tensor] = kind
    return {
        tensor: join_shards(kinds[tensor], [cuts[i] for i in sorted(cuts)])
        for tensor, cuts in parts.items()
    }


@pytest.fixture(scope="module")
def single(
    tmp_path_factory: pytest.TempPathFactory, other_model: str
) -> tuple[dict, dict[str, torch.Tensor]]:
    """Loss and gradients of one process that packs everything it can, and makes all logits of a
    micro-batch at once.
    """
    return _gradients(tmp_path_factory.mktemp("single"), other_model, "single", 1, chunk=0)


LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {"ranks": 2},
    "ep2": {"ranks": 2, "parallel": {"ep": 2}},
    "tp2": {"ranks": 2, "parallel": {"tp": 2}},
    "tp2-etp1": {"ranks": 2, "parallel": {"tp": 2, "etp": 1}},
    "pp2": {"ranks": 2, "parallel": {"pp": 2}, "micro_batch_tokens": 64},
    "pp2-uneven": {
        "ranks": 2,
        "parallel": {"pp": 2, "pp_layers": [3, 1]},
        "micro_batch_tokens": 64,
    },
    # three micro-batches: a filler makes them four, since this schedule takes them in groups of pp
    "pp2-vpp2": {"ranks": 2, "parallel": {"pp": 2, "vpp": 2}, "micro_batch_tokens": 96},
    "pp2-vpp2-tp2-full-recompute": {
        "ranks": 4,
        "parallel": {"pp": 2, "vpp": 2, "tp": 2},
        "micro_batch_tokens": 64,
        "recompute": "full",
    },
    "cp2": {"ranks": 2, "parallel": {"cp": 2}},
    "tp2-dp2": {"ranks": 4, "parallel": {"tp": 2}},
    "tp2-ep2": {"ranks": 4, "parallel": {"tp": 2, "ep": 2}},
    "tp2-ep2-etp1": {"ranks": 2, "parallel": {"tp": 2, "ep": 2, "etp": 1}},
    "pp2-ep2-full-recompute": {
        "ranks": 4,
        "parallel": {"pp": 2, "ep": 2},
        "micro_batch_tokens": 64,
        "recompute": "full",
    },
    "pp2-tp2": {"ranks": 4, "parallel": {"pp": 2, "tp": 2}, "micro_batch_tokens": 64},
    "cp2-tp2": {"ranks": 4, "parallel": {"cp": 2, "tp": 2}},
    "cp2-ep2": {"ranks": 2, "parallel": {"cp": 2, "ep": 2}},
    "ep2-full-recompute": {"ranks": 2, "parallel": {"ep": 2}, "recompute": "full"},
    "dp2-sequential-moe-recompute": {"ranks": 2, "recompute": "moe", "experts": "sequential"},
    "unpacked": {"ranks": 1, "micro_batch_tokens": 50},
    "padded": {"ranks": 1, "padded": True},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_and_gradients_do_not_depend_on_layout_or_packing(
    layout: str, single: tuple[dict, dict[str, torch.Tensor]], other_model: str, tmp_path: Path
) -> None:
    figures, gradients = _gradients(tmp_path, other_model, "other", **LAYOUTS[layout])
    _compare(figures, gradients, *single)


def _compare(
    figures: dict,
    gradients: dict[str, torch.Tensor],
    expected_figures: dict,
    expected: dict[str, torch.Tensor],
) -> None:
    # float32 sums in another order: relative 1e-5 on scalars; on tensors relative to the largest
    # gradient, since entries near zero are differences of large terms
    for name in ("loss", "grad_norm", "router_grad_norm"):
        assert figures[name] == pytest.approx(expected_figures[name], rel=1e-5), name
    assert expected_figures["router_grad_norm"] > 1e-3 * expected_figures["grad_norm"], (
        "the router learns under replay"
    )
    assert figures["agreement_slots"] == expected_figures["agreement_slots"], (
        "every slot is compared exactly once"
    )
    assert figures["read"] == 1.0, (
        "a rank reads the parts of the checkpoint that it holds, not a byte more or less"
    )
    assert figures["largest_read"] <= 1.0, "and never more of it at once than its largest tensor"
    assert figures["by_layer"].keys() == expected_figures["by_layer"].keys()
    for layer, (agreed, slots) in figures["by_layer"].items():
        expected_agreed, expected_slots = expected_figures["by_layer"][layer]
        assert slots == expected_slots > 0
        assert abs(agreed - expected_agreed) <= 1, (
            "a near-tie may fall the other way in another order of sums"
        )
    # the last pipeline stage has its own copy of a tied embedding
    assert gradients.keys() - {"output_layer.weight"} == expected.keys() - {"output_layer.weight"}
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        difference = float((gradients[name] - gradient).abs().max())
        assert difference <= 1e-5 * largest, (
            f"{name}: {difference} where the largest gradient is {largest}"
        )
        # Adam's first step is the gradient's sign: where that is rounding, one of 1e-3 may go
        # either way
        moved = figures["updated"][name] - expected_figures["updated"][name]
        firm = gradient.abs() > 1e-4 * largest
        assert float((moved * firm).abs().max()) <= 1e-5, f"{name}: updated weights"


@pytest.fixture(scope="module")
def dense_first(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[str, dict, dict[str, torch.Tensor]]:
    """Moonlight with 3 layers, the first of them dense: its folder, and one process's loss and
    gradients.
    """
    base = tmp_path_factory.mktemp("dense_first")
    model = str(family_checkpoint(base / "model", "moonlight"))
    return model, *_gradients(base, model, "single", 1)


@pytest.mark.parametrize("pp_layers", [[], [1, 2]], ids=["2-1", "dense-stage"])
def test_uneven_stages_of_a_model_whose_first_layers_are_dense(
    pp_layers: list[int], dense_first: tuple[str, dict, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    """Left to itself the pipeline has 2 layers and 1; or a stage of the dense layer alone, on which
    nothing is replayed.
    """
    model, *expected = dense_first
    parallel = {"pp": 2, "pp_layers": pp_layers}
    _compare(
        *_gradients(tmp_path, model, "uneven", 2, parallel=parallel, micro_batch_tokens=64),
        *expected,
    )


def test_an_interleaved_checkpoint_resumes_under_other_layouts(
    other_model: str, tmp_path: Path
) -> None:
    def update(ranks: int, parallel: dict[str, Any], *, resume: bool = True) -> dict[str, float]:
        return run_world(
            cases.second_update,
            ranks,
            model=other_model,
            out=str(tmp_path),
            parallel=parallel,
            resume=resume,
        )[0]

    straight = update(2, {"pp": 2, "vpp": 2}, resume=False)
    assert update(2, {"pp": 2, "vpp": 2}) == straight, "the same layout, bit for bit"
    for ranks, parallel in ((1, {}), (2, {"pp": 2, "pp_layers": [1, 3]})):
        # float32 sums in another order, amplified by Adam's first step where a gradient is next to
        # nothing
        assert update(ranks, parallel) == pytest.approx(straight, rel=1e-4)


def test_fused_adam_makes_the_same_updates_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    (found,) = run_world(cases.fused_adam, 1, out=str(tmp_path))
    # One step of lr 1e-3 in float32: both round the last bits of numbers up to 1.
    assert found["moved"] > 5e-4 and found["apart"] <= 1e-6
    assert found["resumed"]


def _largest_angle(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """1 - cosine between all gradients of two layouts taken as one vector."""
    names = sorted(one.keys() & other.keys())
    a, b = (torch.cat([found[name].double().flatten() for name in names]) for found in (one, other))
    return 1 - float(a @ b / (a.norm() * b.norm()))


def test_replay_brings_bfloat16_gradients_of_two_layouts_closer(
    other_model: str, tmp_path: Path
) -> None:
    angles = {}
    for replay in ("r3", "off"):
        found = []
        for name, arguments in (
            ("one", {"ranks": 1}),
            ("two", {"ranks": 2, "parallel": {"tp": 2, "ep": 2, "etp": 1}}),
        ):
            settings = arguments | {"dtype": "bfloat16", "replay": replay}
            found.append(_gradients(tmp_path, other_model, f"{name}-{replay}", **settings)[1])
        angles[replay] = _largest_angle(*found)
    assert (
        angles["r3"] <= 1e-3
    )  # cosine 0.999: bfloat16 keeps 8 bits, and averages over many entries
    assert angles["r3"] < angles["off"], (
        f"live routing adds its flips to rounding: 1 - cosine {angles}"
    )


def test_sequence_aggregation_does_not_depend_on_layout(other_model: str, tmp_path: Path) -> None:
    one, _ = _gradients(tmp_path, other_model, "one", 1, algo={"aggregation": "sequence"})
    two, _ = _gradients(
        tmp_path, other_model, "two", 2, algo={"aggregation": "sequence"}, parallel={"cp": 2}
    )
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)  # float32, summed in another order
    assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)


ROUTED: dict[str, dict[str, Any]] = {
    "single": {"ranks": 1, "parallel": {}},
    "single-padded": {"ranks": 1, "parallel": {}, "padded": True},
    "single-unpacked": {"ranks": 1, "parallel": {}, "micro_batch_tokens": 50},
    "dp2": {"ranks": 2, "parallel": {}},
    "ep2": {"ranks": 2, "parallel": {"ep": 2}},
    "tp2": {"ranks": 2, "parallel": {"tp": 2}},
    "pp2-vpp2": {"ranks": 2, "parallel": {"pp": 2, "vpp": 2}},
    "cp2": {"ranks": 2, "parallel": {"cp": 2}},
    "pp2-uneven-tp2-ep2-etp1": {
        "ranks": 4,
        "parallel": {"pp": 2, "pp_layers": [3, 1], "tp": 2, "ep": 2, "etp": 1},
    },
}


@pytest.mark.parametrize("layout", ROUTED)
def test_every_token_follows_its_route_under_every_layout(layout: str, other_model: str) -> None:
    """The digest is of all (rollout, position, layer, experts), over all ranks: none is lost,
    doubled or at another's place.
    """
    arguments = dict(ROUTED[layout])
    results = run_world(cases.routes_used, arguments.pop("ranks"), model=other_model, **arguments)
    assert [(result["wrong"], result["apart"]) for result in results] == [(0, 0)] * len(results)
    # every token but a rollout's last, in each of three MoE layers, once
    assert sum(result["slots"] for result in results) == 3 * (
        sum(cases.LENGTHS) - len(cases.LENGTHS)
    )
    expected = {result["expected"] for result in results}
    assert expected == {sum(result["digest"] for result in results) % 2**64}
    assert expected.isdisjoint(result["one rollout late by a token"] for result in results)
    if layout == "pp2-vpp2":
        assert results[0]["micro_batches"] % 2, "the schedule must need a filler"
    elif layout == "single-unpacked":
        assert results[0]["micro_batches"] > 4
    elif layout == "single-padded":
        assert results[0]["micro_batches"] < len(cases.LENGTHS), (
            "some sequences must be padded to another's length"
        )


def test_a_stage_of_dense_layers_neither_gets_nor_records_a_route(tmp_path: Path) -> None:
    model = str(family_checkpoint(tmp_path, "moonlight"))  # the first of three layers is dense
    parallel = {"pp": 2, "pp_layers": [1, 2]}
    first, second = run_world(cases.routes_used, 2, model=model, parallel=parallel)
    assert first["slots"] == 0 and second["slots"] > 50
    assert second["wrong"] == second["apart"] == 0


def test_replay_refuses_what_would_lose_or_shift_a_route(other_model: str) -> None:
    ((listed, never_used, twice, not_loaded, rows, alive, broken),) = run_world(
        cases.replay_guards, 1, model=other_model
    )
    assert listed == "instances in the class-level list: 0"
    assert "never used" in never_used
    assert "previous micro-batch were never used" in twice
    assert "without routes loaded" in not_loaded
    assert "routes (" in rows and "tokens" in rows
    assert alive == "still works"
    assert "update 0: the gradient norm is nan" in broken
