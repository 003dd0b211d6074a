"""Beside a run: its header and last line, what it needs of a machine, a step's trace, a watcher."""
