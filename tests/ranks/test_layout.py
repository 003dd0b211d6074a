"""A shard computes what transformers computes, and no layout changes loss, gradients or updates."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from r3.policy.weight_slots import join_shards
from tests.families import HYBRID, MOE_FAMILIES, family_checkpoint
from tests.ranks import layout_cases as cases
from tests.sweeps import layout_of, sweep
from tests.world import run_rows, run_world, shared_worlds

pytestmark = pytest.mark.ranks


def _gradients(tmp: Path, model: str, name: str, ranks: int, **arguments: Any) -> SimpleNamespace:
    rows = {name: {"ranks": ranks, **arguments}}
    return _wholes(tmp, model, rows)(name)


def _wholes(
    tmp: Path, model: str, rows: dict[str, dict[str, Any]], kept: Collection[str] = ()
) -> Callable[[str], SimpleNamespace]:
    """What gives the batch of a row by its name."""
    for name in rows:
        (tmp / name).mkdir()
    with_folder = {name: row | {"out": str(tmp / name)} for name, row in rows.items()}
    found = shared_worlds(cases.gradients, with_folder, kept=kept, model=model)
    return lambda name: _whole(tmp / name, found(name))


def _whole(folder: Path, results: list[SimpleNamespace]) -> SimpleNamespace:
    """One batch of all ranks: the first rank's figures with sums over the ranks, full tensors."""
    by_layer: dict[str, list[float]] = {}
    for result in results:
        for layer, part in result.by_layer.items():
            before = by_layer.get(layer, [0, 0])
            by_layer[layer] = [a + b for a, b in zip(before, part, strict=True)]
    figures = copy.copy(results[0])
    figures.agreement_slots = sum(result.agreement_slots for result in results)
    figures.by_layer = by_layer
    for name in ("bytes_read", "largest_read"):
        setattr(figures, name, max(getattr(result, name) for result in results))
    gradients, updated = (
        _merged([folder / f"{what}_{rank}.pt" for rank in range(len(results))])
        for what in ("rank", "updated")
    )
    return SimpleNamespace(figures=figures, gradients=gradients, updated=updated)


def _merged(files: list[Path]) -> dict[str, torch.Tensor]:
    """Full tensors of the slices that each rank wrote."""
    parts: dict[str, dict[int, torch.Tensor]] = {}
    kinds: dict[str, Any] = {}
    for file in files:
        for tensor, (kind, index, value) in torch.load(file).items():
            parts.setdefault(tensor, {})[index] = value
            kinds[tensor] = kind
    return {
        tensor: join_shards(kinds[tensor], [slices[i] for i in sorted(slices)])
        for tensor, slices in parts.items()
    }


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory, other_model: str) -> SimpleNamespace:
    """One process that packs all it can and computes all logits of a micro-batch at once."""
    return _gradients(tmp_path_factory.mktemp("single"), other_model, "single", 1, chunk=0)


_ROWS: dict[str, dict[str, Any]] = {
    "dp2": {"ranks": 2},
    "tp2-etp1": {"ranks": 2},
    "pp2-uneven": {
        "ranks": 2,
        "parallel": {"pp": 2, "pp_layers": [3, 1]},
        "micro_batch_tokens": 64,
        "exchange": True,
    },
    # three micro-batches: a filler makes them four, since this schedule takes them in groups of pp
    "pp2-vpp2-full-recompute": {"ranks": 2, "micro_batch_tokens": 96, "recompute": "full"},
    "pp2-vpp2-tp2-full-recompute": {
        "ranks": 4,
        "micro_batch_tokens": 64,
        "recompute": "full",
        "exchange": True,
    },
    "cp2": {"ranks": 2},
    "tp2-dp2": {"ranks": 4},
    "tp2-ep2": {"ranks": 4},
    "tp2-ep2-etp1": {"ranks": 2},
    "pp2-ep2-full-recompute": {"ranks": 4, "micro_batch_tokens": 64, "recompute": "full"},
    "pp4": {"ranks": 4, "micro_batch_tokens": 64},
    "pp2-cp2": {"ranks": 4, "micro_batch_tokens": 64},
    "cp2-tp2": {"ranks": 4},
    "cp2-ep2": {"ranks": 2},
    "ep2-moe-recompute-sorted": {"ranks": 2, "recompute": "moe", "experts": "sorted"},
    "ep2-selective": {"ranks": 2, "recompute": "selective"},
    "tp2-ep2-etp1-selective": {"ranks": 2, "recompute": "selective", "experts": "grouped"},
    "grouped": {"ranks": 1, "experts": "grouped"},
    "dp2-sequential-moe-recompute": {"ranks": 2, "recompute": "moe", "experts": "sequential"},
    "unpacked": {"ranks": 1, "micro_batch_tokens": 50},
    "padded": {"ranks": 1, "padded": True},
}
LAYOUTS = {name: {"parallel": layout_of(name), **row} for name, row in _ROWS.items()}


