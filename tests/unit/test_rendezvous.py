"""Launchers on machines with names that do not resolve, taken ports and launchers that are late."""

import socket
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from r3.launch import rendezvous
from r3.launch.rendezvous import addressed, impatient, is_here
from r3.runtime.device import free_port
from tests.errors import Patch
from tests.runs import program

_RANK = """
import os
import torch.distributed as dist
dist.init_process_group("gloo")
print("joined at", os.environ["MASTER_ADDR"])
dist.destroy_process_group()
"""
_NOWHERE = "nowhere.invalid"  # RFC 2606: resolves nowhere


def words(**given: object) -> Namespace:
    plain = {"standalone": False, "nnodes": "2", "rdzv_backend": "c10d", "local_addr": None}
    return Namespace(**(plain | {"rdzv_conf": "", "rdzv_endpoint": "127.0.0.1:29500"} | given))


@pytest.mark.large
def test_a_machine_whose_name_does_not_resolve_runs_ranks(tmp_path: Path) -> None:
    enter = ("unshare", "--user", "--map-root-user", "--uts", "sh", "-c", 'hostname "$0" && "$@"')
    if subprocess.run([*enter, _NOWHERE, "true"], capture_output=True).returncode:
        pytest.skip("this system does not let a user change a host name")
    (tmp_path / "rank.py").write_text(_RANK)
    ranks = ("launch/ranks.py", "--standalone", "--nproc_per_node", "1", tmp_path / "rank.py")
    done = program(*enter, _NOWHERE, sys.executable, *ranks)
    assert "joined at 127.0.0.1\n" in done.stdout, done.stderr


def test_names_of_one_machine_are_not_needed() -> None:
    assert addressed(words(standalone=True)) == ["--local_addr", "127.0.0.1"]
    assert addressed(words(nnodes="1")) == ["--local_addr", "127.0.0.1"]
    assert addressed(words(standalone=True, local_addr="10.0.0.1")) == []
    assert addressed(words(rdzv_backend="static", rdzv_endpoint="")) == []


def test_a_rendezvous_that_does_not_resolve_is_named() -> None:
    with pytest.raises(ValueError, match=f"{_NOWHERE} of --rdzv_endpoint does not resolve on "):
        addressed(words(rdzv_endpoint=f"{_NOWHERE}:29500"))


def test_addresses_stand_for_a_name_of_this_machine_that_is_unknown(monkeypatch: Patch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    assert addressed(words()) == []
    monkeypatch.setattr(rendezvous, "_own_address", lambda *_: "10.0.0.7")  # its name may be known
    assert addressed(words()) == ["--local_addr", "10.0.0.7"]  # nowhere else
    monkeypatch.undo()
    # A machine with the name of the first one, which is another.
    monkeypatch.setattr(socket, "gethostname", lambda: "head")
    monkeypatch.setattr(rendezvous, "addresses", lambda host: ["192.0.2.1"])
    conf = ["--rdzv_conf", "is_host=0"]
    assert addressed(words(rdzv_endpoint="head:29500", local_addr="10.0.0.7")) == conf
    monkeypatch.undo()
    monkeypatch.setattr(socket, "gethostname", lambda: _NOWHERE)
    assert addressed(words()) == [
        *("--local_addr", "127.0.0.1"),
        *("--rdzv_conf", "is_host=1"),  # torchrun would compare names, and raise an error
    ]
    assert is_here("localhost") and not is_here("192.0.2.1")  # RFC 5737: of no machine


def test_a_wait_for_other_launchers_says_for_whom(monkeypatch: Patch) -> None:
    monkeypatch.setattr(rendezvous, "_PATIENCE_S", 0.01)

    def said(port: int) -> list[str]:
        lines: list[str] = []
        with impatient(words(rdzv_endpoint=f"127.0.0.1:{port}"), lines.append):
            for timer in rendezvous.threading.enumerate():
                if isinstance(timer, rendezvous.threading.Timer):
                    timer.join(5)
        return lines

    (line,) = said(port := free_port())
    assert line == (
        f"r3: waiting for the launchers of 2 machines at 127.0.0.1:{port}: Connection refused. "
        "Does the launcher run on 127.0.0.1?"
    )
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        first, second = said(taken := other.getsockname()[1])
    assert f"port {taken} of this machine is taken" in first and "free port" in first
    assert "not all have come" in second


def test_a_rank_that_exits_with_a_code_of_its_own_is_named(tmp_path: Path) -> None:
    """It prints nothing; its peers print that a connection was closed."""
    (tmp_path / "rank.py").write_text("import os\nos._exit(7 * int(os.environ['RANK']))\n")
    ranks = ("launch/ranks.py", "--standalone", "--nproc_per_node", "2", tmp_path / "rank.py")
    done = program(sys.executable, *ranks)
    assert done.returncode == 7 and "r3: rank 1 ended with exit code 7; did" in done.stderr
