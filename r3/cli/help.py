"""The help of the command line, from the dataclasses of `r3.config`."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Collection, Mapping
from dataclasses import asdict, fields
from typing import Any, get_args, get_origin, get_type_hints

from r3.config import SETTINGS, Config, shown
from r3.configs import PRESETS
from r3.metrics.console import COLUMNS, LEFT
from r3.models.families import FAMILIES, PROOFS

USAGE = """\
usage: train.py BASE [--section.field value ...]   start or resume a run
       train.py --from RUN_DIR [--section.field value ...]
                                                   resume that run, or vary it
       train.py BASE --dry-run [--world-size N]    print differences, layout,
                                                   batch, memory; run nothing
       train.py BASE --dry-run --device-gib 80     does it fit such GPUs
       train.py BASE --plan-for 8x80               settings that fit 8 such GPUs
       train.py BASE --check [--world-size N]      check settings, data, reward;
                    [--device-gib 80] [--host-gib 512]  and whether it can fit
       train.py BASE --help [SECTION ...]          list every setting, or some
       train.py --help columns                     what its columns mean
       train.py --models                           model families, and what is
                                                   tested for each
"""
_ABOUT = (
    "BASE is a preset, a YAML file with differences from a preset, or my_presets.py:function.",
    "Start several ranks with torchrun --nproc_per_node N, or with launch/local.sh.",
)
SECTIONS = tuple(each.name for each in fields(Config))
TOPICS = (*SECTIONS, "columns")
"""Words that --help takes."""
_COLUMNS = {each.title: each.meaning for each in COLUMNS}
_NAMES = {str: "TEXT", int: "INT", float: "NUMBER", bool: "true|false"}


def overview() -> str:
    """The help for which no preset is needed: usage, presets and sections."""
    presets = {name: build.__doc__ or "" for name, build in PRESETS.items()}
    hints = get_type_hints(Config)
    sections = {each.name: hints[each.name].__doc__ or "" for each in fields(Config)}
    about = [textwrap.fill(text, width()) for text in _ABOUT]
    presets_and_sections = ["presets", *_list(presets), "", "sections", *_list(sections)]
    return "\n".join([USAGE, *about, "", *presets_and_sections])


def models() -> str:
    """The known architectures of config.json, their models, and what is tested for them."""
    rows = [
        textwrap.fill(
            f"{family.models} ({', '.join(family.proved)})",
            width(),
            initial_indent=f"  {name:24s}",
            subsequent_indent=" " * 26,
        )
        for name, family in FAMILIES.items()
    ]
    return "\n".join(["architectures", *rows, "", "what is tested", *_list(PROOFS)])


def _list(entries: Mapping[str, str]) -> list[str]:
    return [
        textwrap.fill(
            text.splitlines()[0],
            width(),
            initial_indent=f"  {name:22s}",
            subsequent_indent=" " * 24,
        )
        for name, text in entries.items()
    ]


def width() -> int:
    """Columns of the terminal, within reason."""
    return max(60, min(120, shutil.get_terminal_size().columns))


def columns() -> str:
    """What the columns of the console mean."""
    return "\n".join(["columns of the console", *_list({**_COLUMNS, LEFT[0]: LEFT[1]})])


def settings(name: str, config: Config, sections: Collection[str] = ()) -> str:
    """Every setting with its meaning, its rule and its value in `config`.

    Args:
        name: of the base; "" without one.
        sections: those of these sections only.
    """
    what = f"Settings of {', '.join(sections)}" if sections else "Every setting"
    lines = [f"{what}. Defaults are those of {name or 'an empty preset'}."]
    for section, values in asdict(config).items():
        if section in sections or not sections:
            about = (type(getattr(config, section)).__doc__ or "").splitlines()[0]
            lines += ["", textwrap.fill(f"{section}: {about}", width())]
            for field, value in values.items():
                setting = SETTINGS[f"{section}.{field}"]
                words = str(setting.rule or "")
                rule = f" {words[0].upper()}{words[1:]}." if words else ""
                text = f"{setting.help}{rule} (default: {shown(value)})"
                lines.append(_indented(f"--{setting.name} {metavar(setting.kind)}", 2))
                lines.append(_indented(text, 6))
    return "\n".join(lines)


def _indented(text: str, columns: int) -> str:
    indent = " " * columns
    return textwrap.fill(
        text, width(), initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )


def metavar(kind: Any) -> str:
    """What stands for the value of a setting: INT, TEXT ..., {off, r2, r3}."""
    if get_origin(kind) is tuple:
        return f"{metavar(get_args(kind)[0])} ..."
    return _NAMES.get(kind) or f"{{{', '.join(map(str, get_args(kind)))}}}"
