"""Parse users' Python files without running them; the run loads them before its first step."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

from r3.checks.findings import Findings
from r3.user_code.loading import file_fault, path_fix

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


def parse_file(path: str, field: str, found: Findings) -> ast.Module | None:
    """The syntax tree of a file; None, and a problem with `field`, if it cannot be read."""
    if fault := file_fault(path):
        found.add(field, fault, path_fix(path), value=path)
        return None
    try:
        return ast.parse(Path(path).read_bytes(), filename=path)
    except OSError as error:
        rule = f"{path} cannot be read ({error.strerror})"
        found.add(field, rule, "give the path of a Python file", value=path)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        found.add(field, f"{path} is not valid Python ({error})", "correct the file", value=path)
    return None


def find_function(spec: str, field: str, found: Findings) -> FunctionNode | None:
    """The definition that `file.py:function` names; None, and a problem, if there is none."""
    path, _, name = spec.rpartition(":")
    if (tree := parse_file(path, field, found)) is None:
        return None
    defined = {
        node.name: node
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    if name not in defined:
        fix = f"it defines {', '.join(defined) or 'none'}; write the function at the top level"
        found.add(field, f"{path} defines no function {name!r}", fix, value=spec)
    return defined.get(name)


def signature_of(node: FunctionNode) -> inspect.Signature | None:
    """The parameters of a function, defaults without their values; None if a decorator may change
    them.
    """
    if node.decorator_list:
        return None
    given = node.args
    bare = ast.arguments(
        posonlyargs=[ast.arg(each.arg) for each in given.posonlyargs],
        args=[ast.arg(each.arg) for each in given.args],
        vararg=given.vararg and ast.arg(given.vararg.arg),
        kwonlyargs=[ast.arg(each.arg) for each in given.kwonlyargs],
        kw_defaults=[each and ast.Constant(None) for each in given.kw_defaults],
        kwarg=given.kwarg and ast.arg(given.kwarg.arg),
        defaults=[ast.Constant(None) for _ in given.defaults],
    )
    # A lambda without any code of the user.
    same = ast.fix_missing_locations(ast.Expression(ast.Lambda(bare, ast.Constant(None))))
    return inspect.signature(eval(compile(same, "<signature>", "eval")))
