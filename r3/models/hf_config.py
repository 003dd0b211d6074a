"""Read config.json with checks; errors name the key that is absent, invalid or not supported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import inf, log
from typing import Any, Literal

from r3.errors import Fault


class ShapeError(Fault):
    """A model's files do not describe a model that R3 can train, or do not fit together."""


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are slowed down for a context longer than that of pre-training.

    The formulas are in `r3.layers.norms`. A wavelength is classified by how often it fits into the
    original context.

    Attributes:
        kind: `llama3` (Llama 3.1) or `yarn` (arXiv 2309.00071).
        factor: the frequencies of long wavelengths are divided by it.
        original: context length of pre-training, in tokens.
        fast: wavelengths that fit at least this many times are unchanged.
        slow: wavelengths that fit at most this many times are slowed by the whole factor.
        truncate: YaRN: round the borders between the ranges to whole dimensions.
        attention_factor: YaRN: multiplies cosine and sine.
        mscale_all_dim: DeepSeek: temperature of the whole attention score, see `yarn_mscale`.
    """

    kind: Literal["llama3", "yarn"]
    factor: float
    original: int
    fast: float
    slow: float
    truncate: bool = True
    attention_factor: float = 1.0
    mscale_all_dim: float = 0.0


# Kinds of a key's value, and of its items if it is a list.
_KINDS: dict[str, tuple[tuple[type, ...], type | None]] = {
    "architectures": ((list,), str),
    "bos_token_id": ((int, list), int),
    "eos_token_id": ((int, list), int),
    "layer_types": ((list,), str),
    "mlp_only_layers": ((list,), int),
    "pad_token_id": ((int,), None),
    "rms_norm_eps": ((int, float), None),
    "rope_parameters": ((dict,), None),
    "rope_scaling": ((dict,), None),
    "rope_theta": ((int, float), None),
    "tie_word_embeddings": ((bool,), None),
}


def require_kinds(values: Mapping[str, Any]) -> None:
    """Raise ShapeError if a key of config.json holds another kind of value than it must.

    Null counts as absent.
    """
    for name, (kinds, of_items) in _KINDS.items():
        value = values.get(name)
        items = value if isinstance(value, list) else []
        fits = isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))
        if value is not None and not (fits and all(type(item) is of_items for item in items)):
            allowed = " or ".join(kind.__name__ for kind in kinds)
            of = f" of {of_items.__name__}" if of_items else ""
            raise ShapeError(f"key {name} must be {allowed}{of}, got {str(value)[:80]!r}")


_ALIASES = (
    ("num_experts", "num_local_experts", "n_routed_experts"),
    ("rope_parameters", "rope_scaling"),
)


def require_agreement(values: Mapping[str, Any]) -> None:
    """Raise ShapeError if two names of one thing have different values: readers would differ.

    Null counts as absent. Sections agree if their common keys do.
    """
    for names in _ALIASES:
        present = [(name, values[name]) for name in names if values.get(name) is not None]
        for (name, value), (other, theirs) in pairwise(present):
            if isinstance(value, dict) and isinstance(theirs, dict):
                _require_same(name, value, other, theirs)
            elif value != theirs:
                raise ShapeError(
                    f"{name} {value!r} contradicts {other} {theirs!r}: keep one of them"
                )
    for name in ("rope_parameters", "rope_scaling"):
        section = values.get(name)
        if isinstance(section, dict):
            keys = ("rope_theta", "partial_rotary_factor")
            _require_same(name, section, "config.json", {key: values.get(key) for key in keys})
            _require_same(name, section, name, {"rope_type": section.get("type")})


def _require_same(
    name: str, section: Mapping[str, Any], other: str, theirs: Mapping[str, Any]
) -> None:
    for key, value in section.items():
        if value is not None and theirs.get(key) is not None and value != theirs[key]:
            raise ShapeError(
                f"{key} {value!r} in {name} contradicts {theirs[key]!r} in {other}: keep one"
            )


def require_tokens(values: Mapping[str, Any], vocab_size: int) -> None:
    """Raise ShapeError if a special token is not a row of the embedding. A pad token may be -1."""
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = values.get(name)
        for token in value if isinstance(value, list) else [value]:
            least = -1 if name == "pad_token_id" else 0
            if token is not None and not least <= token < vocab_size:
                raise ShapeError(
                    f"{name} {token} is no token of the model: vocab_size is {vocab_size}"
                )


class HfConfig:
    """The contents of a config.json.

    Attributes:
        values: the parsed JSON object.
        faults: keys that are missing, invalid or not supported, one text each. Reading goes on
            after a fault, so that one message names all of them.
    """

    def __init__(self, values: Mapping[str, Any], faults: list[str] | None = None) -> None:
        self.values = values
        self.faults: list[str] = [] if faults is None else faults

    def _add(self, fault: str) -> None:
        if fault not in self.faults:
            self.faults.append(fault)

    def number(self, *names: str, default: int | None = None, least: int = 1) -> int:
        """Return the integer under the first of `names` that is present.

        With a default, null counts as absent. After a fault, the number is 1.
        """
        present = [self.values[name] for name in names if name in self.values]
        value = present[0] if present else None
        if value is None and default is not None:
            return default
        if type(value) is not int or value < least:
            kind = "a positive integer" if least == 1 else f"an integer of at least {least}"
            self._add(f"key {' or '.join(names)} must be {kind}, got {value!r}")
            return 1
        return value

    def real(self, name: str, default: float | None = None) -> float:
        """Return a finite number above 0. With a default, null and 0 count as absent.

        After a fault, the number is 1.
        """
        value = self.values.get(name)
        if (value is None or value == 0) and default is not None:
            return default
        if not isinstance(value, int | float) or value is True or not 0 < value < inf:
            self._add(f"key {name} must be a positive number, got {value!r}")
            return 1.0
        return float(value)

    def refuse(self, *names: str) -> None:
        """It is a fault if one of these keys is set."""
        for name in names:
            if self.values.get(name):
                self._add(f"{name} is not supported yet")

    def only(self, name: str, *values: object) -> None:
        """It is a fault if the key is given and has another value."""
        value = self.values.get(name)
        if value is not None and value not in values:
            known = " or ".join(map(repr, values))
            self._add(f"{name} {value!r} is not supported, only {known} is")

    @property
    def rope(self) -> HfConfig:
        """The section `rope_parameters`, which older files call `rope_scaling`."""
        rope = self.values.get("rope_parameters") or self.values.get("rope_scaling") or {}
        if any(isinstance(value, Mapping) for value in rope.values()):
            raise ShapeError(
                "rope_parameters that differ between kinds of layers are not supported"
            )
        return HfConfig(rope, self.faults)

    def rope_scaling(self) -> RopeScaling | None:
        """Return the frequency scaling of a long context; None without one."""
        rope, context = self.rope, self.number("max_position_embeddings")
        kind = rope.values.get("rope_type", rope.values.get("type", "default"))
        if kind == "default":
            return None
        if kind not in ("llama3", "yarn"):
            raise ShapeError(
                f"rope_type {kind!r} is not supported, only default, llama3 and yarn are"
            )
        factor, original = rope.real("factor"), rope.number("original_max_position_embeddings")
        if kind == "llama3":
            fast, slow = rope.real("high_freq_factor"), rope.real("low_freq_factor")
            if not slow < fast:
                raise ShapeError(f"low_freq_factor {slow} must be below high_freq_factor {fast}")
            return RopeScaling(
                kind="llama3", factor=factor, original=original, fast=fast, slow=slow
            )
        if factor * original < context:
            raise ShapeError(
                f"factor {factor} * original_max_position_embeddings {original} is less than "
                f"max_position_embeddings {context}: "
                "the engine has no rotations for the last positions"
            )
        mscale = rope.real("mscale", default=0.0)
        mscale_all_dim = rope.real("mscale_all_dim", default=0.0)
        if mscale and mscale_all_dim:
            usual = yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)
        else:
            usual = yarn_mscale(factor, 1.0)
        return RopeScaling(
            kind="yarn",
            factor=factor,
            original=original,
            fast=rope.real("beta_fast", default=32.0),
            slow=rope.real("beta_slow", default=1.0),
            truncate=bool(rope.values.get("truncate", True)),
            attention_factor=rope.real("attention_factor", default=usual),
            mscale_all_dim=mscale_all_dim,
        )


def yarn_mscale(factor: float, weight: float) -> float:
    """Return 0.1 weight ln(factor) + 1, YaRN's attention temperature (arXiv 2309.00071, eq. 22)."""
    return 0.1 * weight * log(factor) + 1.0 if factor > 1 else 1.0
