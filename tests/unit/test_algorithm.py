"""A loss and an advantage of a user's file: found, called with their arguments, and refused."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from r3 import checks, extras
from r3.algo.loss import CORRECTIONS, LOSSES, Bounds, pg
from r3.algo.packing import as_batch, pack, with_advantages
from r3.config import AlgoConfig, Config, ConfigError
from r3.metrics import mismatch
from r3.policy import Passes, policy_loss
from r3.rollout import read_task
from r3.run import failure_text
from r3.runtime.mesh import Axis
from r3.tools import example_inputs, example_rewards
from r3.user_code import AlgorithmError, advantage_of, bounds_of, loss_of
from tests.rows import write
from tests.tiny import MOE, coded_rollout, tiny_config

MINE = """
import torch

def scaled(inputs, bounds, scale=1.0, word=""):
    assert word in ("", "a b") and isinstance(scale, (int, float))
    return -scale * inputs.advantages_N * inputs.logprobs_N, ~inputs.on_N & inputs.on_N

def reads_bounds(inputs, bounds):
    loss = -inputs.advantages_N * inputs.logprobs_N * bounds.high
    return loss, torch.zeros_like(inputs.on_N)

def averaged(inputs, bounds):
    loss, clipped = scaled(inputs, bounds)
    return loss / inputs.loss_mask_N.sum().clamp(min=1), clipped

def loses_rows(inputs, bounds):
    loss, clipped = scaled(inputs, bounds)
    return loss[:-1], clipped

def breaks(inputs, bounds):
    return torch.zeros(3) + torch.zeros(4)

def raw(rewards_R, groups_R, offset=0):
    return rewards_R + offset

def half(rewards_R, groups_R):
    return rewards_R[:1] / 0

number = 1

def wraps(function):
    return lambda inputs, bounds, **rest: function(inputs, bounds, **rest)

@wraps
def decorated(inputs, bounds, scale=1.0):
    return scaled(inputs, bounds, scale)
