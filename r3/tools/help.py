"""The help of the command line: usage, presets, and settings with type, rule and meaning."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields
from importlib import resources
from typing import Any, get_args, get_origin, get_type_hints

from r3.config import SETTINGS, Config, flatten, help_of, shown
from r3.configs import PRESETS
from r3.models.families import FAMILIES, PROOFS


def _text(name: str) -> str:
    return resources.files("r3.tools").joinpath(name).read_text(encoding="utf-8")


_ABOUT = (
    "BASE is a preset, a YAML file with differences from a preset, or my_presets.py:function.",
    "Start several ranks with torchrun --nproc_per_node N, or with launch/local.sh.",
)
SECTIONS = tuple(section.name for section in fields(Config))
TOPICS = (*SECTIONS, "all", "columns")
"""Words that --help takes."""
COLUMNS_MEAN = {
    title: " ".join(meaning.split())
    for title, meaning in re.findall(r"^(\S.*)\n((?: .*\n)+)", _text("columns.txt"), re.M)
}
"""What the columns of the console mean."""
_NAMES = {str: "TEXT", int: "INT", float: "NUMBER", bool: "true|false"}


def overview() -> str:
    """The help for which no preset is needed: usage, presets and sections."""
    presets = {name: build.__doc__ or "" for name, build in PRESETS.items()}
    hints = get_type_hints(Config)
    sections = {section.name: hints[section.name].__doc__ or "" for section in fields(Config)}
    about = [textwrap.fill(text, width()) for text in _ABOUT]
    presets_and_sections = ["presets", *_list(presets), "", "sections", *_list(sections)]
    return "\n".join([_text("usage.txt"), *about, "", *presets_and_sections])


def models() -> str:
    """The known architectures of config.json, their models, and what is tested for them."""
    families = {
        name: f"{family.models} ({', '.join(family.proved)})" for name, family in FAMILIES.items()
    }
    rows = _list(families, names=24)
    return "\n".join(["architectures", *rows, "", "what is tested", *_list(PROOFS)])


def _list(entries: Mapping[str, str], names: int = 22) -> list[str]:
    """The first line of each text beside its name, which has so many columns."""
    return [
        textwrap.fill(
            text.splitlines()[0],
            width(),
            initial_indent=f"  {name:{names}s}",
            subsequent_indent=" " * (names + 2),
        )
        for name, text in entries.items()
    ]


def width() -> int:
    """Columns of the terminal, within reason."""
    return max(60, min(120, shutil.get_terminal_size().columns))


def columns() -> str:
    """What the columns of the console mean."""
    return "\n".join(["columns of the console", *_list(COLUMNS_MEAN)])


def settings(name: str, config: Config, topics: Collection[str] = ()) -> str:
    """Settings with their meaning and their value in `config`: those that presets use.

    Args:
        name: of the base; "" without one.
        config: the base.
        topics: sections, to list all settings of these only, or "all".
    """
    defaults, of_presets = flatten(Config()), [flatten(build()) for build in PRESETS.values()]
    listed = {
        full: setting
        for full, setting in SETTINGS.items()
        if "all" in topics
        or full.partition(".")[0] in topics
        or (not topics and any(preset[full] != defaults[full] for preset in of_presets))
    }
    sections = [topic for topic in topics if topic != "all"]
    what = f"All settings of {', '.join(sections)}" if sections else "All settings"
    what = what if topics else "The settings that presets use"
    intro = f"{what}. Defaults are those of {name or 'an empty preset'}."
    if not topics:
        intro += f" {len(SETTINGS) - len(listed)} more: --help all, or --help SECTION."
    values = flatten(config)
    return "\n".join(
        [
            textwrap.fill(intro, width()),
            *(line for full in listed for line in _entry(full, shown(values[full]))),
        ]
    )


def _entry(name: str, value: str) -> Iterator[str]:
    setting = SETTINGS[name]
    yield ""
    yield from textwrap.wrap(f"--{name} {metavar(setting.kind)}", width(), subsequent_indent="  ")
    rule = f" {setting.rule[0].upper()}{setting.rule[1:]}." if setting.rule else ""
    text = f"{help_of(name)}{rule} (default: {value})"
    yield from textwrap.wrap(text, width(), initial_indent="    ", subsequent_indent="    ")


def metavar(kind: Any) -> str:
    """What stands for the value of a setting: INT, TEXT ..., {off,r2,r3}."""
    if get_origin(kind) is tuple:
        return f"{metavar(get_args(kind)[0])} ..."
    if kind in _NAMES:
        return _NAMES[kind]
    return "{" + ",".join(map(str, get_args(kind))) + "}"
