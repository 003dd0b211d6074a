"""Counts what some work allocates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def peak_bytes(work: Callable[[], Any]) -> int:
    """Most bytes that `work` had allocated at one time, beyond what was there before: torch's own
    record of allocations.
    """
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        work()
    assert profile.profiler is not None
    events: Sequence[Any] = profile.profiler.kineto_results.events()
    live = peak = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak
