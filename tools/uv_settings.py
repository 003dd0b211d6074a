"""Print pip's settings that say where packages are as variables for uv.

    python -m pip config list | python tools/uv_settings.py

uv reads no settings of pip.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable

_NAMES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "no-index": "UV_NO_INDEX",
    "cert": "SSL_CERT_FILE",
    "trusted-host": "UV_INSECURE_HOST",
}
# Of two settings of one name, pip takes the one of the section that is first here.
_SECTIONS = (":env:", "install", "global")


def variables(lines: Iterable[str]) -> list[str]:
    """Return NAME=VALUE for each setting.

    Args:
        lines: of `pip config list`, SECTION.NAME='VALUE'.
    """
    declared: dict[tuple[str, str], list[str]] = {}
    for line in lines:
        name, _, value = line.strip().partition("=")
        section, _, name = name.rpartition(".")
        declared[section, name] = ast.literal_eval(value).split()
    settings = []
    for name, of_uv in _NAMES.items():
        values = next((declared[s, name] for s in _SECTIONS if declared.get((s, name))), None)
        if values:
            settings.append(f"{of_uv}={(',' if name == 'find-links' else ' ').join(values)}")
    return settings


if __name__ == "__main__":
    print("\n".join(variables(sys.stdin)))
