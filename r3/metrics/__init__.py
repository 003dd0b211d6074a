"""Metrics: their meaning, their reduction over ranks, and where they are shown."""

from typing import Any


def __getattr__(name: str) -> Any:
    """Names of its modules, imported when asked for: help and refusals do without numpy."""
    import r3.metrics.glossary as glossary
    import r3.metrics.meter as meter
    import r3.metrics.reduce as reduce

    for module in (glossary, meter, reduce):
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
