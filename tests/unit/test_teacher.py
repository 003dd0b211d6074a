"""On-policy distillation: the formula by hand, and teachers that do not fit."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from r3 import assets
from r3.algo.loss import LOSSES, Bounds, teacher_advantage
from r3.checks import load_files, problems, warnings
from r3.config import OF_OBJECTIVE, ConfigError, with_values
from r3.models.shape import ModelShape
from r3.rollout import read_task
from r3.tools.planning.memory_plan import host_memory, memory, teacher_bytes
from tests.families import random_checkpoint
from tests.tiny import edit_json, loss_inputs, tiny_config

TEACHER = str(assets.TINY_MOE_TIES)
OBJECTIVE = {"train.objective": "distill", "algo.teacher": (TEACHER,)}
DISTILL = with_values(tiny_config(), {**OF_OBJECTIVE["distill"], **OBJECTIVE})


def test_advantages_of_a_teacher_by_hand() -> None:
    old_N = torch.tensor([-1.0, -0.5, -2.0, 0.0], requires_grad=True)
    teacher_N = torch.tensor([-0.25, -2.5, -2.0, -900.0])
    found_N = teacher_advantage(old_N, teacher_N, coef=2.0)
    # 2 (-0.25 + 1), 2 (-2.5 + 0.5), 0, and 2 * -20 where the difference is clamped
    assert found_N.tolist() == [1.5, -4.0, 0.0, -40.0]
    assert not found_N.requires_grad


@pytest.mark.parametrize("loss", ["ppo_clip", "pg", "cispo", "minirl"])
def test_the_expected_gradient_is_that_of_the_reverse_kl(loss: str) -> None:
    """Over all tokens of a distribution, each weighted by its probability."""
    torch.manual_seed(0)
    logits_V, teacher_V = torch.randn(5).double(), torch.randn(5).double().log_softmax(0)
    logits_V.requires_grad_()
    logprobs_V = logits_V.log_softmax(0)
    kl = (logprobs_V.exp() * (logprobs_V - teacher_V)).sum()
    (expected_V,) = torch.autograd.grad(kl, logits_V, retain_graph=True)
    old_V = logprobs_V.detach()
    advantages_V = teacher_advantage(old_V, teacher_V, coef=1.0)
    inputs = loss_inputs(logprobs_V, old_logprobs_N=old_V, advantages_N=advantages_V)
    loss_V, _ = LOSSES[loss](inputs, Bounds(low=1.0, high=4.0, cap=5.0))
    (found_V,) = torch.autograd.grad((old_V.exp() * loss_V).sum(), logits_V)
    # losses are float32
    torch.testing.assert_close(found_V, expected_V, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"algo.teacher": ()}, "is empty, and train.objective is distill"),
        ({"algo.teacher": ("nowhere",)}, "there is no such folder"),
        ({"train.objective": "sft"}, "train.objective sft samples none"),
        ({"algo.teacher": (TEACHER, TEACHER)}, "has 2 values for the 1 paths of data.path"),
        ({"algo.teacher_coef": 0.0}, "above 0"),
    ],
)
def test_teachers_that_make_no_sense_are_refused(values: dict[str, Any], expected: str) -> None:
    assert problems(DISTILL, 1) == []
    found = problems(with_values(DISTILL, values), 1)
    assert any(expected in str(problem) for problem in found), found


def _copy(folder: Path, **config: Any) -> str:
    """The teacher's folder with other keys in its config.json."""
    shutil.copytree(TEACHER, folder)
    edit_json(folder / "config.json", **config)
    return str(folder)


def test_a_teacher_that_does_not_fit_layout_or_context_is_refused(tmp_path: Path) -> None:
    for key, value, said in (
        ("max_position_embeddings", 32, "its context of 32 tokens is shorter than"),
        ("num_hidden_layers", 5, "its tensors differ from what config.json implies"),
    ):
        teacher = _copy(tmp_path / key, **{key: value})
        (found,) = problems(with_values(DISTILL, {"algo.teacher": (teacher,)}), 1)
        assert said in str(found)
    random = random_checkpoint(tmp_path / "random", num_experts=9, max_position_embeddings=512)
    config = with_values(DISTILL, {"algo.teacher": (str(random),), "parallel.ep": 2})
    (found,) = problems(config, 2)
    assert found.place == "algo.teacher" and "parallel.ep = 2" in found.rule


def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    folder = Path(_copy(tmp_path / "teacher"))
    text = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = text["model"]["vocab"]
    first, second = list(vocabulary)[300:302]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (folder / "tokenizer.json").write_text(json.dumps(text))
    with pytest.raises(ConfigError, match="differs from the policy's in 2 of 471 tokens"):
        read_task(with_values(DISTILL, {"algo.teacher": (str(folder),)}))


def test_the_plan_counts_teachers(tmp_path: Path) -> None:
    shape = ModelShape.read(DISTILL.model.path)
    larger = str(random_checkpoint(tmp_path, hidden_size=256, num_hidden_layers=8))
    config = with_values(DISTILL, {"algo.teacher": (larger,), "train.micro_batch_tokens": 64})
    size = 4 * ModelShape.read(larger).num_params
    assert teacher_bytes(config, larger) == size
    assert host_memory(config, shape, 1)["teachers"] == size
    train = memory(config, shape, 1)["TRAIN"]
    assert train["teacher"] + train["activations"] == pytest.approx(size)
    assert "teacher" not in memory(tiny_config(), shape, 1)["TRAIN"]


@pytest.mark.parametrize(
    ("loss", "args", "refused"),
    [
        ("{}:f", ("loss.tau=1", "advantage.x=2"), ["advantage.x=2"]),
        ("{}:f", ("x=2", "tau=1"), ["x=2"]),
        ("ppo_clip", ("x=2",), ["x=2"]),
    ],
)
def test_arguments_of_an_advantage_are_refused(
    loss: str, args: tuple[str, ...], refused: list[str], tmp_path: Path
) -> None:
    """The advantage is the teacher's; the loss may be the user's."""
    file = tmp_path / "mine.py"
    file.write_text("def f(inputs, bounds, tau=0): ...\n")
    config = with_values(DISTILL, {"algo.loss": loss.format(file), "algo.args": args})
    found = problems(config, 2)
    load_files(config, found)
    assert [each.value for each in found if each.place == "algo.args"] == refused


def test_what_only_rewards_need_is_refused_or_warned_of() -> None:
    kl: dict[str, Any] = {"algo.kl_coef": 0.3, "algo.kl_in": "reward", "algo.kl_estimator": "k1"}
    found = {each.place: each.rule for each in problems(with_values(DISTILL, kl), 1)}
    assert "train.objective distill learns from the teacher alone" in found["algo.kl_in"]
    (rloo,) = problems(with_values(DISTILL, {"algo.advantage": "rloo"}), 1)
    assert "train.objective distill needs reinforce_pp" in rloo.rule
    in_loss = with_values(DISTILL, {"algo.kl_coef": 0.3, "algo.kl_estimator": "k2"})
    assert problems(in_loss, 1) == [] and warnings(in_loss, 1) == warnings(DISTILL, 1)
    text = "\n".join(warnings(with_values(DISTILL, {"algo.overlong_buffer": 4}), 1))
    assert "algo.overlong_buffer = 4 has no effect: train.objective is distill" in text
