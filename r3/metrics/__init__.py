"""Metrics: their meaning, their reduction over ranks, and where they are shown."""
