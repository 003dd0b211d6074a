"""Log-probabilities in chunks equal plain ones, hold no logits of a whole micro-batch, and bfloat16
stays near float32.
"""

from __future__ import annotations

from itertools import product

import pytest

from tests.families import random_checkpoint
from tests.ranks import head_cases as cases
from tests.world import run_world

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module", params=product((1, 2), (False, True)), ids=str)
def errors(request: pytest.FixtureRequest) -> dict[str, cases.Errors]:
    """Largest differences from the float64 oracle, worst of the tp ranks, also with masks."""
    ranks, masked = request.param
    results = run_world(cases.oracle, ranks, masked=masked)
    return {
        name: {part: max(result[name][part] for result in results) for part in found}
        for name, found in results[0].items()
    }


# Relative to the largest value; rounding of 16 products and 37 terms leaves some units in the last
# place.
@pytest.mark.parametrize(("dtype", "limit"), [("float64", 1e-14), ("float32", 2e-6)])
def test_scores_and_gradients_equal_plain_log_softmax_in_float64(
    dtype: str, limit: float, errors: dict[str, cases.Errors]
) -> None:
    for chunk in (0, 1, 5, 23):
        for part, error in errors[f"{dtype}, {chunk}"].items():
            assert error <= limit, f"{part}, chunks of {chunk}: {error}"


def test_float32_head_removes_the_rounding_of_bfloat16_logits(
    errors: dict[str, cases.Errors],
) -> None:
    for chunk in (0, 1, 5, 23):
        rounded, exact = errors[f"bfloat16, {chunk}"], errors[f"bfloat16 fp32, {chunk}"]
        for part in ("logprobs", "entropy"):
            assert exact[part] <= 2e-6, "products of bfloat16 values are exact in float32"
            assert rounded[part] >= 1e-4, "or the line above shows nothing"
        for part in ("hidden", "weight", "hidden of both", "weight of both"):
            assert exact[part] <= 2**-7, (
                "gradients are rounded once to bfloat16, on tp ranks each before the sum"
            )
            # Chunks of one token add 23 products up: in float32 that costs no more than one product
            # of all.
            assert rounded[part] <= 2**-5


@pytest.mark.parametrize(("ranks", "parallel"), [(1, {}), (2, {"tp": 2})], ids=["single", "tp2"])
def test_no_tensor_holds_the_logits_of_a_micro_batch(
    ranks: int, parallel: dict[str, int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("wide") / f"{ranks}"
    model = random_checkpoint(folder, vocab_size=1554, tied=ranks == 1)
    for found in run_world(cases.peak, ranks, model=str(model), parallel=parallel):
        assert found.tokens > 200
        # 64, the hidden size: the output weight itself, and its gradient, are that many rows as
        # long as the vocabulary.
        assert found.rows_chunks == [64, 64], "scoring, training"
        assert found.rows_whole == [found.tokens] * 2, (
            "the watch sees logits where they are made at once"
        )
        # Megatron's hooks add a gradient to main_grad each time one arrives: once a micro-batch, in
        # both passes.
        assert found.arrived == 2 * found.micro_batches >= 4
        assert found.scores <= 1e-5  # float32 products of other sizes sum in another order
        assert found.gradients <= 1e-5
        assert found.added <= 1e-5
        # A tied weight would lose the embedding's gradient. The other one is returned as zeros.
        assert found.forgotten > 1e-3 if ranks == 1 else found.forgotten <= 1e-5


@pytest.mark.parametrize(("ranks", "parallel"), [(1, {}), (2, {"tp": 2})], ids=["single", "tp2"])
def test_entropy_bonus_raises_entropy_as_its_gradient_says(
    ranks: int, parallel: dict[str, int], model: str
) -> None:
    """Through the whole policy: Megatron's layers, the schedule, micro-batches and masks."""
    for found in run_world(cases.bonus, ranks, model=model, parallel=parallel):
        # Sums of float32 terms in another order.
        assert found.loss == pytest.approx(-0.5 * found.entropy, rel=1e-5)
        assert found.promised < -1e-2, "or the line below shows nothing"
        # A difference of entropies near 5 with 7 digits, over a step whose third order is small.
        assert found.measured == pytest.approx(found.promised, rel=1e-2)


def test_bfloat16_policy_keeps_scores_and_gradients_in_float32(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    model = random_checkpoint(tmp_path_factory.mktemp("model"), mlp_only_layers=[1])
    (found,) = run_world(cases.bfloat16, 1, model=str(model))
    assert found["float32"].logprobs == found["float32"].loss == 0.0
    for name in ("bfloat16", "bfloat16, float32 head"):
        figures = found[name]
        # bfloat16 keeps 8 bits: 2^-9 a rounding, of which some dozens lie between a token and its
        # gradient
        assert figures.cosine >= 0.999
        assert figures.norm == pytest.approx(1.0, abs=0.02)
        assert 0 < figures.loss <= 0.02
        assert 0 < figures.logprobs <= 0.02
        assert (figures.weights, figures.states) == ("torch.bfloat16", ["torch.bfloat16"])
        assert figures.router == ["torch.float32"]
        assert (figures.scores, figures.gradient) == ("torch.float32", "torch.float32")
