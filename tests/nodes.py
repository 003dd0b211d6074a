"""Two machines inside this one: each has its own network, host name and /dev/shm."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from r3.runtime.device import has_gpu
from tests.faults.attempts import Attempt, launch
from tests.warm import PLACE

_ADDRESS = "10.77.0.{}"
_PORT = 29500  # free: each node has ports of its own
_BE = (
    'mount -t tmpfs -o size=1g,mode=1777 tmpfs /dev/shm && mount --bind "$1" /etc/hosts && '
    'hostname "$2" && echo up && exec sleep infinity'
)


def no_nodes() -> str:
    """Why this machine cannot have two nodes; "" if it can."""
    if has_gpu():
        return "programs of nodes are forked, and CUDA does not survive a fork"
    if not all(map(shutil.which, ("ip", "unshare"))):
        return "ip and unshare are not installed (Debian: iproute2, util-linux)"
    name = f"r3t{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return "this user may not make network namespaces" if tried.returncode else ""


class Nodes:
    """Two nodes, joined by one cable."""

    def __init__(self, folder: Path) -> None:
        self._names = [f"r3t{os.getpid()}n{number}" for number in (0, 1)]
        self._hosts = folder / "hosts"
        self._first: list[subprocess.Popen[str]] = []  # process of each node

    def up(self) -> None:
        """Make the namespaces and the link between them, and a process in each."""
        lines = [f"{_ADDRESS.format(number + 1)} node{number}" for number in (0, 1)]
        self._hosts.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        for name in self._names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        first, second = self._names
        _ip("-n", first, "link", "add", "eth0", "type", "veth", "peer", "eth0", "netns", second)
        for number, name in enumerate(self._names):
            _ip("-n", name, "addr", "add", f"{_ADDRESS.format(number + 1)}/24", "dev", "eth0")
        self.link("up")
        for number, name in enumerate(self._names):
            enter = ("ip", "netns", "exec", name, "unshare", "--uts", "--mount")
            shell = ("--propagation", "private", "sh", "-c", _BE, "sh")
            command = [*enter, *shell, str(self._hosts), f"node{number}"]
            first = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            self._first.append(first)
            assert first.stdout is not None
            assert first.stdout.readline() == "up\n", f"{command} has ended"

    def down(self) -> None:
        """End those processes and remove the namespaces."""
        for first in self._first:
            first.kill()
            first.communicate()
        for name in self._names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def link(self, state: str) -> None:
        """Plug the cable in ("up") or pull it out ("down")."""
        for name in self._names if state == "up" else self._names[:1]:
            _ip("-n", name, "link", "set", "eth0", state)

    def launch(
        self, folder: Path, *flags: str, ranks: int = 1, program: tuple[str, ...] = ("train.py",)
    ) -> list[Attempt]:
        """Start a run with so many ranks on each node, or another program with its settings."""
        nodes = ("--nnodes", "2", "--nproc_per_node", str(ranks))
        address = ("--master_addr", _ADDRESS.format(1), "--master_port", str(_PORT))
        return [
            launch(
                folder,
                *flags,
                prefix=("env", "GLOO_SOCKET_IFNAME=eth0", f"{PLACE}={first.pid}:net,uts,mnt"),
                ranks=(*nodes, "--node_rank", str(number), *address),
                program=program,
                is_warm=True,
            )
            for number, first in enumerate(self._first)
        ]


@contextmanager
def two_nodes(folder: Path) -> Iterator[Nodes]:
    """Two nodes that see the same files."""
    nodes = Nodes(folder)
    try:
        nodes.up()
        yield nodes
    finally:
        nodes.down()


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, timeout=30)
