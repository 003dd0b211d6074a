"""How runs are started: from Python, by launch/local.sh, under Slurm."""

from r3 import names_of

__getattr__ = names_of(__name__, api="from_python")
