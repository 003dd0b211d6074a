"""A config as a YAML file: `config.yaml` of a run has every setting."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

import yaml

from r3.config.fields import SETTINGS, ConfigError, Problem, nearest_settings, parse_value
from r3.config.settings import Config, with_values

_LARGEST = 100_000  # values in a file of settings; larger ones are attacks or accidents


class _Dumper(yaml.SafeDumper):
    """Writes lists on the line of their field."""


_Dumper.add_representer(
    tuple,
    lambda dumper, values: dumper.represent_sequence(
        "tag:yaml.org,2002:seq", values, flow_style=True
    ),
)


def to_yaml(config: Config) -> str:
    """The config as YAML with every setting; `from_yaml` reads it back equal."""
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


def load_yaml(text: str, name: str) -> dict[str, Any]:
    """The mapping that a YAML text holds; `name` stands for it in errors.

    Raises:
        ConfigError: the text is not YAML, or not a mapping.
    """
    try:
        tree = yaml.safe_load(text)
        size = _size(tree, {})
    except RecursionError:
        fix = "flatten it"
        raise ConfigError([Problem(name, "...", "is nested too deeply", fix)]) from None
    except yaml.YAMLError as error:
        rule = f"is not YAML ({error})"
        raise ConfigError([Problem(name, "...", rule, "correct or restore the file")]) from None
    if size > _LARGEST:
        rule = f"has {size:.3g} values once its aliases are filled in"
        fix = "write the settings without aliases"
        raise ConfigError([Problem(name, "...", rule, fix)])
    if not isinstance(tree, dict):
        rule = "must map sections to settings"
        raise ConfigError([Problem(name, tree, rule, "write section: {setting: value}")])
    return tree


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


def values_of(tree: dict[str, Any]) -> dict[str, Any]:
    """Settings by their full names, from sections as they stand in config.yaml.

    Raises:
        ConfigError: all unknown keys and all values of the wrong type.
    """
    problems: list[Problem] = []
    values: dict[str, Any] = {}
    sections = [section.name for section in fields(Config)]
    for section, content in tree.items():
        if section not in sections:
            fix = f"use one of {', '.join(sections)}"
            problems.append(Problem(str(section), content, "there is no such section", fix))
        elif not isinstance(content, dict):
            fix = f"write {section}: {{setting: value}}"
            problems.append(Problem(str(section), content, "must map settings to values", fix))
        else:
            for key, value in content.items():
                name = f"{section}.{key}"
                if name not in SETTINGS:
                    rule = "there is no such setting"
                    problems.append(Problem(name, value, rule, nearest_settings(name)))
                    continue
                try:
                    values[name] = parse_value(name, value)
                except ValueError as error:
                    fix = f"the default is {SETTINGS[name].default!r}"
                    problems.append(Problem(name, value, str(error), fix))
    if problems:
        raise ConfigError(problems)
    return values