# Each axis and each kind of recomputation and expert, alone or with others.
KEPT = (
    *("dp2", "tp2-etp1", "pp2-uneven", "pp2-vpp2-full-recompute", "cp2-ep2", "tp2-ep2-etp1"),
    *("ep2-moe-recompute-sorted", "ep2-selective", "grouped", "unpacked", "padded"),
)


@pytest.fixture(scope="module")
def layouts(
    tmp_path_factory: pytest.TempPathFactory, other_model: str
) -> Callable[[str], SimpleNamespace]:
    return _wholes(tmp_path_factory.mktemp("layouts"), other_model, LAYOUTS, KEPT)


@pytest.mark.parametrize("layout", sweep(LAYOUTS, KEPT))
def test_loss_and_gradients_do_not_depend_on_layout_or_packing(
    layout: str, single: SimpleNamespace, layouts: Callable[[str], SimpleNamespace]
) -> None:
    _compare(layouts(layout), single)


def _compare(whole: SimpleNamespace, expected: SimpleNamespace) -> None:
    figures, reference = whole.figures, expected.figures
    # float32 sums in another order: relative 1e-5 on scalars; on tensors relative to the largest
    # gradient, since entries near zero are differences of large terms
    for name in ("loss", "grad_norm", "router_grad_norm"):
        assert getattr(figures, name) == pytest.approx(getattr(reference, name), rel=1e-5), name
    assert reference.router_grad_norm > 1e-3 * reference.grad_norm, "routers learn under replay"
    assert figures.agreement_slots == reference.agreement_slots, "every slot is compared once"
    assert figures.bytes_read == 1.0, "a rank reads its parts of the checkpoint and nothing else"
    assert figures.largest_read <= 1.0, "never more at once than its largest tensor"
    assert figures.by_layer.keys() == reference.by_layer.keys()
    for layer, (agreed, slots) in figures.by_layer.items():
        expected_agreed, expected_slots = reference.by_layer[layer]
        assert slots == expected_slots > 0
        # A near tie may be decided differently when sums have another order.
        assert abs(agreed - expected_agreed) <= 1
    # the last pipeline stage has its own copy of a tied embedding
    copies = {"output_layer.weight"}
    assert whole.gradients.keys() - copies == expected.gradients.keys() - copies
    largest = max(float(gradient.abs().max()) for gradient in expected.gradients.values())
    for name, gradient in expected.gradients.items():
        difference = float((whole.gradients[name] - gradient).abs().max())
        assert difference <= 1e-5 * largest, (
            f"{name}: {difference} where the largest gradient is {largest}"
        )
        # Adam's first step is the gradient's sign: where that is rounding, one of 1e-3 may go
        # either way
        moved = whole.updated[name] - expected.updated[name]
        firm = gradient.abs() > 1e-4 * largest
        assert float((moved * firm).abs().max()) <= 1e-5, f"{name}: updated weights"


@pytest.fixture(scope="module")
def dense_first(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, SimpleNamespace]:
    """The folder of a Moonlight of 3 layers, the first one dense, and one process's gradients."""
    base = tmp_path_factory.mktemp("dense_first")
    model = str(family_checkpoint(base / "model", "moonlight"))
    return model, _gradients(base, model, "single", 1)


@pytest.mark.parametrize("pp_layers", [[], [1, 2]], ids=["2-1", "dense-stage"])
def test_uneven_stages_of_a_model_whose_first_layers_are_dense(
    pp_layers: list[int], dense_first: tuple[str, SimpleNamespace], tmp_path: Path
) -> None:
    """Left to itself the pipeline has 2 layers and 1; or a stage of the dense layer alone, on which
    nothing is replayed.
    """
    model, expected = dense_first
    arguments = {"parallel": {"pp": 2, "pp_layers": pp_layers}, "micro_batch_tokens": 64}
    _compare(_gradients(tmp_path, model, "uneven", 2, **arguments), expected)


def test_stages_that_do_not_agree_on_shapes_say_so() -> None:
    (first, sent, received), (second, sent_back, received_back) = run_world(cases.wrong_shapes, 2)
    assert first.endswith("stage 0 has (8, 16); stage 1 has (8, 20)"), first
    assert "rank 1: lengths of micro-batches differ between pipeline stages" in second
    assert "rank 0 sends (16, 1, 128) to the next pipeline stage, which expects (8" in sent
    assert "rank 1 sends (16, 1, 128) to the previous pipeline stage, which" in sent_back
    assert "rank 0 receives more tensors from the next pipeline stage" in received
    assert "rank 1 receives more tensors from the previous pipeline stage" in received_back


