"""bfloat16 with a float32 output layer on both sides, and runs that repeat bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e import precision_cases as cases
from tests.runs import run, timeless_rows, words
from tests.tiny import embedded
from tests.world import run_rows

pytestmark = pytest.mark.e2e


def test_float32_head_is_computed_on_both_sides_and_lowers_the_mismatch(tmp_path: Path) -> None:
    # A checkpoint may ask for a float32 head in its own config.json; only model.fp32_head decides,
    # for both sides.
    model = embedded(tmp_path / "model", head_dtype="float32")
    rows = [{"fp32": False}, {"fp32": True}]
    (rounded,), (exact,) = run_rows(cases.head, 1, rows, model=str(model))
    assert (rounded.types, rounded.rounded) == (["torch.bfloat16"], True)
    assert (exact.types, exact.rounded) == (["torch.float32"], False), (
        "logits that bfloat16 cannot hold"
    )
    # The policy's log-probabilities against float64 products of its own hidden states and weight.
    assert exact.policy_error <= 1e-4 < 1e-2 < rounded.policy_error
    # The same questions and seeds, some 500 tokens: 2.1e-3 against 3.0e-3 and 4.0e-5 against 6.7e-5
    # when this was written.
    assert min(exact.tokens, rounded.tokens) > 300
    for name in ("abs_mean", "k3"):
        assert exact.figures[name] <= rounded.figures[name], name
    assert "torch.float32; the engine has {torch.bfloat16}" in rounded.refusal
    assert "torch.bfloat16; the engine has {torch.float32}" in exact.refusal


@pytest.mark.large
def test_two_deterministic_runs_are_bitwise_equal(tmp_path: Path) -> None:
    """bfloat16 policy and engine, so that any other order of a sum shows."""
    flags = words("--debug.deterministic true --model.dtype bfloat16 --engine.dtype bfloat16")
    flags += ("--model.fp32_head", "true", "--train.steps", "2", "--log.rollouts_every", "1")
    flags += words(
        "--train.micro_batch_tokens 2048 --train.logprob_chunk_tokens 256 "
        "--eval.path '' --rollout.prompts_per_step 8"
    )
    folders = [tmp_path / name for name in ("one", "other")]
    for folder in folders:
        said = run(folder, *flags)
        assert "policy bfloat16, engine bfloat16, head float32, deterministic kernels" in said

    one, other = map(timeless_rows, folders)
    assert one == other  # losses, norms, rewards, mismatch: every digit
    assert one[0] != one[1] and min(one[0]["mismatch/k3"], one[0]["optim/grad_norm"]) > 0
    for name in ("rollouts/step_000001", "rollouts/step_000002", "hf/step_000002/model"):
        files = [sorted(folder.glob(f"{name}*.safetensors")) for folder in folders]
        assert files[0] and [file.name for file in files[0]] == [file.name for file in files[1]]
        for first, second in zip(*files, strict=True):
            assert first.read_bytes() == second.read_bytes(), first.name
