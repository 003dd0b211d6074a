"""benchmarks/gpu.sh from end to end, with the CPU in the place of the GPU."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_tables
from benchmarks.gpu_steps import steps
from tests.runs import program
from tests.warm import interpreter

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.large, pytest.mark.timeout(2400)]


def rehearsed(out: Path, *names: str) -> dict[str, dict[str, Any]]:
    """Row of results by step, of these steps and those they come after; all without names."""
    command = ("benchmarks/gpu.sh", "--rehearse", "--out", out, *names)
    done = program(*command, env={"PYTHON": interpreter()}, timeout_s=2300, together=True)
    failed = [line for line in done.stdout.splitlines() if "failed: " in line]
    logs = "".join(
        f"--- {name}\n{(out / f'{name}.log').read_text()[-2000:]}\n"
        for name in (failed[0].removeprefix("failed: ").split(", ") if failed else ())
    )
    assert done.returncode == 0, done.stdout[-2000:] + logs
    rows = map(json.loads, (out / "results.jsonl").read_text().splitlines())
    return {row["step"]: row for row in rows}


def test_named_steps_pass_a_rehearsal(tmp_path: Path) -> None:
    rows = rehearsed(tmp_path / "gpu", "doctor", "rescore")
    assert rows.keys() == {"doctor", "rescore"}
    assert rows["doctor"]["figures"]["passed"] == rows["doctor"]["figures"]["of"] > 0
    replayed, live = (rows["rescore"]["figures"][f"k3_{each}"] for each in ("replay", "live"))
    assert replayed < live / 100


@pytest.mark.skipif("R3_WHOLE_REHEARSAL" not in os.environ, reason="it takes two to eight minutes")
def test_all_steps_pass_a_rehearsal(tmp_path: Path) -> None:
    out = tmp_path / "gpu"
    rows = rehearsed(out)
    assert rows.keys() == {step.name for step in steps(out, seeds=1, small=True)}
    figures = {name: row["figures"] for name, row in rows.items()}
    for name in ("doctor", "doctor-pair", "doctor-deepseek_v3", "doctor-qwen3"):
        assert figures[name]["passed"] == figures[name]["of"] > 0, name
    assert figures["rescore"]["k3_replay"] < figures["rescore"]["k3_live"] / 100
    assert set(figures["curves"]["reward"]) == {"curve-r3-0", "curve-off-0"}
    assert figures["sft"]["peak_share_without_optimizer"] > figures["sft"]["peak_share"] > 0
    assert figures["sft"]["trace"]["largest"] and 0 < figures["sft"]["trace"]["optimizer_share"] < 1
    assert len(figures["large"]["by_step"]["memory/peak_gib"]) == 5
    assert set(figures["large"]["planned_gib"]) >= {"SYNC", "GENERATE", "TRAIN"}
    assert figures["generation-r3"]["tokens_per_s"]["vllm plain"] > 0
    (section,) = [
        text for text in gpu_tables.sections(list(rows.values())) if text.startswith("### ")
    ]
    assert "rehearsal on CPU" in section
