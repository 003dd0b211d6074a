"""Run chat templates safely: they are programs that may fail in any way, or never end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from r3.user_code.time_limit import time_limit

_LIMIT_S = 20.0  # of one rendering, which takes milliseconds
_FAULTS = (
    *(TemplateError, ArithmeticError, AssertionError, AttributeError, LookupError),
    *(MemoryError, NotImplementedError, RecursionError, TypeError, ValueError),
)


class TemplateFault(ValueError):
    """A chat template does not render a conversation; the message says why."""


class EndlessTemplate(TemplateFault):
    """A chat template that takes far too long."""


def apply_template(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
    *,
    limit_s: float = _LIMIT_S,
    **options: Any,
) -> Any:
    """Return what `tokenizer.apply_chat_template` returns for these messages and options.

    Args:
        messages: a conversation, or several, each a list.
        limit_s: seconds for all of them.

    Raises:
        TemplateFault: the template refuses the messages or fails.
        EndlessTemplate: it takes longer than `limit_s`.
    """
    late = EndlessTemplate(f"it was not rendered after {limit_s:g} s")
    try:
        return time_limit(
            lambda: tokenizer.apply_chat_template(list(messages), **options), limit_s, lambda: late
        )
    except TemplateFault:
        raise
    except TemplateError as error:  # the template's own words
        raise TemplateFault(f"{error}") from error
    except _FAULTS as error:
        raise TemplateFault(f"{type(error).__name__}: {str(error)[:200]}") from error