"""
BOUNDS = Bounds(0.2, 0.28)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path, MINE, name="mine.py")


def tiny(**algo: object) -> Config:
    return tiny_config(algo=algo)


def found(config: Config) -> dict[str, str]:
    """Field -> message of what is wrong with settings and files."""
    problems = checks.problems(config, 1)
    checks.load_files(config, problems)
    return {each.place: str(each) for each in problems}


# --- called like the built-in ones --------------------------------------------------------------


def test_loss_gets_inputs_bounds_and_typed_arguments(file: Path) -> None:
    inputs = example_inputs()
    algo = AlgoConfig(loss=f"{file}:scaled", args=("scale=4.0", "loss.word=a b"))
    loss_N, clipped_N = loss_of(algo)(inputs, BOUNDS)
    assert torch.equal(loss_N, 4 * pg(inputs, BOUNDS)[0]) and not clipped_N.any()
    algo = AlgoConfig(loss=f"{file}:reads_bounds", clip_high=0.5)
    loss_N, _ = loss_of(algo)(inputs, bounds_of(algo))
    assert torch.equal(loss_N, 0.5 * pg(inputs, BOUNDS)[0])


@pytest.mark.parametrize(
    "args", [("loss.scale=2", "advantage.offset=3"), ("scale=2", "offset=3")], ids=["named", "bare"]
)
def test_an_argument_finds_its_function(args: tuple[str, ...], file: Path) -> None:
    both = AlgoConfig(loss=f"{file}:scaled", advantage=f"{file}:raw", args=args)
    inputs, rewards = example_inputs(), example_rewards()
    assert loss_of(both)(inputs, BOUNDS)[0].equal(-2 * inputs.advantages_N * inputs.logprobs_N)
    assert advantage_of(both)(*rewards).equal(rewards[0] + 3)
    assert found(tiny(loss=both.loss, advantage=both.advantage, args=both.args)) == {}


def test_own_advantage_may_need_no_group_and_own_loss_any_bound(file: Path) -> None:
    config = tiny(advantage=f"{file}:raw", loss=f"{file}:scaled", clip_dual=3.0, minirl_cap=7.0)
    config = replace(config, rollout=replace(config.rollout, group_size=1))
    assert found(config) == {}
    assert not [each for each in checks.warnings(config, 1) if "algo." in each]


OWN = "{file}:scaled"

# --- mistakes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algo", "field", "words"),
    [
        ({"loss": "{file}"}, "algo.loss", "or path/to/file.py:function"),
        ({"loss": "{file}:absent"}, "algo.loss", "defines no 'absent'. Fix: write `def absent("),
        ({"loss": "{file}:number"}, "algo.loss", "number is not a function"),
        ({"loss": "{file}:wraps"}, "algo.loss", "write `def wraps(inputs, bounds)`; --algo.args"),
        ({"loss": OWN, "args": ("tau=1",)}, "algo.args", "Fix: loss takes scale, word"),
        ({"loss": OWN, "args": ("tau",)}, "algo.args", "must be key=value"),
        (
            {"loss": OWN, "advantage": "{file}:raw", "args": ("tau=1",)},
            "algo.args",
            "parameter 'tau'. Fix: advantage takes offset; loss takes scale, word",
        ),
        (
            {"loss": OWN, "args": ("advantage.offset=1",)},
            "algo.args",
            "names advantage, which is not a function of yours. Fix: loss takes scale, word",
        ),
    ],
)
def test_mistakes_are_found_before_the_run(
    algo: dict[str, object], field: str, words: str, file: Path
) -> None:
    named = {key: each.format(file=file) for key, each in algo.items() if isinstance(each, str)}
    assert words in found(tiny(**algo | named))[field]


def test_a_decorated_function_takes_what_its_wrapper_does(file: Path) -> None:
    config = tiny(loss=f"{file}:decorated", args=("scale=2",))
    assert found(config) == {}
    assert loss_of(config.algo)(example_inputs(), BOUNDS)[0].shape == (64,)


def test_exception_of_a_loss_names_its_line(file: Path) -> None:
    algo = AlgoConfig(loss=f"{file}:breaks")
    with pytest.raises(AlgorithmError) as error:
        loss_of(algo)(example_inputs(), BOUNDS)
    text = failure_text(error.value, rank=1, path=Path("runs/x/errors/rank_00001.txt"))
    line = 1 + MINE.splitlines().index("    return torch.zeros(3) + torch.zeros(4)")
    assert f"algo.loss {file}:breaks raised RuntimeError: The size of tensor a (3)" in text
    assert f"{file}:{line} in breaks: return torch.zeros(3) + torch.zeros(4)" in text
    assert f"python -m r3.check_loss {file}:breaks" in text


def test_results_of_another_form_stop_the_run(file: Path) -> None:
    with pytest.raises(AlgorithmError, match=r"loss_N has shape \[63\], and there are 64 tokens"):
        loss_of(AlgoConfig(loss=f"{file}:loses_rows"))(example_inputs(), BOUNDS)
    with pytest.raises(AlgorithmError, match=r"algo\.advantage .*of shape \[1\] for 41 rollouts"):
        advantage_of(AlgoConfig(advantage=f"{file}:half"))(*example_rewards())


def test_check_runs_the_contract(file: Path) -> None:
    config = tiny(loss=f"{file}:scaled", advantage=f"{file}:raw", args=("loss.scale=2",))
    task = read_task(config)
    check_task = extras.check().check_task
    lines = list(check_task(task, config.algo))
    assert f"    algo.loss {file}:scaled: passes the contract of the built-in ones" in lines
    notes = [line for line in lines if line.startswith("    note: ")]
    assert "although none is better" in notes[0] and "train.lr" in notes[1]
    with pytest.raises(ConfigError, match=r"algo\.loss = .*breaks 'does not depend on how seq"):
        list(check_task(task, AlgoConfig(loss=f"{file}:averaged")))
    task.close()


# --- corrections, as other projects' users report them ------------------------------------------


def corrected(
    log_w: list[float], last: float = 0.0, **algo: object
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Gradient of the loss of two sequences, of which the second has one token with loss, and
    statistics. After each sequence's tokens with loss stands one without.
    """
    lengths = len(log_w) + 1, 2
    rollouts = [coded_rollout(range(n), n - 1, seed=seed) for seed, n in enumerate(lengths)]
    counts = {"num_loss_tokens": len(log_w) + 1, "num_sequences": 2}
    batch = as_batch([pack(rollouts, [0, 1], **MOE)], **counts)
    (tokens,) = with_advantages(batch, torch.ones(2))
    old_N = tokens.rollout_logprobs_N + torch.tensor([*log_w, 0.0, last, 0.0])
    logprobs_N = (old_N + 0.1).requires_grad_()
    loss, stats = policy_loss(
        tiny(**algo), tokens, Axis.of("cp", None), logprobs_N, Passes(old=[old_N])
    )
    (gradient_N,) = torch.autograd.grad(loss, logprobs_N)
    return gradient_N, stats


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
@pytest.mark.parametrize("loss", [name for name in LOSSES if name != "minirl"])
def test_a_correction_reaches_every_loss_and_aggregation(loss: str, aggregation: str) -> None:
    log_w = [0.1, -1.5, 0.8, -10.0, 0.3]
    plain_N, _ = corrected(log_w, 2.0, loss=loss, aggregation=aggregation)
    for name in CORRECTIONS:
        own = {"loss": loss, "aggregation": aggregation, "correction": name}
        gradient_N, stats = corrected(log_w, 2.0, **own)
        weights_N = stats["weight"]
        # float32: one product more
        torch.testing.assert_close(gradient_N, weights_N * plain_N, rtol=1e-6, atol=0)
        assert not gradient_N[weights_N == 0].any()
        assert (stats["cut"] * (weights_N == 0)).sum() == (weights_N[[0, 1, 2, 3, 4, 6]] == 0).sum()
    assert plain_N.count_nonzero() == 6


def test_masked_tokens_stay_in_denominators_and_weights_are_reported_twice() -> None:
    # Ratios 1.11, 0.22, 2.23, 0.00005 and 1.35, bounds 0.5 and 2.
    log_w = [0.1, -1.5, 0.8, -10.0, 0.3]
    gradient_N, stats = corrected(log_w, correction="token_mis", correction_low=0.5, loss="pg")
    assert stats["cut"].tolist() == [0, 1, 1, 1, 0, 0, 0, 0]
    # -A w / 6 at six loss tokens, of which three have the weight 0
    expected = [-(math.exp(value) if value in (0.1, 0.3) else 0.0) / 6 for value in log_w]
    assert gradient_N[:5].tolist() == pytest.approx(expected, rel=1e-6)
    # Raw weights 0.607, 12.18, 0.819: their mean is 4.54, and 0.475 with IcePop's bounds.
    raw = torch.tensor([0.606531, 12.182494, 0.818731])
    _, stats = corrected(raw.log().tolist(), correction="icepop")
    assert float(stats["weight"][:3].mean()) == pytest.approx(0.475087, rel=1e-5)
    mean = mismatch(raw.log(), torch.zeros(3), torch.ones(3))["weight"]
    assert mean.reduce([mean]) == pytest.approx(4.535918, rel=1e-5)
