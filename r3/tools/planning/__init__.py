"""Plan a run: memory per device, seconds per step, layout search, and whether it fits."""
