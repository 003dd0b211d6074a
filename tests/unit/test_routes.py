"""Every check of routes at their birth: each fires on a fault made for it, names the place, and
leaves good routes alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from r3.algo.packing import route_dtype
from r3.routing.capture import check_routes
from r3.types import RouteError

pytestmark = pytest.mark.unit

TOKENS = 100
EXPERTS, TOPK = 8, 2
MOE_LAYERS = (1, 2, 4)  # layers 0 and 3 of the five are dense
NUM_LAYERS = 5


def routes_of(
    layers: int, *, rows: int = TOKENS - 1, topk: int = TOPK, experts: int = EXPERTS
) -> np.ndarray:
    """Random distinct experts, unsigned as vLLM returns them: `[rows, layers, topk]`."""
    rng = np.random.default_rng(3)
    return np.argsort(rng.random((rows, layers, experts)), axis=-1)[..., :topk].astype(np.uint8)


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
    changed = routes.copy()
    changed[where] = row
    return changed


def _constant(routes: np.ndarray, layer: int) -> np.ndarray:
    changed = routes.copy()
    changed[:, layer] = (2, 5)
    changed[::2, layer] = (5, 2)  # the order inside a row has no meaning
    return changed


FAULTS: dict[str, tuple[Callable[[np.ndarray], np.ndarray | None], str]] = {
    "none": (lambda routes: None, "returned no routes for positions 0..98 in all 3 MoE layers"),
    "a row too few": (
        lambda routes: routes[:-1],
        "need 99 rows of routes, got shape \\(98, 3, 2\\)",
    ),
    "a row too many": (lambda routes: np.concatenate([routes, routes[-1:]]), "need 99 rows"),
    "no layer axis": (lambda routes: routes[:, 0], "need 99 rows of routes, got shape \\(99, 2\\)"),
    "a layer missing": (
        lambda routes: routes[:, :2],
        "routes of 2 layers; the model has 5 layers, 3 of them MoE",
    ),
    "a layer too many": (
        lambda routes: np.concatenate([routes, routes[:, :1]], axis=1),
        "routes of 4 layers",
    ),
    "an expert too few": (lambda routes: routes[..., :1], "1 experts per token, the model has 2"),
    "an expert too many": (
        lambda routes: np.concatenate([routes, routes + 8], -1),
        "4 experts per token",
    ),
    "beyond the last expert": (
        lambda routes: _set(routes, (41, 1), (3, EXPERTS)),
        "position 41, layer 2: experts \\[3, 8\\] are not all in 0..7",
    ),
    "below the first expert": (
        lambda routes: _set(routes.astype(np.int16), (7, 2), (-1, 3)),
        "position 7, layer 4: experts \\[-1, 3\\] are not all",
    ),
    "all missing, as -1": (
        lambda routes: np.full_like(routes, -1, dtype=np.int16),
        "not all in 0..7",
    ),
    "an expert twice": (
        lambda routes: _set(routes, (63, 0), (6, 6)),
        "position 63, layer 1: experts \\[6, 6\\] repeat",
    ),
    "all zeros": (np.zeros_like, "experts \\[0, 0\\] repeat"),
    "one dead layer": (
        lambda routes: _constant(routes, 1),
        "layer 2 sent all 99 tokens to experts \\[2, 5\\]; the capture of this layer does not work",
    ),
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


def test_dead_layer_of_a_top_1_model_is_noticed_although_no_id_repeats() -> None:
    routes = routes_of(len(MOE_LAYERS), topk=1)
    np.testing.assert_array_equal(check(routes, topk=1), routes)
    routes[:, 0] = 0
    with pytest.raises(RouteError, match="layer 1 sent all 99 tokens to experts \\[0\\]"):
        check(routes, topk=1)


def test_short_answer_may_route_alike_by_chance() -> None:
    """63 equal rows are too few to call a layer dead, 64 are enough."""
    short = _constant(routes_of(len(MOE_LAYERS), rows=63), 1)
    assert check(short, num_tokens=64).shape == (63, 3, 2)
    with pytest.raises(RouteError, match="sent all 64 tokens"):
        check(_constant(routes_of(len(MOE_LAYERS), rows=64), 1), num_tokens=65)


def test_layer_whose_first_and_last_rows_agree_is_no_dead_layer() -> None:
    routes = routes_of(len(MOE_LAYERS), rows=64)
    routes[-1] = routes[0]
    np.testing.assert_array_equal(check(routes, num_tokens=65), routes)


def test_model_that_sends_every_token_to_all_experts_is_no_dead_layer() -> None:
    routes = routes_of(len(MOE_LAYERS), topk=EXPERTS)
    np.testing.assert_array_equal(check(routes, topk=EXPERTS), routes)


def test_single_token_has_no_rows_and_a_type_all_the_same() -> None:
    checked = check(np.zeros((0, NUM_LAYERS, TOPK), np.uint8), num_tokens=1)
    assert checked.shape == (0, 3, 2) and checked.dtype == np.int8


@pytest.mark.parametrize(
    ("experts", "dtype"),
    [(1, np.int8), (128, np.int8), (129, np.int16), (256, np.int16), (384, np.int16)],
)
def test_type_is_the_smallest_that_holds_every_id_and_minus_one(experts: int, dtype: type) -> None:
    assert route_dtype(experts) == dtype
    last, missing = np.array([experts - 1, -1]).astype(route_dtype(experts))
    assert (last, missing) == (experts - 1, -1)


def test_ids_above_127_survive_the_change_of_type() -> None:
    """vLLM's unsigned bytes would wrap to negative numbers in an int8."""
    routes = routes_of(len(MOE_LAYERS), topk=8, experts=200)
    assert routes.max() > 127
    checked = check(routes, topk=8, num_experts=200)
    assert checked.dtype == np.int16
    np.testing.assert_array_equal(checked, routes)
