"""Devices, process groups and worker processes: the machine that a run uses."""

from r3 import names_of

__getattr__ = names_of(
    __name__,
    kernel_switch="KERNELS VARIABLE chosen is_on",
    limits="host_gib host_processors openmp_threads",
    process="die_with_parent importing",
    tensors="SideStream Stash ipc_arguments to_host",
    terminal="open_missing say visible",
)
