"""Reads Python sources as syntax trees, for the rules about this repository."""

import ast
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]

Complaints = Iterator[tuple[int, str]]  # line, what is wrong


def imports(file: PurePosixPath, tree: ast.Module) -> Complaints:
    """Line and full name of everything imported, `from a import b` as a.b, and literal arguments of
    import_module.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = (
                file.parent.parts[: len(file.parent.parts) - node.level + 1] if node.level else ()
            )
            base = ".".join([*above, *filter(None, [node.module])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
            ("import_module", "__import__")
        ):
            yield from (
                (node.lineno, str(a.value)) for a in node.args[:1] if isinstance(a, ast.Constant)
            )
