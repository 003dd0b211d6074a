"""Paths of the embedded models and their task: everything a first run needs, without a download."""

from pathlib import Path

_HERE = Path(__file__).resolve().parent

TINY_MOE: Path = _HERE / "tiny-moe"
# Trained in the same way, but its routers stand near ties: in bfloat16 live routing often differs.
TINY_MOE_TIES: Path = _HERE / "tiny-moe-ties"
TINY_MOE_TOOLS: Path = _HERE / "tiny-moe-tools"  # tiny-moe, taught to call a calculator
WORD_PROBLEMS_TRAIN: Path = _HERE / "data" / "word_problems_train.jsonl"
WORD_PROBLEMS_EVAL: Path = _HERE / "data" / "word_problems_eval.jsonl"
