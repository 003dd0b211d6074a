"""Users' Python files are parsed, not run: the run itself loads them before its first step."""

from __future__ import annotations

import ast
from pathlib import Path

from r3.cli.checks.findings import Findings


def parse_file(path: str, field: str, found: Findings) -> ast.Module | None:
    """The syntax tree of a file; None, and a problem with `field`, if it cannot be read."""
    try:
        return ast.parse(Path(path).read_bytes(), filename=path)
    except OSError as error:
        rule = f"{path} cannot be read ({error.strerror})"
        found.add(field, rule, "give the path of a Python file")
    except (SyntaxError, ValueError) as error:
        found.add(field, f"{path} is not valid Python ({error})", "correct the file")
    return None
