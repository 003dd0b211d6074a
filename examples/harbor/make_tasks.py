"""Write tasks in Harbor's format, and rows that name them.

    python examples/harbor/make_tasks.py 64 runs/harbor-tasks > rows.jsonl

They are the repositories of examples/swe_task.
"""

import json
import sys
from itertools import islice
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "swe_task"))

from make_rows import DATA, row

CONFIG = """version = "1.0"
[verifier]
timeout_sec = 60.0
[agent]
timeout_sec = 600.0
[environment]
network_mode = "no-network"
"""
TEST = """#!/bin/bash
cp /tests/*.py /app
if python3 -m unittest -q test_shop test_hidden; then reward=1
elif python3 -m unittest -q test_shop && ! grep -q 'return {wrong}$' shop.py; then reward=0.1
else reward=0; fi
echo $reward > /logs/verifier/reward.txt
"""
SOLUTION = "#!/bin/bash\nsed -i 's/return {wrong}/return {answer}/' shop.py\n"


def write(folder: Path, problem: dict[str, str]) -> None:
    made = row(problem)
    wrong = made["files"]["shop.py"].split("return ")[1].split("\n")[0]
    files = {
        "instruction.md": made["question"],
        "task.toml": CONFIG,
        "environment/Dockerfile": "FROM python:3.12-slim\nWORKDIR /app\nCOPY . .\n",
        "tests/test.sh": TEST.format(wrong=wrong),
        "solution/solve.sh": SOLUTION.format(wrong=wrong, answer=made["answer"]),
    }
    files |= {f"environment/{name}": text for name, text in made["files"].items()}
    files |= {f"tests/{name}": text for name, text in (made["tests"] | made["hidden"]).items()}
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


if __name__ == "__main__":
    root = Path(sys.argv[2])
    for index, line in enumerate(islice(DATA.read_text().splitlines(), int(sys.argv[1]))):
        problem = json.loads(line)
        write(root / f"shop-{index}", problem)
        print(json.dumps({"question": problem["question"], "answer": "", "task": f"shop-{index}"}))
