"""A config as a YAML file: `config.yaml` of a run has every setting.

Plain values are read by YAML 1.2: `1e-4` is a number, `010` is ten, `1:30`, `off` and a date are
texts. What is written can be read by YAML 1.1 too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import yaml

from r3.config.fields import ConfigError, Problem, read_values
from r3.config.settings import Config, with_values

_LARGEST = 100_000  # values in a file of settings; larger ones are attacks or accidents


class _Loader(yaml.SafeLoader):
    """Reads plain values as the core schema of YAML 1.2 has them."""


class _Dumper(yaml.SafeDumper):
    """Writes lists on the line of their field, and quotes what either version takes for a value."""


_Loader.yaml_implicit_resolvers = {}
for _kind, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", "~nN\0"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"
        r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
    ("merge", r"<<", "<"),
):
    for _each in (_Loader, _Dumper):
        _each.add_implicit_resolver(
            f"tag:yaml.org,2002:{_kind}",
            re.compile(rf"(?:{_pattern})\Z"),
            [*_first.replace("\0", ""), *([""] if "\0" in _first else [])],
        )
_Loader.add_constructor(
    "tag:yaml.org,2002:int",
    lambda loader, node: int(node.value, 0 if node.value[:2] in ("0o", "0x") else 10),
)
_Loader.add_constructor(
    "tag:yaml.org,2002:float", lambda loader, node: float(re.sub(r"\.(?=[a-zA-Z])", "", node.value))
)
_Dumper.add_representer(
    tuple,
    lambda dumper, values: dumper.represent_sequence(
        "tag:yaml.org,2002:seq", values, flow_style=True
    ),
)


def to_yaml(config: Config) -> str:
    """The config as YAML with every setting; `from_yaml` reads it back."""
    return dump_yaml(asdict(config))


def dump_yaml(tree: dict[str, Any]) -> str:
    """Plain data as YAML, in its own order."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=False, width=120)


def from_yaml(text: str) -> Config:
    """The config that a YAML text describes; absent settings keep their defaults.

    Raises:
        ConfigError: all unknown keys and all values of the wrong type.
    """
    return with_values(Config(), values_of(load_yaml(text, "config.yaml")))


def _not_yaml(error: Exception, name: str, text: str) -> Problem:
    """The line at fault, where the parser names one."""
    fix = "correct or restore the file"
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return Problem(name, "...", f"is not YAML ({' '.join(str(error).split())})", fix)
    line = text.split("\n")[mark.line].strip() if mark.line < text.count("\n") + 1 else ""
    rule = f"is not YAML ({getattr(error, 'problem', error)}, at column {mark.column + 1})"
    return Problem(f"{name}:{mark.line + 1}", line, rule, fix)


def load_yaml(text: str, name: str, notes: list[str] | None = None) -> dict[str, Any]:
    """The mapping that a YAML text holds.

    Args:
        text: the content of a file.
        name: stands for it in errors.
        notes: gets texts that a comment seems to cut.

    Raises:
        ConfigError: the text is not YAML, or not a mapping, or has a key twice.
    """
    problems: list[Problem] = []
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        problems += _twice(node, name)
        if notes is not None:
            notes += _cut_texts(node, name, text)
        tree = loader.construct_document(node) if node else None
        size = _size(tree, {})
    except RecursionError:
        fix = "flatten it"
        raise ConfigError([Problem(name, "...", "is nested too deeply", fix)]) from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError([_not_yaml(error, name, text)]) from None
    if size > _LARGEST:
        rule = f"has {size:.3g} values once its aliases are filled in"
        fix = "write the settings without aliases"
        problems.append(Problem(name, "...", rule, fix))
    elif not isinstance(tree, dict):
        rule = "must map sections to settings"
        problems.append(Problem(name, tree, rule, "write section: {setting: value}"))
    if problems:
        raise ConfigError(problems)
    assert isinstance(tree, dict)
    return tree


def _entries(
    node: yaml.Node | None, path: str = "", seen: set[int] | None = None
) -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
    """Every key of a tree by its full name, such as train.lr, and every entry of a list.

    Yields:
        The name, the node of the key or of the list, and the node of the value.
    """
    seen = set() if seen is None else seen
    if node is None or id(node) in seen:  # an alias
        return
    seen.add(id(node))
    if isinstance(node, yaml.MappingNode):
        below = [(f"{path}.{key.value}".lstrip("."), key, value) for key, value in node.value]
    else:
        entries = node.value if isinstance(node, yaml.SequenceNode) else []
        below = [(f"{path}[{index}]", node, entry) for index, entry in enumerate(entries)]
    for name, key, value in below:
        yield name, key, value
        yield from _entries(value, name, seen)


def _twice(tree: yaml.Node | None, file: str) -> list[Problem]:
    """Keys that stand in the text before: the first of the two values would be lost."""
    problems: list[Problem] = []
    lines: dict[str, int] = {}
    for name, key, value in _entries(tree):
        line = key.start_mark.line + 1
        if name in lines:
            rule = f"is given twice in {file}, in lines {lines[name]} and {line}"
            fix = "keep one of the two"
            if isinstance(value, yaml.MappingNode):
                fix = f"write all its settings under one {name}:"
            problems.append(Problem(name, _shown(value), rule, fix))
        lines.setdefault(name, line)
    return problems


def _cut_texts(tree: yaml.Node | None, file: str, text: str) -> Iterator[str]:
    """A note per text that ` #` ends, where a comment is unlikely to be meant."""
    for name, _, value in _entries(tree):
        if not isinstance(value, yaml.ScalarNode) or value.style is not None:
            continue
        comment = text[value.end_mark.index :].split("\n", 1)[0].strip()
        if comment.startswith("##") or (comment.startswith("#") and " " in value.value):
            line = value.end_mark.line + 1
            yield (
                f"{file}:{line}: {name} is {value.value!r}: ' #' begins a comment. "
                f"If {comment!r} belongs to it, put the text in quotes"
            )


def _shown(node: yaml.Node) -> str:
    return node.value if isinstance(node, yaml.ScalarNode) else "..."


def _size(tree: Any, known: dict[int, int]) -> int:
    """Values in a tree with all aliases filled in, counted without filling them in."""
    if id(tree) in known:
        return known[id(tree)]
    known[id(tree)] = 1  # a list that holds itself
    parts = [*tree.keys(), *tree.values()] if isinstance(tree, dict) else tree
    size = 1
    if isinstance(parts, list):
        size += sum(_size(part, known) for part in parts)
    known[id(tree)] = size
    return size


def values_of(tree: dict[str, Any], notes: list[str] | None = None) -> dict[str, Any]:
    """Settings by their full names, from sections as in config.yaml or from full names.

    Args:
        tree: the mapping of a file.
        notes: gets what is read in another way than it is written.

    Raises:
        ConfigError: all unknown keys and all values of the wrong type.
    """
    problems: list[Problem] = []
    values = read_values(tree, problems, [] if notes is None else notes)
    if problems:
        raise ConfigError(problems)
    return values
