"""Devices, process groups and worker processes: the machine that a run uses."""
