"""Where the embedded models and their task lie: everything a first run needs, without a download."""

from pathlib import Path

_HERE = Path(__file__).resolve().parent

TINY_MOE: Path = _HERE / "tiny-moe"
TINY_MOE_TOOLS: Path = _HERE / "tiny-moe-tools"  # the same, taught to call a calculator
WORD_PROBLEMS_TRAIN: Path = _HERE / "data" / "word_problems_train.jsonl"
WORD_PROBLEMS_EVAL: Path = _HERE / "data" / "word_problems_eval.jsonl"
