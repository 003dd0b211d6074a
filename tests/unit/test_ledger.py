"""The account of routes by hand: causes of missing rows, and both ends compared."""

from dataclasses import replace

import numpy as np
import pytest

from r3.algo.packing import pack
from r3.routing import LedgerError, captured_rows, reconcile
from r3.sync import find_damage, send_samples
from r3.types import Rollout, Sample
from tests.talkers import values
from tests.tiny import ALONE, MOE
from tests.tiny import coded_rollout as rollout


def without(sample: Rollout, rows: list[int]) -> Rollout:
    routes = sample.routed_experts.copy()
    routes[rows] = -1
    return replace(sample, routed_experts=routes)


# Rows 4 + 3 + 2: all captured; one of three missing; a rollout without any.
CAPTURED = {
    "routing/coverage": 6 / 9,
    "routing/rows_expected": 9.0,
    "routing/rows_captured": 6.0,
    "routing/rows_last_token": 3.0,
    "routing/rows_missing_rollout": 2.0,
    "routing/rows_missing": 1.0,
}
SOUND = CAPTURED | {"routing/rows_replayed": 6.0, "routing/rows_live": 6.0}


def test_rows_by_cause() -> None:
    rollouts = [
        rollout([1, 2, 3, 4, 5], 2),
        without(rollout([1, 2, 3, 4], 2, seed=1), [1]),
        without(rollout([1, 2, 3], 1, seed=2), [0, 1]),
    ]
    assert values(captured_rows(rollouts)) == CAPTURED


def test_both_ends_of_the_account_must_agree() -> None:
    reconcile(SOUND)
    reconcile({"routing/rows_replayed": 9.0})  # r2: recorded in the policy, nothing was captured
    for name, count, message in (
        ("replayed", 5, "counted 5 rows replayed, generation 6 rows captured: rows were lost"),
        ("replayed", 6.25, "counted 6.25 rows replayed.*: rows were added"),
        ("live", 7, "counted 7 rows routed live, generation 6 rows missing or last of a sequence"),
    ):
        with pytest.raises(LedgerError, match=message):
            reconcile(SOUND | {f"routing/rows_{name}": float(count)})
    with pytest.raises(LedgerError, match="counted 0 rows replayed"):  # routers that never asked
        reconcile({name: value for name, value in SOUND.items() if "replayed" not in name})


def test_every_way_of_taking_anothers_rows_changes_the_checksum() -> None:
    """Tokens of one sample with rows of another, shifted rows, swapped layers; and an order of
    packing that differs.
    """
    rollouts = [rollout([1, 2, 3, 4, 5], 2), rollout([5, 6, 7, 8, 9], 2, seed=1)]
    sent = [replace(each, group=group) for group, each in enumerate(rollouts)]
    samples = [Sample(rollout=each) for each in sent]
    arrived = send_samples(samples, {each.key: [0] for each in sent}, ALONE)
    mine = dict(enumerate(arrived.values()))

    def packed(*rollouts: Rollout) -> str:
        return find_damage(pack(rollouts, [0, 1], **MOE, multiple=4, sequence_multiple=2), mine)

    assert packed(*rollouts) == ""
    one, two = rollouts
    for wrong in (
        two.routed_experts,
        np.roll(one.routed_experts, 1, axis=0),
        one.routed_experts[:, ::-1],
        np.concatenate([one.routed_experts[:3], two.routed_experts[3:]]),
    ):
        said = packed(replace(one, routed_experts=wrong), two)
        assert said.startswith("rollout prompt0/0: its packed tokens and routes are not those")
    assert packed(two, one) != ""  # whole rollouts under each other's names
    assert "prompt1/0" in packed(one, replace(two, tokens_T=one.tokens_T))
