"""Settings from text, YAML and Python: their values, and what is wrong with them.

A YAML file has sections of settings; `config.yaml` of a run has every setting. Plain values are
read by YAML 1.2: `1e-4` is a number, `010` is ten, `1:30`, `off` and a date are texts. What is
written can be read by YAML 1.1 too.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml

from r3.config.arguments import argument_items
from r3.config.fields import TYPES
from r3.config.settings import SETTINGS, Config, with_values
from r3.errors import ConfigError, Problem

_LARGEST = 100_000  # values in a file of settings; larger ones are attacks or accidents


def read_values(
    tree: Mapping[str, Any], problems: list[Problem], notes: list[str]
) -> dict[str, Any]:
    """Settings by their full names, in their types, from sections or full names.

    Args:
        tree: `{"train": {"lr": "1e-4"}}` and `{"train.lr": "1e-4"}` are the same.
        problems: gets unknown names, values of a wrong type, and names that come twice.
        notes: gets what is read in another way than it is written.
    """
    values: dict[str, Any] = {}
    for name, value in _by_full_name(tree, problems):
        if name not in SETTINGS:
            rule = "there is no such setting"
            problems.append(Problem(name, value, rule, nearest_settings(name)))
        elif name in values:
            rule = "is given twice, in its section and by its full name"
            problems.append(Problem(name, value, rule, "keep one of the two"))
        else:
            try:
                values[name] = parse_value(name, value)
            except ValueError as error:
                problems.append(Problem(name, value, str(error), SETTINGS[name].fix))
            else:
                if SETTINGS[name].one is str and _is_none(value) and not values[name]:
                    notes.append(f"{name} {value}: read as empty, not as the text {str(value)!r}")
    return values


def _by_full_name(tree: Mapping[str, Any], problems: list[Problem]) -> Iterator[tuple[str, Any]]:
    """Values in sections or by full names, as a dict by full names; anything else is a problem."""
    sections = [section.name for section in fields(Config)]
    for name, content in tree.items():
        if "." in str(name):
            yield name, content
        elif name not in sections:
            fix = nearest_settings(str(name))
            if isinstance(content, Mapping):
                fix = f"use one of {', '.join(sections)}"
            problems.append(Problem(str(name), content, "there is no such section", fix))
        elif isinstance(content, Mapping):
            yield from ((f"{name}.{key}", value) for key, value in content.items())
        else:
            fix = f"write {name}: {{setting: value}}"
            problems.append(Problem(name, content, "must map settings to values", fix))


def parse_value(name: str, value: object) -> Any:
    """A value for a setting, from text, YAML or Python, in the type of the setting.

    Text is read as on the command line: "1e-4" is a number. A list setting takes a list, one value
    as a list of one, "" as an empty list, and key=value items also as a mapping. none, null and
    Python's None are the empty text, unless none is a value of the setting. `~`, `$VAR` and
    `${VAR}` in paths are filled in.

    Raises:
        ValueError: the value has another type; the message says what was expected.
    """
    setting = SETTINGS[name]
    if setting.arguments:  # args: {limit: 3}, and args: [limit: 3]
        entries = value if isinstance(value, list | tuple) else [value]
        if any(isinstance(entry, Mapping) for entry in entries):
            items = (argument_items(one) if isinstance(one, Mapping) else [one] for one in entries)
            value = [item for some in items for item in some]
    if setting.one is str and _is_none(value):
        value = "none" if setting.none else ""
    elif setting.none and isinstance(value, list | tuple):
        value = ["none" if _is_none(entry) else entry for entry in value]
    parsed = _parse_as(setting.kind, value)
    if setting.path:
        return tuple(map(filled_in, parsed)) if setting.is_list else filled_in(parsed)
    return parsed


def _is_none(value: object) -> bool:
    return value is None or (isinstance(value, str) and value.lower() in ("none", "null"))


_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


def filled_in(path: str) -> str:
    """A path with `~` and the variables of the environment; one that exists stays as it is.

    Raises:
        ValueError: a variable is not set, or a user has no home folder.
    """
    if not ("$" in path or path.startswith("~")) or os.path.lexists(path):
        return path
    names = [braced or bare for braced, bare in _VARIABLE.findall(path)]
    if unset := [name for name in names if not os.environ.get(name)]:
        raise ValueError(f"names the environment variable {unset[0]}, which is not set")
    if "${" in (filled := os.path.expandvars(path)):
        raise ValueError("has a '${' that is not ${VARIABLE}")
    filled = os.path.expanduser(filled) if path.startswith("~") else filled
    if path.startswith("~") and filled.startswith("~"):
        raise ValueError(f"begins with {path.partition('/')[0]}, which has no home folder")
    return filled


def _parse_as(kind: Any, value: object) -> Any:
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if get_origin(kind) is tuple:
        one = get_args(kind)[0]
        # As in `--eval.path ''`: the way to write no value where a value is expected.
        if value == "":
            return ()
        if not isinstance(value, list | tuple):  # `path: rows.jsonl` is a list of one
            value = (value,)
        return tuple(_parse_as(one, entry) for entry in value)
    if get_origin(kind) is Literal:
        text = "none" if _is_none(value) else str(value)
        for choice in get_args(kind):
            if text == str(choice):
                return choice
        raise ValueError(f"must be one of {', '.join(map(str, get_args(kind)))}")
    if kind is bool:
        text = str(value).lower()
        if text not in ("true", "yes", "on", "false", "no", "off"):
            raise ValueError("must be True or False")
        return text in ("true", "yes", "on")
    accepted, expected = TYPES[kind]
    if type(value) in (*accepted, str):  # not isinstance: True is no number
        with suppress(ValueError):
            return kind(value)
    in_quotes = kind is str and isinstance(value, bool | int | float)  # of YAML or Python
    raise ValueError(f"must be {expected}{': put it in quotes' if in_quotes else ''}")


def nearest_settings(name: str) -> str:
    """Advice for a setting that does not exist: the settings it may mean."""
    section, _, last = name.rpartition(".")
    switched = f"{section}.{last.removeprefix('no_')}"
    if last.startswith("no_") and switched in SETTINGS and SETTINGS[switched].kind is bool:
        return f"write --{switched} False"
    if dashed := [full for full in SETTINGS if full.replace(".", "_") == name]:  # --train-lr
        return f"did you mean {dashed[0]}?"
    lasts = dict.fromkeys(full.partition(".")[2] for full in SETTINGS)
    # Settings and their names in TRL and verl, where they differ.
    others = Path(__file__).with_name("names_of_others.txt").read_text().splitlines()
    for ours, *theirs in map(str.split, others):
        if last in theirs and last not in lasts:
            return f"did you mean {ours}?"
    near = difflib.get_close_matches(last, lasts, n=2, cutoff=0.7)
    meant = [full for word in near for full in SETTINGS if full.partition(".")[2] == word]
    meant = [full for full in meant if full.startswith(f"{section}.")] or meant
    if meant:
        return f"did you mean {' or '.join(meant)}?"
    siblings = [full.partition(".")[2] for full in SETTINGS if full.startswith(f"{section}.")]
    return f"{section} has {', '.join(siblings)}" if siblings else "--help lists every setting"


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
    for _handler in (_Loader, _Dumper):
        _handler.add_implicit_resolver(
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


def load_yaml(
    text: str, name: str, notes: list[str] | None = None, places: dict[str, str] | None = None
) -> dict[str, Any]:
    """The mapping that a YAML text holds.

    Args:
        text: the content of a file.
        name: stands for it in errors.
        notes: gets texts that a comment seems to cut.
        places: gets file and line of every key, by its full name.

    Raises:
        ConfigError: the text is not YAML, or not a mapping, or has a key twice.
    """
    problems: list[Problem] = []
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        problems += _twice(node, name)
        if places is not None:
            lines = {full: key.start_mark.line + 1 for full, key, _ in _entries(node)}
            places.update({full: f"{name}:{line}" for full, line in lines.items()})
        if notes is not None:
            notes += _cut_texts(node, name, text)
        tree = loader.construct_document(node) if node else None
        size = _size(tree, {})
    except RecursionError:
        fix = "flatten it"
        raise ConfigError.of(name, "...", "is nested too deeply", fix) from None
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
