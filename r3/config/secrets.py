"""Secrets in settings: found by the names they have and by their forms, and hidden.

Every place that writes or sends settings takes them from here: trackers, config.yaml, the header
of a run, errors. A run is given its secrets by its command, its file or, best, by variables of the
environment that the user's code reads.
"""

from __future__ import annotations

import re
from typing import Any

HIDDEN = "[hidden]"

# Words before "key" that make it a secret, and words before "token" that make it none.
_BEFORE_KEY = re.compile(
    "api|app|access|account|admin|anthropic|auth|azure|client|deploy|encryption|gemini|google|hf|"
    "hub|license|master|openai|openrouter|private|secret|server|service|shared|sharedaccess|"
    "signing|ssh|storage|subscription|wandb"
)
_BEFORE_TOKEN = re.compile(
    "answer|assistant|audio|begin|bos|break|call|cls|content|control|end|eod|eom|eos|eot|eow|"
    "extra|fill|first|function|generated|image|input|join|last|len|mask|max|mean|min|new|next|no|"
    "num|number|observation|output|pad|padding|per|prefix|prev|reasoning|response|role|sep|"
    "separator|special|split|start|stop|string|suffix|system|task|think|thinking|tool|total|turn|"
    "unk|user|video|vision|word"
)
_PASSWORD = re.compile(r"(password|passwd|passphrase|pwd|secret|credentials?|apikey|authtoken)s?$")
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_HARMLESS = re.compile(
    r"(?i)|none|null|true|false|empty|basic|bearer|digest|negotiate|ntlm|oauth2?|yes|no|on|off|auto"
    r"|\$\{?\w+\}?|<[^>]*>|\{\w*\}|\[hidden\]|\*+"
)
_PATH_OR_NUMBER = re.compile(
    r"[-+]?\d+(\.\d+)?|(~|\.{1,2})?(/[\w.@-]+)+/?|\w[\w.-]*\.(json|pem|txt|env)"
)

_FORMS = re.compile(
    r"""(?x)
    \b(?: (?:sk|rk|xai|nvapi|pplx)[-_](?=[\w-]*\d)[\w-]{16,}  # OpenAI, Anthropic, Stripe, NVIDIA
    | (?:hf|gsk|r8|npm|fw|tgp_v1|dop_v1)_\w{16,}
    | gh[opusr]_[A-Za-z0-9]{16,} | github_pat_\w{16,} | glpat-[\w-]{16,}
    | xox[abprs]-[\w-]{10,} | (?:AKIA|ASIA)[A-Z0-9]{16} | AIza[\w-]{30,} | ya29\.[\w-]{16,}
    | pypi-[\w-]{16,} | dapi[0-9a-f]{32}
    | eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]*  # a JSON web token
    )"""
)
_PRIVATE_KEY = re.compile(r"(?s)-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*-----|\Z)")
_IN_ADDRESS = re.compile(r"(://)([^\s/?#@'\"]*)@")
_SCHEME = re.compile(r"\b(Bearer|Basic)(\s+)([A-Za-z0-9._~+/=-]{8,})")
_HEADER = re.compile(
    r"(?i)\b((?:proxy-)?authorization|(?:set-)?cookie|[a-z]+(?:-[a-z]+)*-(?:key|token|secret))"
    r"(\s*:\s*)([^'\"\r\n,]+)"
)
# NAME=VALUE, "NAME": "VALUE", --NAME VALUE. A value in quotes ends with them.
_NAMED = re.compile(
    r"""(?x)
    (?P<name> [A-Za-z_][\w.-]* )
    (?P<sign> ['"]\s*:\s* | ['"]?=(?!=) )
    (?P<value> '[^']*' | "[^"]*" | (?:(?:Bearer|Basic|Token)\s+)?[^\s&;,#'"]+ )
    | (?<![\w-]) --? (?P<flag> [A-Za-z][\w.-]* ) (?P<space> \s+ )
    (?P<word> '[^']*' | "[^"]*" | [^\s'"-][^\s'"]* )"""
)
_IN_QUERY = ("key", "sig", "signature", "code")  # of an address, beside the names of secrets
_USER = re.compile(
    r"(?<!\S)(-u|--user|--proxy-user)([ =]+)(['\"]?)([^\s:'\"]*[^\s:'\"\d][^\s:'\"]*:[^\s'\"]+)"
)