# Family, or of `other_model` -> layout of two ranks, another one that resumes from it.
RESUMED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "interleaved": ({"pp": 2, "vpp": 2}, {"pp": 2, "pp_layers": [1, 3]}),
    # Layers that differ: one stage has two gated delta layers and the other one.
    **{name: ({"pp": 2}, {"ep": 1 + (name in MOE_FAMILIES)}) for name in HYBRID},
    "gpt_oss": ({"tp": 2, "ep": 2, "etp": 1}, {}),  # sinks and biases
}


@pytest.mark.parametrize("name", sweep(RESUMED, kept=("interleaved", "qwen3_next")))
def test_a_checkpoint_resumes_bit_for_bit_and_under_other_layouts(
    name: str, other_model: str, tmp_path: Path
) -> None:
    own, others = RESUMED[name]
    model = other_model
    if name != "interleaved":
        model = str(family_checkpoint(tmp_path / "model", name))
    given = {"model": model, "out": str(tmp_path)}
    rows = [(own, False), (own, True), (others, True)]
    arguments = [{"parallel": parallel, "resume": resume} for parallel, resume in rows]
    (straight, _), (again, _), (other, _) = run_rows(cases.second_update, 2, arguments, **given)
    (alone,) = run_world(cases.second_update, 1, parallel={}, resume=True, **given)
    assert again == straight, "the same layout, bit for bit"
    for found in (alone, other):
        # float32 sums in another order, amplified by Adam's first step where a gradient is next to
        # nothing
        assert vars(found) == pytest.approx(vars(straight), rel=1e-4)


@pytest.mark.parametrize(
    ("ranks", "parallel", "dtype"),
    [
        pytest.param(1, {}, "float32", id="float32", marks=pytest.mark.large),
        pytest.param(2, {"ep": 2}, "bfloat16", id="bfloat16-ep2"),
    ],
)
def test_streamed_optimizer_makes_the_same_updates_bit_for_bit(
    tmp_path: Path, ranks: int, parallel: dict[str, int], dtype: str
) -> None:
    given = {"out": str(tmp_path), "dtype": dtype, "parallel": parallel}
    run_world(cases.streamed_optimizer, ranks, **given)


def test_frozen_parameters_keep_their_bits() -> None:
    """With weight decay, and with the optimizer's state sharded over two ranks."""
    freeze = ("*.mlp.gate.weight", "model.embed_tokens.weight", "model.layers.0.mlp.experts.*")
    rows = [
        {"dtype": "float32", "parallel": {"ep": 1}},
        {"dtype": "bfloat16", "parallel": {"ep": 2}},
    ]
    run_rows(cases.frozen, 2, rows, freeze=freeze)


def test_fused_adam_makes_the_same_update() -> None:
    run_world(cases.fused_adam, 1)


def _largest_angle(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """1 - cosine between all gradients of two layouts taken as one vector."""
    names = sorted(one.keys() & other.keys())
    a, b = (torch.cat([found[name].double().flatten() for name in names]) for found in (one, other))
    return 1 - float(a @ b / (a.norm() * b.norm()))


def test_replay_brings_bfloat16_gradients_of_two_layouts_closer(
    other_model: str, tmp_path: Path
) -> None:
    layouts: dict[str, dict[str, Any]] = {
        "one": {"ranks": 1},
        "two": {"ranks": 2, "parallel": {"tp": 2, "ep": 2, "etp": 1}},
    }
    rows = {
        f"{name}-{replay}": layout | {"dtype": "bfloat16", "replay": replay}
        for name, layout in layouts.items()
        for replay in ("r3", "off")
    }
    of = _wholes(tmp_path, other_model, rows)
    angles = {
        replay: _largest_angle(*(of(f"{name}-{replay}").gradients for name in layouts))
        for replay in ("r3", "off")
    }
    # Cosine 0.999: bfloat16 keeps 8 bits, and averages over many entries
    assert angles["r3"] <= 1e-3
    assert angles["r3"] < angles["off"], (
        f"live routing adds its flips to rounding: 1 - cosine {angles}"
    )


def test_sequence_aggregation_does_not_depend_on_layout(other_model: str, tmp_path: Path) -> None:
    algo = {"aggregation": "sequence"}
    one = _gradients(tmp_path, other_model, "one", 1, algo=algo).figures
    two = _gradients(tmp_path, other_model, "two", 2, algo=algo, parallel={"cp": 2}).figures
    assert two.loss == pytest.approx(one.loss, rel=1e-5)  # float32, summed in another order
    assert two.grad_norm == pytest.approx(one.grad_norm, rel=1e-5)
