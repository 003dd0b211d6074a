"""GSM8K (arXiv 2110.14168): 7473 training questions, 1319 held out; answers end in `#### n`.

No package contains it. From the root of the repository:

    mkdir -p data/gsm8k && cd data/gsm8k
    from=https://raw.githubusercontent.com/openai/grade-school-math/master
    for part in train test; do curl -LO $from/grade_school_math/data/$part.jsonl; done
"""

from r3.config import DataConfig, EvalConfig

DATA = DataConfig(
    path=("data/gsm8k/train.jsonl",),
    # The reward reads the number after the last ####. Chat models write it only if asked.
    system_prompt=(
        "Solve the problem step by step. End with a line that holds #### and the final number "
        "alone."
    ),
    max_prompt_tokens=512,  # room for the longest question with system prompt and chat template
)
EVAL = EvalConfig(path=("data/gsm8k/test.jsonl",), name=("gsm8k",), every=10)
