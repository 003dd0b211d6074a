"""The embedded task: word problems of three or four steps, as rows in the format of GSM8K.

    question   Tom has 3 books. He gives away 3. He buys 5. He drops 3. How many books are left?
    answer     3-3=0
               0+5=5
               5-3=2
               #### 2

Every number stays within 0..30, so a model of one million parameters can learn the arithmetic in
two minutes; doing three or four steps in the head at once is what stays hard for it.
"""

import random
from collections.abc import Iterator
from itertools import islice

Row = dict[str, str]

EVAL_SEED = 1_000_000
TRAIN_SEED = 1_000

_NAMES = ("Tom", "Ben", "Sam", "Leo", "Ann", "Eva", "Mia", "Zoe")
_PRONOUNS = dict.fromkeys(_NAMES[:4], "He") | dict.fromkeys(_NAMES[4:], "She")
_THINGS = ("apples", "books", "coins", "cards", "shells", "pens", "stamps", "eggs")
_GAINS = ("buys", "finds", "gets", "wins")
_LOSSES = ("sells", "loses", "gives away", "drops")
_LARGEST_OPERAND, _LARGEST_TOTAL = 10, 30


def make_problem(rng: random.Random) -> Row:
    """One random problem: `question`, and `answer` with a line for each step and `#### n` at the
    end. No running total leaves 0..30.
    """
    name, thing = rng.choice(_NAMES), rng.choice(_THINGS)
    total = rng.randint(2, _LARGEST_OPERAND)
    sentences, work = [f"{name} has {total} {thing}."], []
    for _ in range(rng.randint(3, 4)):
        # Too few to lose two, or no room to gain two, decides the direction; otherwise a coin does.
        gain = total < 3 or (total < _LARGEST_TOTAL - 2 and rng.random() < 0.5)
        room = _LARGEST_TOTAL - total if gain else total
        operand = rng.randint(2, min(_LARGEST_OPERAND, room))
        after = total + operand if gain else total - operand
        sentences.append(f"{_PRONOUNS[name]} {rng.choice(_GAINS if gain else _LOSSES)} {operand}.")
        work.append(f"{total}{'+' if gain else '-'}{operand}={after}")
        total = after
    question = " ".join([*sentences, f"How many {thing} are left?"])
    return {"question": question, "answer": "\n".join([*work, f"#### {total}"])}


def final_answer(row: Row) -> str:
    """What stands behind the last `####` of a row's answer."""
    return row["answer"].rpartition("####")[2].strip()


def problems(rng: random.Random, held_out: frozenset[str] = frozenset()) -> Iterator[Row]:
    """Endless problems, no question twice, none whose whole `answer` is in `held_out`.

    Holding out answers (the chain of arithmetic) is stricter than holding out questions: the same
    sums told about another name or thing stay out too.
    """
    seen: set[str] = set()
    while True:
        row = make_problem(rng)
        if row["question"] not in seen and row["answer"] not in held_out:
            seen.add(row["question"])
            yield row


def evaluation_rows(count: int = 256) -> list[Row]:
    """The evaluation set: always the same rows."""
    return list(islice(problems(random.Random(EVAL_SEED)), count))


def held_out_answers() -> frozenset[str]:
    """The chains of arithmetic of the evaluation set, which no training of any kind may see."""
    return frozenset(row["answer"] for row in evaluation_rows())


def training_rows(count: int = 4096) -> list[Row]:
    """The prompts for reinforcement learning: always the same rows, none from the evaluation
    set.
    """
    return list(islice(problems(random.Random(TRAIN_SEED), held_out_answers()), count))
