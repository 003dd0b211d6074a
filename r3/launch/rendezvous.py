"""Rendezvous of the launchers, also where the host name that torchrun uses does not resolve."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from r3.runtime.process import addresses

_PATIENCE_S = 8.0  # machines that start together meet within a second
_CONNECT_S = 2.0
_LOOPBACK = "127.0.0.1"


def addressed(args: Any) -> list[str]:
    """Flags of torchrun that give addresses where it would take the name of this machine.

    On one machine, ranks need no name. Otherwise rank 0 would tell the others to find it by a name
    that they may not know, and they would wait for half an hour.

    Args:
        args: torchrun's, parsed.

    Raises:
        ValueError: the name of the rendezvous does not resolve.
    """
    if args.standalone or args.nnodes in ("1", "1:1"):
        return [] if args.local_addr else ["--local_addr", _LOOPBACK]
    if args.rdzv_backend != "c10d":
        return []  # --master_addr says all
    host, port = endpoint(args)
    if not addresses(host):
        raise ValueError(
            f"{host} of --rdzv_endpoint does not resolve on {socket.gethostname()}. Give the "
            "address of the first machine as a number, or correct /etc/hosts or DNS"
        )
    flags: list[str] = []
    own = _own_address(host, port)
    # A loopback address is of no use to others: then the name is the better guess, if it is one.
    if own and not args.local_addr and not (own.startswith("127.") and _is_known()):
        flags += ["--local_addr", own]
    if not args.rdzv_conf and is_here(host) != _torchrun_is_here(host):
        flags += ["--rdzv_conf", f"is_host={int(is_here(host))}"]
    return flags


def _is_known() -> bool:
    return bool(addresses(socket.gethostname()))


def _torchrun_is_here(host: str) -> bool | None:
    """As torchrun sees it: several machines may have one name. None: it would raise an error."""
    from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname

    return _matches_machine_hostname(host) if _is_known() else None


def endpoint(args: Any) -> tuple[str, int]:
    """Host and port of the rendezvous."""
    host, _, port = args.rdzv_endpoint.rpartition(":")
    return (host.strip("[]"), int(port)) if host and port.isdecimal() else (args.rdzv_endpoint, 0)


def is_here(host: str) -> bool:
    """Whether an address of the host belongs to this machine."""
    return any(_binds(address, 0) for address in addresses(host))


def _binds(address: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True


def _own_address(host: str, port: int) -> str:
    """The address of this machine on the way to the host; "" if there is no way."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing
        try:
            probe.connect((host, port or 1))
        except OSError:  # also if the host has an address of version 6 only
            return ""
        return str(probe.getsockname()[0])


def children(parent: int) -> list[int]:
    """The processes that a process has started and that have not ended."""
    import psutil

    try:
        return [child.pid for child in psutil.Process(parent).children()]
    except psutil.NoSuchProcess:
        return []


@contextmanager
def impatient(args: Any, say: Callable[[str], None]) -> Iterator[None]:
    """Say what is waited for, if launchers of several machines have not met soon after the start.

    Args:
        args: torchrun's, parsed.
        say: writes a line.
    """
    if args.standalone or args.rdzv_backend != "c10d":
        yield
        return
    host, port = endpoint(args)
    if port and is_here(host) and not _binds(host, port):
        say(
            f"r3: port {port} of this machine is taken. If that is not another launcher of this "
            "run, end this one and give --rdzv_endpoint a free port"
        )
    before = set(children(os.getpid()))

    def waits() -> None:
        if before.issuperset(children(os.getpid())):  # ranks start when the launchers have met
            say(_waits_for(host, port, args.nnodes))

    timer = threading.Timer(_PATIENCE_S, waits)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _waits_for(host: str, port: int, nodes: str) -> str:
    """What a launcher says that has waited for the others."""
    here = f"r3: waiting for the launchers of {nodes} machines at {host}:{port}"
    try:
        socket.create_connection((host, port), timeout=_CONNECT_S).close()
    except TimeoutError:
        return f"{here}, which does not answer: does a firewall block the port?"
    except OSError as error:
        return f"{here}: {error.strerror or error}. Does the launcher run on {host}?"
    return f"{here}: not all have come. Do they run, with this endpoint and --rdzv_id?"
