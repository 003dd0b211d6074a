"""What `make gpu-bundle` does to a CUDA library, and which versions it packs."""

import struct
import subprocess

import pytest

from tests.world import ROOT
from tools.gpu_bundle import FATBIN, LIMIT, MISSING, blank, locked


def entry(kind: int, architecture: int, code: bytes) -> bytes:
    """One entry of a container: kind, size of its head and of its code, architecture."""
    head = struct.pack("<HHIQ", kind, 0, 64, len(code)) + bytes(12)
    return head + struct.pack("<I", architecture) + bytes(64 - 32) + code


def library(*entries: bytes) -> bytearray:
    """An ELF file with the sections .text and .nv_fatbin, in which one container has entries."""
    inside = b"".join(entries)
    padding = bytes(8)  # containers begin at multiples of 8
    fatbin = padding + struct.pack("<IHHQ", FATBIN, 1, 16, len(inside)) + inside
    text = entry(1, 80, b"text")  # looks like one, and is no GPU code
    names = b"\0.text\0.nv_fatbin\0.names\0"
    parts = {".text": text, ".nv_fatbin": fatbin, ".names": names}
    at, heads, body = 64, b"", b""
    for name, content in parts.items():
        offset = names.index(name.encode() + b"\0")
        heads += struct.pack("<IIQQQQIIQQ", offset, 1, 0, 0, at, len(content), 0, 0, 0, 0)
        body, at = body + content, at + len(content)
    start = bytearray(64)
    struct.pack_into("<Q", start, 0x28, at)
    struct.pack_into("<HHH", start, 0x3A, 64, len(parts), 2)
    return start + body + heads


def test_only_code_of_the_architecture_stays_and_nothing_moves() -> None:
    ptx, old, hopper = entry(1, 90, b"p" * 40), entry(2, 80, b"o" * 24), entry(2, 90, b"h" * 32)
    made = library(ptx, old, hopper)
    found = bytearray(made)
    assert blank(found, 90) == 32
    assert found == library(entry(1, 90, bytes(40)), entry(2, 80, bytes(24)), hopper)
    assert blank(found, 100) == 0, "nothing of this architecture: the caller refuses"


def test_versions_are_those_of_the_lock() -> None:
    lock = (ROOT / "requirements/cpu.txt").read_text()
    pins = locked(MISSING.split(), lock)
    assert "megatron-core==0.16.1" in pins and all(pin in lock for pin in pins)
    with pytest.raises(ValueError, match=r"does not have nonesuch: remove the names from MISSING"):
        locked(["rich", "nonesuch"], lock)


def test_the_repository_and_a_bundle_are_below_64_mib() -> None:
    command = ["git", "ls-files", "-z"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    tracked = sum((ROOT / name).stat().st_size for name in listed.split("\0") if name)
    assert 1e7 < tracked < 64 * 2**20 - LIMIT, "shrink what is tracked, or lower LIMIT"