def is_secret_name(name: str) -> bool:
    """Whether a setting, argument, variable, header or flag of this name holds a secret."""
    words = [word.lower() for word in _WORDS.findall(name.rpartition(".")[2])]
    if not words:
        return False
    *before, last = words
    if last in ("key", "keys"):
        return any(map(_BEFORE_KEY.fullmatch, before))
    if last == "token":
        return not any(map(_BEFORE_TOKEN.fullmatch, before))
    if last in ("auth", "authorization", "bearer"):
        return True
    if last == "pass":
        return not before or before[-1] in ("db", "user", "admin", "smtp", "http", "proxy", "my")
    return _PASSWORD.search(last) is not None


def _looks_random(text: str) -> bool:
    """Whether a text is made like a key: long, of letters and digits in turns."""
    turns = len(re.findall(r"[A-Za-z](?=\d)|\d(?=[A-Za-z])|[a-z](?=[A-Z])", text))
    return re.fullmatch(r"[\w+/=.~-]{20,}", text) is not None and turns >= 5


def _is_secret(name: str, value: str, *, in_query: bool = False) -> bool:
    plain = value.strip("'\"")
    if _HARMLESS.fullmatch(plain):
        return False
    last = name.rpartition(".")[2].lower()
    if last == "key" or (in_query and last in _IN_QUERY):
        return in_query or _looks_random(plain)
    if not is_secret_name(name):
        return False
    # A folder (PWD=/home/me), a file of credentials, a token's id.
    is_word = last == "pwd" or not last.endswith(("key", "pwd", "password", "passwd", "pass"))
    return not (is_word and _PATH_OR_NUMBER.fullmatch(plain))


def without_secrets(text: str) -> str:
    """A text with `[hidden]` in the place of each secret; all else stays as it is."""

    def named(found: re.Match[str]) -> str:
        name, value = found["name"] or found["flag"], found["value"] or found["word"]
        before = text_so_far[max(0, found.start() - 1000) : found.start()]
        in_query = before.endswith(("?", "&")) and "://" in before.split()[-1]
        if not _is_secret(name, value, in_query=in_query):
            return found[0]
        quote = value[0] if value[0] in "'\"" else ""
        head = found[0][: len(found[0]) - len(value)]
        return f"{head}{quote}{HIDDEN}{quote}"

    def header(found: re.Match[str]) -> str:
        is_named = is_secret_name(found[1]) or "-" not in found[1]
        is_named = is_named or found[1].lower().endswith(("authorization", "cookie"))
        hides = is_named and not _HARMLESS.fullmatch(found[3].strip())
        return f"{found[1]}{found[2]}{HIDDEN}" if hides else found[0]

    def address(found: re.Match[str]) -> str:
        user, colon, _ = found[2].partition(":")
        hides = colon or _looks_random(user)
        return f"{found[1]}{HIDDEN}@" if hides else found[0]

    text = _PRIVATE_KEY.sub(HIDDEN, text)
    text = _IN_ADDRESS.sub(address, text)
    text = _HEADER.sub(header, text)
    text_so_far = text
    text = _NAMED.sub(named, text)
    text = _SCHEME.sub(
        lambda m: f"{m[1]}{m[2]}{HIDDEN}" if re.search(r"\d|[a-z][A-Z]", m[3]) else m[0], text
    )
    text = _USER.sub(lambda m: f"{m[1]}{m[2]}{m[3]}{HIDDEN}", text)
    return _FORMS.sub(HIDDEN, text)


def public(value: Any) -> Any:
    """The value of a setting without secrets. key=value is hidden whole if its key names one."""
    if isinstance(value, tuple | list):
        return type(value)(public(each) for each in value)
    if not isinstance(value, str):
        return value
    key, equals, rest = value.partition("=")
    if equals and re.fullmatch(r"[\w.-]+", key) and _is_secret(key, rest):
        return f"{key}={HIDDEN}"
    return without_secrets(value)
