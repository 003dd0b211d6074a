"""Metrics: their meaning, their reduction over ranks, and where they are shown."""

from r3.metrics.glossary import GLOSSARY, UnknownMetricError, explain, headlines, is_wall_clock
from r3.metrics.meter import Meter, TrackerError, Writer, merged_parts
from r3.metrics.reduce import (
    LOG10_EDGES,
    DeadExperts,
    EffectiveSampleSize,
    LoadEntropy,
    LoadMax,
    LogHistogram,
    Max,
    Mean,
    Partial,
    PerLayer,
    Quantile,
    Sum,
    UsersMean,
    mismatch,
    shadow,
)
