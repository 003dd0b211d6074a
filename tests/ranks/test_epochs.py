"""Samples that are used more than once, against a loop written by hand.

What others' users report of such settings is tried here: the ratio is always 1 because the old
log-probabilities are replaced by those of the moment; the setting never reaches the trainer; no
sample is used again after an update; old and reference log-probabilities are computed again in
every epoch; and parts of a step get the old log-probabilities of another part.
"""

from __future__ import annotations

import pytest

from tests.ranks import epoch_cases as cases
from tests.world import run_rows, run_world

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("updates", [1, 2])
def test_epochs_equal_a_loop_by_hand_bit_for_bit(updates: int, model: str) -> None:
    (found,) = run_world(cases.epochs, 1, model=model, updates=updates, count=3, parallel={})
    assert found.off_by == 0.0
    # What a wrong loop does to the weights, in units of the learning rate 3e-3.
    assert found.way > 1e-3
    wrong = (found.off_by_once, found.off_by_rescored, found.off_by_live)
    assert min(wrong) > 1e-4, "the comparison detects a loop that differs"
    assert found.updates == 3 * updates
    # Old log-probabilities are scored once, and those of the first update not at all.
    assert found.scored == found.of_step - found.of_first
    row = found.row
    shares = [row[f"loss/clip_frac_epoch_{epoch}"] for epoch in (1, 2, 3)]
    assert shares == pytest.approx(found.clipped, abs=1e-12)
    assert row["loss/clip_frac"] == pytest.approx(sum(shares) / 3)
    if updates == 1:
        assert shares[0] == 0, "the first update is made by the policy that sampled"
        assert "policy/kl_old_epoch_1" not in row
    assert shares[2] > 0 and row["policy/kl_old_epoch_3"] > row["policy/kl_old_epoch_2"] > 0


@pytest.mark.large
def test_epochs_do_not_depend_on_the_layout(model: str) -> None:
    """Pipeline stages and data-parallel ranks keep the old log-probabilities of their tokens."""
    (one,) = run_world(cases.epochs, 1, model=model, updates=2, count=2, parallel={})
    rows = [{"parallel": {"pp": 2}}, {"parallel": {"ep": 2}}]
    stages, others = run_rows(cases.epochs, 2, rows, model=model, updates=2, count=2)
    assert all(each.off_by == 0.0 for each in (*stages, *others))
    for name in ("loss/total_epoch_2", "policy/kl_old_epoch_2"):
        # float32 sums in another order
        assert stages[-1].row[name] == pytest.approx(one.row[name], rel=1e-4)


SETTINGS = {
    "r3": {},
    "r2": {"replay.mode": "r2"},
    "off": {"replay.mode": "off"},
    "bypass": {"algo.correction": "bypass"},
    "tis": {"algo.correction": "token_tis"},
    "loss": {"algo.kl_coef": 0.1},
    "reward": {"algo.kl_coef": 0.1, "algo.kl_in": "reward", "algo.kl_estimator": "k1"},
}


def test_every_epoch_uses_what_was_scored_once(model: str) -> None:
    rows = run_world(cases.variants, 1, model=model, settings=SETTINGS)[0]
    found = dict(zip(SETTINGS, rows, strict=True))
    assert all(each.updates == 2 and 1e-4 < each.way < 1 for each in rows)
    # Passes over the step's tokens before the first update: recorded, reference, old. Not one per
    # epoch.
    assert {name: each.passes for name, each in found.items()} == {
        "r3": [],
        "r2": [["record", 1]],
        "off": [],
        "bypass": [],
        "tis": [],
        "loss": [["live", 1]],
        "reward": [["live", 1], ["replay", 1]],
    }
    for name, each in found.items():
        if name != "bypass":  # it has no old policy
            assert each.row["policy/kl_old_epoch_2"] > 0, name
        if name != "off":  # replayed in both epochs; the second has other weights
            assert each.row["routing/agreement_update_2"] < 1, name
    # The importance weight against the engine stays that of the old policy.
    assert found["tis"].row["correction/weight_mean"] > 0
