"""Numbers as models and data sets write them: Markdown, full width, spaces in thousands, powers."""

from __future__ import annotations

import re
from decimal import Decimal

# Other minus signs, and the full-width forms of ASCII of Chinese and Japanese texts.
_ASCII = str.maketrans(
    {"\u2212": "-", "\ufe63": "-", "\u3000": " ", "\u3002": "."}
    | {chr(code): chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)}
)
# Emphasis and code of Markdown; a star beside a number is a product. Bounded, for long lines.
_MARKED = re.compile(
    r"(?<![\w)}\]*`])(\*{1,3}|__|`{1,3})(?![\s*`])([^\n]{1,200}?)(?<![\s*`])\1(?![\w({\[*`])"
)
_CURRENCY = re.compile(r"(?:\\\$|[\u20ac\u00a3\u00a5\u20b9])(?=[ -]?[0-9])")
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SCALED = re.compile(
    r"(?<![\w.,])([0-9][0-9,]*(?:\.[0-9]+)?)(?:[ ~]|\\[ ,])*(\\text\{)?[ ]*"
    rf"({'|'.join(_SCALES)})s?(?![\w])"
)
# Spaces and commas that LaTeX and typography put between groups of three digits. `10,\,200` are two
# numbers.
_GAP = r"(?:,?\\!|\\[,;: ]|~|\{,\}|[\u00a0\u2009\u202f])"
_GROUPED = re.compile(rf"(?<![\w.])[0-9]{{1,3}}(?:{_GAP}[0-9]{{3}})+(?![0-9])")

_ANNOUNCED = re.compile(r"####([^\n#]+)")
# Possessive quantifiers: a number that runs into a letter or a fraction does not match with its
# first digits. Nor does one that a formula or a list goes on from: `7 * 6`, `7 1/2`, `7:30`, `7,5`.
_NUMBER = re.compile(
    r"""(?: [\s*_`("'\[] | \\[(\[] | \\boxed\{ | \\?\$(?=[\\-]|\\?\$) | \\(?=\$) )*
        ( (?: [-+]?\$? | \$[-+] )
          (?: (?: [0-9]{1,3}(?:[ ][0-9]{3})+(?![0-9])
                | [0-9]{1,3}(?:,[0-9]{2,3})*,[0-9]{3}(?![0-9])
                | [0-9]++ ) (?:\.[0-9]++)?+
            | \.[0-9]++ )
          (?: [eE][-+]?[0-9]{1,3}+ )?+ )
        (?![\w/])
        (?! [*_`"')\]}]* \s*
            (?: [-+*/^=:,.\u00d7\u00f7]+ | \\(?:times|cdot|div) | or | and | to | x )?
            \s* \\?\$?[0-9] )""",
    re.VERBOSE,
)


def plain(text: str) -> str:
    """Write numbers in ASCII digits, with `-`, without gaps between groups of three digits.

    `1\\,000`, `1{,}000`, `1 000` with a thin or fixed space, `**1000**` and `1 thousand` become
    `1000`.
    """
    text = _MARKED.sub(r"\2", text.translate(_ASCII))
    text = _GROUPED.sub(lambda match: re.sub(_GAP, "", match[0]), text)
    return _SCALED.sub(_scaled, _CURRENCY.sub("", text))


def final_number(text: str) -> Decimal | None:
    """Return the number after the last `####` that has one, by value; None without any.

    `#### 1,234.50`, `#### $1234.5`, `#### **1234.5**` and `#### 1.2345e3` are the same. A line that
    goes on as a formula (`#### 7 * 6 = 42`) or with a second number has none.
    """
    matches = [_NUMBER.match(line) for line in _ANNOUNCED.findall(plain(text))]
    numbers = [re.sub(r"[,$ ]", "", match[1]) for match in matches if match]
    return Decimal(numbers[-1]) if numbers else None


def _scaled(match: re.Match[str]) -> str:
    number = Decimal(match[1].replace(",", "")).scaleb(_SCALES[match[3]])
    return f"{number:f}{match[2] or ''}"
