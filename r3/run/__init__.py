"""One run: its start, its folder, its checkpoints, its watchdog."""
