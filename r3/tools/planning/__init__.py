"""Plan a run: memory per device, layout search, and whether it fits."""
