"""What rounding router logits like the engine is worth: k3 with `model.router_logits` float32 and
engine, on CPU in bfloat16.

    .venv/bin/python -m benchmarks.router_logits     4 minutes on two cores

vLLM's gate is a linear layer in `engine.dtype`, on CPU as on CUDA; the policy computes the logits
in float32 unless `model.router_logits` is engine. Both arms score the same tokens, which the engine
sampled. Writes results/router_logits.json.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.mismatch import about
from r3 import assets
from tests.e2e.mismatch_cases import near_tie_checkpoint, paired
from tests.world import run_world

RESULT = Path(__file__).parent / "results/router_logits.json"
SIZES = dict(batches=8, prompts=16, group=8, max_tokens=40)


def main() -> None:
    """Measure, write, print a table."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="r3-router-") as folder:
        models = {
            "tiny-moe": assets.TINY_MOE,
            "tiny-moe-ties": assets.TINY_MOE.parent / "tiny-moe-ties",
            "near ties, random": near_tie_checkpoint(Path(folder) / "moe"),
        }
        for name, model in models.items():
            for router_logits in ("float32", "engine"):
                (made,) = run_world(
                    paired,
                    1,
                    timeout_s=900,
                    model=str(model),
                    policy_dtype="bfloat16",
                    engine_dtype="bfloat16",
                    router_logits=router_logits,
                    **SIZES,
                )
                per_batch = [vars(row) for row in made]
                rows.append(
                    {
                        "model": name,
                        "router_logits": router_logits,
                        "tokens": sum(row["tokens"] for row in per_batch),
                        "slots_differ": fmean(row["slots_differ"] for row in per_batch),
                        **{
                            f"k3_{arm}": [row[arm]["k3"] for row in per_batch]
                            for arm in ("replay", "live")
                        },
                    }
                )
                print(json.dumps(rows[-1]), flush=True)
    text = {
        "about": about()
        | {
            "what": "k3 with router logits in float32 and rounded like the engine's",
            "made_by": "python -m benchmarks.router_logits",
        },
        "sizes": SIZES,
        "rows": rows,
    }
    RESULT.write_text(json.dumps(text, indent=1) + "\n", encoding="utf-8")
    print("\n| model | router logits | other experts | k3, live | k3, replay |")
    print("|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['model']} | {row['router_logits']} | {100 * row['slots_differ']:.2g} % "
            f"| {fmean(row['k3_live']):.2e} | {fmean(row['k3_replay']):.2e} |"
        )


if __name__ == "__main__":
    main()
