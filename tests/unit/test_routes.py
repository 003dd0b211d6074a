"""Every check of routes at their birth: each fires on a fault made for it, names the place, and
leaves good routes alone.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from r3.assets import TINY_MOE
from r3.models.shape import ModelShape
from r3.routing import check_routes
from r3.runtime.mesh import Axis
from r3.tools import constant_layers
from r3.types import Rollout, RouteError
from tests.tiny import ALONE, random_rollouts

TOKENS = 100
EXPERTS, TOPK = 8, 2
MOE_LAYERS = (1, 2, 4)  # layers 0 and 3 of the five are dense
NUM_LAYERS = 5


def routes_of(layers: int, *, rows: int = TOKENS - 1, topk: int = TOPK) -> np.ndarray:
    """Random distinct experts, unsigned as vLLM returns them: `[rows, layers, topk]`."""
    rng = np.random.default_rng(3)
    return np.argsort(rng.random((rows, layers, EXPERTS)), axis=-1)[..., :topk].astype(np.uint8)


def with_dense_slots(moe: np.ndarray) -> np.ndarray:
    """The same routes as vLLM lays them out: one slot a decoder layer, zeros in dense ones."""
    everything = np.zeros((len(moe), NUM_LAYERS, moe.shape[2]), moe.dtype)
    everything[:, list(MOE_LAYERS)] = moe
    return everything


def check(routes: np.ndarray | None, **overrides: Any) -> np.ndarray:
    facts: dict[str, Any] = dict(
        num_tokens=TOKENS,
        num_experts=EXPERTS,
        topk=TOPK,
        num_layers=NUM_LAYERS,
        moe_layers=MOE_LAYERS,
        who="rollout p7/2",
    )
    return check_routes(routes, **(facts | overrides))


@pytest.mark.parametrize(
    "layout", [with_dense_slots, lambda moe: moe], ids=["all layers", "MoE layers only"]
)
def test_good_routes_come_out_as_they_went_in(layout: Callable[[np.ndarray], np.ndarray]) -> None:
    moe = routes_of(len(MOE_LAYERS))
    checked = check(layout(moe))
    assert checked.dtype == np.int8
    np.testing.assert_array_equal(checked, moe)


def test_dense_slots_are_dropped_by_layer_number_and_not_by_their_zeros() -> None:
    everything = with_dense_slots(routes_of(len(MOE_LAYERS)))
    everything[:, 0] = (5, 6)  # what stands in a dense slot does not matter
    everything[:, 3] = 255
    np.testing.assert_array_equal(check(everything), everything[:, [1, 2, 4]])


def test_dense_slots_taken_for_moe_layers_are_noticed() -> None:
    """A layer map that is off by one picks the zeros of a dense layer: expert 0 twice in every
    row.
    """
    everything = with_dense_slots(routes_of(len(MOE_LAYERS)))
    with pytest.raises(RouteError, match=r"position 0, layer 0: experts \[0, 0\] repeat"):
        check(everything, moe_layers=(0, 1, 3))


def _set(routes: np.ndarray, where: tuple[int, int], row: tuple[int, ...]) -> np.ndarray:
    changed = routes.astype(np.int16)
    changed[where] = row
    return changed


def _constant(routes: np.ndarray, layer: int) -> np.ndarray:
    changed = routes.copy()
    changed[:, layer] = (2, 5)
    changed[::2, layer] = (5, 2)  # the order inside a row has no meaning
    return changed


FAULTS: dict[str, tuple[Callable[[np.ndarray], np.ndarray | None], str]] = {
    "none": (lambda routes: None, "returned no routes for positions 0..98 in all 3 MoE layers"),
    "a row too few": (lambda routes: routes[:-1], r"need 99 rows of .*, got shape \(98, 3, 2\)"),
    "a row too many": (lambda routes: np.concatenate([routes, routes[-1:]]), "need 99 rows"),
    "no layer axis": (lambda routes: routes[:, 0], r"need 99 rows of .*, got shape \(99, 2\)"),
    "a layer missing": (lambda routes: routes[:, :2], "routes of 2 layers; .* 5 layers, 3 of them"),
    "a layer too many": (lambda routes: routes[:, [0, 1, 2, 0]], "routes of 4 layers"),
    "an expert too few": (lambda routes: routes[..., :1], "1 experts per token, the model has 2"),
    "an expert too many": (lambda routes: routes[..., [0, 1, 0, 1]], "4 experts per token"),
    "beyond the last expert": (
        lambda routes: _set(routes, (41, 1), (3, EXPERTS)),
        r"position 41, layer 2: experts \[3, 8\] are not all in 0..7",
    ),
    "below the first expert": (
        lambda routes: _set(routes, (7, 2), (-1, 3)),
        r"position 7, layer 4: experts \[-1, 3\] are not all",
    ),
    "all missing, as -1": (lambda routes: np.full(routes.shape, -1, np.int16), "not all in 0..7"),
    "an expert twice": (
        lambda routes: _set(routes, (63, 0), (6, 6)),
        r"position 63, layer 1: experts \[6, 6\] repeat",
    ),
    "all zeros": (np.zeros_like, "experts \\[0, 0\\] repeat"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_refused_by_name_and_place(fault: str) -> None:
    inject, message = FAULTS[fault]
    with pytest.raises(RouteError, match=message) as caught:
        check(inject(routes_of(len(MOE_LAYERS))))
    assert str(caught.value).startswith("rollout p7/2: ")


@pytest.mark.parametrize("fault", FAULTS)
def test_on_missing_live_accepts_absent_but_no_illegal_routes(fault: str) -> None:
    inject, message = FAULTS[fault]
    routes = inject(routes_of(len(MOE_LAYERS)))
    if fault in ("none", "a row too few"):
        checked = check(routes, on_missing="live")
        assert checked.shape == (TOKENS - 1, len(MOE_LAYERS), TOPK) and checked.dtype == np.int8
        assert (checked == -1).all()  # which row is absent is not known
    else:
        with pytest.raises(RouteError, match=message):
            check(routes, on_missing="live")


def test_rows_that_came_are_judged_even_where_others_are_absent() -> None:
    routes = _set(routes_of(len(MOE_LAYERS)), (41, 1), (3, EXPERTS))[:50]
    with pytest.raises(RouteError, match="position 41, layer 2"):
        check(routes, on_missing="live")
    with pytest.raises(RouteError, match="routes of 2 layers"):
        check(routes_of(2)[:50], on_missing="live")


def test_a_top_1_capture_that_never_ran_is_refused_although_no_id_repeats() -> None:
    routes = routes_of(len(MOE_LAYERS), topk=1)
    np.testing.assert_array_equal(check(routes, topk=1), routes)
    routes[:, 0] = 3
    np.testing.assert_array_equal(check(routes, topk=1), routes)  # never ran: it would be 0
    routes[:, 0] = 0
    with pytest.raises(RouteError, match="layer 1 sent all 99 tokens to expert 0"):
        check(routes, topk=1)
    assert check(routes[:63], topk=1, num_tokens=64).shape == (63, 3, 1)  # by chance


def test_legal_routes_of_a_layer_that_hardly_chooses_are_trained_on() -> None:
    """transformers sends all 63 tokens of a prompt to two experts, too, in random Mixtrals."""
    routes = _constant(routes_of(len(MOE_LAYERS)), 1)
    np.testing.assert_array_equal(check(routes), routes)


def rollouts_with(*routes: np.ndarray) -> list[Rollout]:
    """Rollouts of the tiny model with these routes."""
    made = random_rollouts(ModelShape.read(TINY_MOE), [len(each) + 1 for each in routes])
    return [
        replace(rollout, routed_experts=each.astype(np.int8))
        for rollout, each in zip(made, routes, strict=True)
    ]


def test_a_layer_that_is_constant_in_all_rollouts_is_counted() -> None:
    one, other = (_constant(routes_of(3, rows=rows), 1) for rows in (40, 30))
    found = constant_layers(rollouts_with(one, other), ALONE, num_experts=EXPERTS)
    assert found == [(1, [2, 5])]
    short = rollouts_with(one[:30], other)
    assert constant_layers(short, ALONE, num_experts=EXPERTS) == [], "60 rows may be chance"
    missing = np.full((9, 3, 2), -1)
    assert constant_layers(rollouts_with(missing, one, other), ALONE, num_experts=EXPERTS) == found
    assert constant_layers(rollouts_with(one, other), ALONE, num_experts=2) == [], "no choice"
    changed = other.copy()
    changed[7, 1] = (2, 6)
    assert constant_layers(rollouts_with(one, changed), ALONE, num_experts=EXPERTS) == []
    assert constant_layers([], ALONE, num_experts=EXPERTS) == []


def test_layers_that_are_constant_on_one_rank_only_are_working() -> None:
    class Two(Axis):
        def all_gather_object(self, item: Any) -> list[Any]:
            experts, rows = item
            return [item, (np.where(experts == 5, 6, experts), rows)]

    both = Two(name="world", group=None, rank=0, size=2)
    same = rollouts_with(_constant(routes_of(3, rows=70), 1))
    assert constant_layers(same, both, num_experts=EXPERTS) == []
