"""Let all gloo process groups of a rank share one thread."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist


def share_gloo_thread() -> None:
    """Let all gloo groups that torch makes from now on use the device of the first one.

    Torch creates a device for each group: a thread that wakes a hundred times per second, even if
    its group is never used. Megatron-Core and vLLM make more than 30 groups per rank, and their
    threads interrupt what a processor computes thousands of times per second. A gloo device can
    serve many groups: each group keeps its own connections and its own time limit. Groups that are
    made with explicit gloo options keep the devices of those options.

    Source: torch/distributed/distributed_c10d.py (`_new_process_group_helper`), which passes gloo
    a time limit and no options.
    """
    plain = dist.ProcessGroupGloo.__init__
    if getattr(plain, "__module__", "") == __name__:
        return
    first: dict[int, Any] = {}  # by process: a device does not survive a fork

    def init(
        self: Any,
        store: Any,
        rank: int,
        size: int,
        timeout: Any = timedelta(minutes=30),
        **more: Any,  # of torch 2.14
    ) -> None:
        if not isinstance(timeout, timedelta):  # explicit gloo options
            plain(self, store, rank, size, timeout, **more)
        elif os.getpid() not in first:
            plain(self, store, rank, size, timeout=timeout, **more)
            first[os.getpid()] = self.options
        else:
            made = first[os.getpid()]
            shared = type(made)()
            shared._devices = made._devices  # several, if GLOO_SOCKET_IFNAME has several
            shared._threads = made._threads
            shared._timeout = timeout
            plain(self, store, rank, size, shared, **more)

    # The class itself stays: torch tests with isinstance what a group consists of.
    dist.ProcessGroupGloo.__init__ = init
