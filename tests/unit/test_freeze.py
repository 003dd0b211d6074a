"""Which tensors `train.freeze` keeps as they are; wrong_settings.txt has what it refuses."""

from r3.assets import TINY_MOE
from r3.config import Config, TrainConfig, fixed_changes, with_values
from r3.lora import frozen_tensors
from r3.models.shape import ModelShape
from r3.tools import adapter_text, frozen_lines

SHAPE = ModelShape.read(TINY_MOE)


def test_patterns_match_names_of_the_checkpoint() -> None:
    assert frozen_tensors(SHAPE, ()) == frozenset()
    routers = frozen_tensors(SHAPE, ["*.mlp.gate.weight"])
    assert routers == {f"model.layers.{layer}.mlp.gate.weight" for layer in SHAPE.moe_layers}
    one = frozen_tensors(SHAPE, ["model.layers.1.self_attn.*", "model.norm.weight"])
    assert "model.norm.weight" in one
    assert {name.split(".")[2] for name in one - {"model.norm.weight"}} == {"1"}
    experts = frozen_tensors(SHAPE, ["model.layers.0.mlp.experts.*"])
    assert len(experts) == 3 * SHAPE.num_experts


def test_the_header_counts_what_is_frozen() -> None:
    texts = dict(frozen_lines(SHAPE, ()))
    assert texts["routers"].startswith("trained;") and not texts["frozen"]
    texts = dict(frozen_lines(SHAPE, ["*.mlp.gate.weight"]))
    count = len(SHAPE.moe_layers) * SHAPE.num_experts * SHAPE.hidden_size
    assert texts["routers"].startswith("frozen;")
    assert texts["frozen"].startswith(f"{count:,} parameters in {len(SHAPE.moe_layers)} tensors")
    texts = dict(frozen_lines(SHAPE, ["model.layers.0.*"]))
    assert texts["routers"].startswith("partly frozen;")


def test_a_resumed_run_freezes_the_same() -> None:
    frozen = Config(train=TrainConfig(freeze=("*.mlp.gate.weight",)))
    assert list(fixed_changes(Config(), frozen)) == ["train.freeze"]


def test_the_header_names_the_targets_that_the_model_has() -> None:
    config = with_values(Config(), {"lora.rank": 8})
    assert adapter_text(config, SHAPE).endswith(" on 112 matrices: attention experts")
    frozen = with_values(config, {"train.freeze": ("*.experts.*",)})
    assert adapter_text(frozen, SHAPE).endswith(" on 16 matrices: attention")
