"""Numbers as models and data sets write them: other minus signs, spaces in thousands, powers."""

from __future__ import annotations

import re
from decimal import Decimal

_MINUS = str.maketrans({"\u2212": "-", "\ufe63": "-", "\uff0d": "-"})
# Spaces and commas that LaTeX and typography put between groups of three digits. `10,\,200` are two
# numbers.
_GAP = r"(?:,?\\!|\\[,;: ]|~|\{,\}|[\u00a0\u2009\u202f])"
_GROUPED = re.compile(rf"(?<![\w.])[0-9]{{1,3}}(?:{_GAP}[0-9]{{3}})+(?![0-9])")

# Possessive quantifiers: a number that runs into a letter or a fraction does not match with its
# first digits.
_FINAL_NUMBER = re.compile(
    r"""[#]{4}[ \t]*
        ( (?: [-+]?\$? | \$[-+] )
          (?: [0-9][0-9,]*+ (?:\.[0-9]++)?+ | \.[0-9]++ )
          (?: [eE][-+]?[0-9]{1,3}+ )?+ )
        (?![\w/])""",
    re.VERBOSE,
)


def plain(text: str) -> str:
    """Write minus signs as `-`, and groups of three digits without the gaps between them.

    `1\\,000`, `1{,}000` and `1 000` with a thin or fixed space become `1000`.
    """
    return _GROUPED.sub(lambda found: re.sub(_GAP, "", found[0]), text.translate(_MINUS))


def final_number(text: str) -> Decimal | None:
    """Return the number after the last `####` that has one, by value; None without any.

    `#### 1,234.50`, `#### $1234.5`, `####1234.5` and `#### 1.2345e3` are the same.
    """
    found = _FINAL_NUMBER.findall(plain(text))
    return Decimal(found[-1].replace(",", "").replace("$", "")) if found else None
