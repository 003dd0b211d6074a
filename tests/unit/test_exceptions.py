"""Exceptions pass from one process to another: a pool's `map` would wait for one for ever."""

import ast
import pickle
from collections import defaultdict
from pathlib import Path

import pytest

from r3 import RunError
from r3.config import ConfigError, Problem
from r3.data import DataError, RowProblem
from r3.data.rendering import TemplateFault
from r3.envs import ApiError, ModelLimit
from r3.errors import Fault
from r3.models.shape import ShapeError
from r3.run import StoppedEarly
from r3.user_code import CallError, CallTimeout
from tests.world import ROOT

_ROW = RowProblem("a.jsonl", 3, "answer", "is missing", "add it")
# All that take something else than a message. Python itself passes on the others.
EXCEPTIONS = {
    "config: 1 problem\n  - train.lr = -1.0: must be positive. Fix: raise it": ConfigError(
        [Problem("train.lr", -1.0, "must be positive", "raise it")]
    ),
    "data: 1 problem\n  - a.jsonl:3: answer: is missing. Fix: add it": DataError([_ROW]),
    "a.jsonl:3: answer: is missing. Fix: add it": _ROW,
    "set: has no fix": Problem(place="set", rule="has no fix"),
    "stopped by SIGINT after step 3": StoppedEarly(3, "SIGINT"),
    "no rows. Fix: add some": Fault("no rows", "add some"),
    "no such model. Fix: another name": ShapeError("no such model", "another name"),
    "it is not shown": TemplateFault("it is not shown", "another template"),
    "no turns left": ModelLimit("turns", "no turns left"),
    "no such model": ApiError(404, "no such model", code="model_not_found", param="model"),
    f"{'x' * 500} ...": ApiError(400, "x" * 900),
    "ranks failed": RunError("ranks failed", 1),
    "busy": CallError("busy", again=False, wait_s=2.0),
    "late": CallTimeout("late"),
}


@pytest.mark.parametrize("text", EXCEPTIONS)
def test_an_exception_comes_back_from_pickle_as_it_was(text: str) -> None:
    error = EXCEPTIONS[text]
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is type(error)
    assert str(back) == str(error) == text
    assert vars(back) == vars(error)


def test_all_exceptions_with_arguments_of_their_own_are_tried() -> None:
    classes = [
        node
        for file in Path(ROOT, "r3").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    ]
    bases: dict[str, set[str]] = defaultdict(set)
    for each in classes:
        bases[each.name] |= {ast.unparse(base) for base in each.bases}
    known = {"Exception", "BaseException", "ValueError", "RuntimeError", "OSError"}
    known |= {"AssertionError", "FloatingPointError"}
    while new := {name for name in bases.keys() - known if known & bases[name]}:
        known |= new
    own = {
        each.name for each in classes if "__init__" in {getattr(x, "name", "") for x in each.body}
    }
    assert own & known <= {type(error).__name__ for error in EXCEPTIONS.values()}
