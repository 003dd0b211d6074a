"""Write additions and subtractions as rows with columns of one's own."""

import argparse
import json
import random
from pathlib import Path


def row(rng: random.Random) -> dict[str, object]:
    """One problem, its solution step by step, and how many steps it has."""
    total = rng.randint(2, 9)
    problem, steps = [f"Kim has {total} books."], []
    level = rng.randint(1, 3)
    for _ in range(level):
        sells = total > 0 and rng.random() < 0.5
        change = rng.randint(1, total) if sells else -rng.randint(1, 9)
        new = total - change
        problem.append(f"She sells {change}." if sells else f"She buys {-change}.")
        steps.append(f"{total}{'-' if sells else '+'}{abs(change)}={new}")
        total = new
    problem.append("How many books are left?")
    solution = "\n".join([*steps, f"#### {total}"])
    return {"problem": " ".join(problem), "solution": solution, "level": level}


def main() -> None:
    """Write the file that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("train.jsonl"))
    args = parser.parse_args()
    rng = random.Random(args.seed)
    lines = [json.dumps(row(rng)) for _ in range(args.rows)]
    args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{args.out}: {len(lines)} rows")


if __name__ == "__main__":
    main()
