"""Faults made on purpose in real runs, and what becomes of the runs: `python -m tests.faults`."""
