"""The CUDA path on fake tensors: devices, dtypes, shapes and strides fit, without a GPU."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from r3 import assets
from r3.models.shape import ModelShape
from tests.errors import NOTHING
from tests.fake_cuda import rehearse
from tests.families import family_checkpoint, random_checkpoint
from tests.sweeps import sweep
from tests.unit import rehearsal_cases as cases

pytestmark = [
    pytest.mark.timeout(600),  # half a minute each on an idle core
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
]


@pytest.fixture(scope="module")
def two_layers(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint with no more layers than a pipeline of two ranks needs."""
    folder = tmp_path_factory.mktemp("rehearsal") / "model"
    return str(random_checkpoint(folder, num_hidden_layers=2, num_experts=4, num_experts_per_tok=2))


# One per kind of attention, norm, router and expert; the other tests are of a Qwen3-MoE.
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("deepseek_v3",), id="deepseek_v3"),
        pytest.param(
            ("qwen3_moe", "qwen2_moe", "olmoe", "qwen3"), id="others", marks=pytest.mark.large
        ),
    ],
)
def test_families_train_and_stream_their_weights(names: tuple[str, ...], tmp_path: Path) -> None:
    # A dense layer and one of experts, in families that have both.
    folders = {
        name: str(family_checkpoint(tmp_path / name, name, num_hidden_layers=2)) for name in names
    }
    counts = rehearse(cases.families, folders=folders)
    assert counts == {
        name: len(ModelShape.read(folder).tensor_shapes) for name, folder in folders.items()
    }


CHANGES: dict[str, dict[str, dict[str, Any]]] = {
    "streamed optimizer": {
        "model": {"recompute": "moe"},
        "replay": {"plausibility": 0.1},
        "train": {"optimizer": "streamed"},
    },
    "grouped": {"model": {"experts": "grouped"}},
    # A teacher's weights travel to the device and back.
    "teacher": {
        "algo": {"teacher": (str(assets.TINY_MOE_TIES),)},
        "train": {"objective": "distill"},
    },
    "selective": {"model": {"recompute": "selective"}},
    "full": {"model": {"recompute": "full", "fp32_head": False}, "replay": {"mode": "r2"}},
    "float32": {"model": {"dtype": "float32"}, "algo": {"loss": "gspo"}},
}


@pytest.mark.large
def test_settings_with_a_path_of_their_own_on_cuda(two_layers: str, tmp_path: Path) -> None:
    # Dense: torch refuses fake grouped products in float32, which its kernels take.
    dense = str(family_checkpoint(tmp_path, "qwen3", num_hidden_layers=2))
    steps = [
        (dense if name == "float32" else two_layers, change) for name, change in CHANGES.items()
    ]
    assert rehearse(cases.settings, steps=steps) == len(CHANGES)


@pytest.mark.large
def test_experiments_for_the_first_gpu() -> None:
    names = ["attention", "grouped", "kernels", "layer", "stash"]
    assert rehearse(cases.first_experiments) == names


def test_process_is_set_up_for_cuda(two_layers: str) -> None:
    found = rehearse(cases.process, path=two_layers)
    before = found["compiled before"]
    assert "megatron.core.transformer.moe.router._apply_expert_bias" in before and len(before) > 20
    assert found["compiled"] == []
    # The warning about slow order of pushed weights is shown; on CPU there is none (test_device).
    assert found["logging"] == "WARNING"
    assert found["a rank's device, and a new thread's"] == [1, 0]
    assert found["reward model's device"] == 1
    # Every move was made twice, and the second one copied nothing.
    assert found["stash"] == ["cpu", "cuda"] * 2
    # A step calls nothing that has no deterministic kernel.
    assert found["deterministic"]
    assert found["cumsum"] == "RuntimeError: cumsum has no deterministic implementation"


def test_a_layer_of_fused_experts_never_waits_for_the_device(two_layers: str) -> None:
    found = rehearse(cases.waits_of_a_layer, path=two_layers, kinds=["auto", "fused", "grouped"])
    assert found["auto"] == found["fused"] == []
    assert "masked_select" in found["grouped"]


@pytest.mark.large
@pytest.mark.parametrize("parallel", [{"tp": 2, "etp": 1}, {"cp": 2}])
def test_ranks_that_share_sequences(two_layers: str, parallel: dict[str, int]) -> None:
    assert rehearse(cases.layout, path=two_layers, rank=1, parallel=parallel)


@pytest.mark.parametrize("experts", sweep(("grouped", "fused"), kept=("fused",)))
def test_ranks_that_exchange_tokens(two_layers: str, experts: str) -> None:
    assert rehearse(cases.layout, path=two_layers, rank=1, parallel={"ep": 2}, experts=experts)


def test_ranks_compute_while_tokens_travel_and_wait_before_they_use_them(tmp_path: Path) -> None:
    model = str(family_checkpoint(tmp_path / "model", "qwen2_moe", num_hidden_layers=3))
    found = rehearse(cases.order_of_transfers, path=model)
    assert found["races"] == 0
    assert found["races without waits in forward"] > 0
    assert found["races without waits in backward"] > 0
    # Two matrices and a gate of the shared experts; two of the others. A gradient of a product's
    # input is a product, and so is that of its weight.
    each = {"forward mm": 3, "backward mm": 6, "backward _grouped_mm": 2}
    assert found["products"] == {name: count * found["layers"] for name, count in each.items()}


def test_optimizer_needs_each_of_its_waits_and_no_other(tmp_path: Path) -> None:
    # Four layers: with two, no part takes the memory of the one before it, and no wait is missed.
    sizes = dict(num_hidden_layers=4, num_experts=2, num_experts_per_tok=2)
    model = random_checkpoint(tmp_path / "model", **sizes)
    races = rehearse(cases.order_of_streams, path=str(model))
    assert races.pop("a step") == races.pop("without nothing") == 0
    for name in ("step", "offload"):
        assert races.pop(f"resident {name} without nothing") == 0
    assert len(races) == 7 and all(races.values()), races


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.large), 1])
def test_ranks_that_are_stages(two_layers: str, rank: int) -> None:
    assert rehearse(cases.layout, path=two_layers, rank=rank, parallel={"pp": 2})


def test_capture_writes_inside_a_graph_and_waits_only_when_it_reads() -> None:
    found = rehearse(cases.capture)
    assert found.pop("waits of a write") == []
    assert found.pop("waits of a read")
    assert found and NOTHING not in found.values(), found


def test_mistakes_are_found(two_layers: str, tmp_path: Path) -> None:
    # 36 numbers of bfloat16 are no multiple of 16 bytes.
    sizes = dict(moe_intermediate_size=36, num_experts=4, num_experts_per_tok=2)
    narrow = random_checkpoint(tmp_path / "narrow", num_hidden_layers=2, **sizes)
    errors = rehearse(cases.mistakes, path=two_layers, narrow=str(narrow))
    expected = {
        "advantages on the host": "at least two devices",
        "routes on the host": "at least two devices",
        "a loss mask that is too short": "mismatching argument",
        "experts in two dtypes": "dtype",
        "experts that are not aligned": "multiple of 16 bytes",
        "no mistake": NOTHING,
    }
    assert errors.keys() == expected.keys()
    for name, words in expected.items():
        assert words in errors[name].lower(), (name, errors[name])
