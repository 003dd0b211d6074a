"""Users' code: load files, limit their time, run them while the engine samples."""

from r3 import names_of

__getattr__ = names_of(
    __name__,
    algorithm="AlgorithmError advantage_of bounds_of loss_of",
    calls="CallError CallTimeout",
    loading="forget_files load time_limit",
    workers="Done Here Place Pool Threads WorkerError",
)
