"""A run with adapters: proved syncs, the reference policy, the exports of model and adapter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.e2e import adapter_cases
from tests.families import engine_checkpoint
from tests.runs import interpreter, program, rows_of, run, words
from tests.world import run_world

pytestmark = pytest.mark.e2e

# Every sync compares all weights of the engine with the policy's.
FLAGS = words(
    "--lora.rank 8 --lora.expert_rank 4 --lora.targets attention experts --train.lr 5e-3 "
    "--train.steps 3 --algo.kl_coef 0.01 --algo.kl_estimator k3 --model.base int8 "
    "--debug.prove_sync_every 1 --eval.max_prompts 64 --log.tensorboard false"
)


def in_int8(weight: torch.Tensor, *, down: bool) -> torch.Tensor:
    """Blocks of 128 values of a row, or of a column where ranks share rows."""
    rows = weight.float().mT if down else weight.float()
    parts = []
    for block in rows.split(128, -1):
        step = (block.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-30)
        parts.append((block / step).round() * step)
    found = torch.cat(parts, -1)
    return found.mT if down else found


def test_export_is_base_plus_product(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert "adapters   " in run(folder, *FLAGS, "--model.path", str(model))
    rows = rows_of(folder)
    assert rows[-1]["eval/heldout/accuracy"] > rows[0]["eval/heldout/accuracy"] + 0.1
    # Rounding of float32; with an adapter that is missing on one side it is 1e-4 and more.
    assert max(row["mismatch/k3"] for row in rows if "mismatch/k3" in row) < 1e-9
    # The reference policy is the base: the first update is made at it, later ones are not.
    kl = [row["loss/kl_ref"] for row in rows if "loss/kl_ref" in row]
    assert kl[0] < 1e-6 < 1e-4 < kl[-1]

    command = [interpreter(), "-m", "r3.export", str(folder), "--adapter"]
    done = program(*command)
    assert done.returncode == 0, done.stderr
    adapter = load_file(folder / "adapter/step_000003/adapter_model.safetensors")
    facts = json.loads((folder / "adapter/step_000003/adapter_config.json").read_text())
    base = load_file(model / "model.safetensors")
    merged = load_file(folder / "hf/step_000003/model-00001.safetensors")
    assert merged.keys() == base.keys()
    for name, weight in base.items():
        if name.startswith("model.layers.") and name.endswith("_proj.weight"):
            weight = in_int8(weight, down=name.endswith(("o_proj.weight", "down_proj.weight")))
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{stem}.lora_A.weight" in adapter:
            a, b = (adapter[f"{stem}.lora_{letter}.weight"] for letter in "AB")
            weight = weight + facts["lora_alpha"] / facts["r"] * b @ a
        # Sums in another order: below 1e-7. The products are 1e-3 and more.
        assert float((merged[name] - weight).abs().max()) < 1e-6, name
    assert len(adapter) == 2 * sum(
        part in name
        for name in base
        for part in (".experts.", "q_proj", "k_proj", "v_proj", "o_proj")
    )

    # Another base is refused: base plus product would be a model that nobody trained.
    name = next(iter(base))
    save_file(base | {name: base[name] + 1}, model / "model.safetensors", metadata={"format": "pt"})
    done = program(*command, "--to", tmp_path / "to")
    assert done.returncode == 2 and "weights changed since the run" in done.stderr, done.stderr


def test_vllm_samples_with_the_adapter_as_with_the_merged_model(tmp_path: Path) -> None:
    """A dense model: vLLM's CPU build has no adapters for experts."""
    model = engine_checkpoint(tmp_path / "model", "llama3.1")
    given = {"model": str(model), "out": str(tmp_path)}
    ((base, adapted, merged),) = run_world(adapter_cases.adapted, 1, **given)
    assert adapted[0] == merged[0] != base[0]
    # Rounding of float32: 1e-6 measured; an adapter with another scale is off by 0.1 and more.
    assert adapted[1] == pytest.approx(merged[1], abs=1e-4)
