"""Write small broken repositories as rows: the issue, the files, and a hidden test.

    python examples/swe_task/make_rows.py 256 > rows.jsonl

The issue is a word problem, as that is all that the embedded model can read. `left()` in `shop.py`
returns the first step with the wrong sign; the hidden test knows the right number.
"""

import json
import sys
from itertools import islice
from pathlib import Path

DATA = Path(__file__).parents[2] / "r3" / "assets" / "data" / "word_problems_train.jsonl"

CODE = '''def left():
    """How many are left."""
    return {wrong}


def total(counts):
    return sum(counts)
'''

VISIBLE = """import unittest

import shop


class Visible(unittest.TestCase):
    def test_left_is_a_number(self):
        self.assertIs(type(shop.left()), int)

    def test_total(self):
        self.assertEqual(shop.total([1, 2, 3]), 6)
"""

HIDDEN = """import unittest

import shop


class Hidden(unittest.TestCase):
    def test_left(self):
        self.assertEqual(shop.left(), {answer})
"""

# The shell of the repository reads this file. The embedded model can write `8+4` and little else.
COMMANDS = """# 8+4 makes 8+4 what left() returns, and prints its value.
command_not_found_handle() {
    [[ $1 =~ ^[0-9]+[-+][0-9]+$ ]] || { echo "$1: command not found"; return 127; }
    sed -i "s/^    return [0-9].*/    return $1/" shop.py && echo $(($1))
}
"""


def row(problem: dict[str, str]) -> dict[str, object]:
    steps, answer = problem["answer"].split("\n#### ")
    wrong = steps.split("=")[0].translate(str.maketrans("+-", "-+"))
    return {
        "question": problem["question"],
        "answer": answer,
        "files": {"shop.py": CODE.format(wrong=wrong), "commands.sh": COMMANDS},
        "tests": {"test_shop.py": VISIBLE},
        "hidden": {"test_hidden.py": HIDDEN.format(answer=answer)},
    }


if __name__ == "__main__":
    for line in islice(DATA.read_text().splitlines(), int(sys.argv[1])):
        print(json.dumps(row(json.loads(line))))
