"""Beside a run: its header and last line, what it needs of a machine, a step's trace, a watcher."""

from r3 import names_of

__getattr__ = names_of(__name__, surroundings="Surroundings")
