"""What can be asked of the device file without ranks."""

import inspect
import mmap
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing import reductions

from r3 import extras
from r3.models.shape import ModelShape
from r3.runtime import Stash, ipc_arguments, to_host
from r3.runtime.device import free_port, prepare_environment, seed_everything
from tests.errors import Patch
from tests.memory import CPU, lock_page, resident_bytes
from tests.runs import program
from tests.tiny import tiny_config


def test_deterministic_mode_reaches_torch(monkeypatch: Patch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    seed_everything(3, deterministic=False)
    first = torch.rand(4)
    assert not torch.are_deterministic_algorithms_enabled()
    try:
        seed_everything(3, deterministic=True)
        assert torch.equal(first, torch.rand(4))
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        with pytest.warns(UserWarning, match="does not have a deterministic implementation"):
            torch.zeros(4).put_(torch.tensor([1, 1]), torch.tensor([1.0, 2.0]))
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_peers_memory_is_mapped_on_the_readers_device_without_an_event() -> None:
    names = list(inspect.signature(reductions.rebuild_cuda_tensor).parameters)
    sent = {name: f"as sent: {name}" for name in names}
    expected = sent | {"storage_device": 3, "event_sync_required": False}
    assert dict(zip(names, ipc_arguments(tuple(sent.values()), 3), strict=True)) == expected


def test_stash_keeps_the_first_copy_out_and_the_first_copy_back() -> None:
    stash, tensor = Stash(device=CPU), torch.arange(5.0)
    for start in (0.0, 100.0):
        expected = torch.arange(5.0) + start
        tensor.copy_(expected)
        view = tensor[2:]
        stash.put("x", tensor)
        stash.put("x", tensor)  # the storage is empty now: a copy of it would replace the contents
        assert tensor.untyped_storage().nbytes() == 0
        stash.get("x", tensor)
        assert torch.equal(tensor, expected) and torch.equal(view, expected[2:])
        tensor.add_(1)
        stash.get("x", tensor)  # the contents are newer than the copy
        assert torch.equal(tensor, expected + 1)
    with pytest.raises(AssertionError, match="part does not own its storage"):
        stash.put("part", tensor[1:])
    stash.put("x", tensor)
    stash.files["x"].truncate(8)
    with pytest.raises(AssertionError, match="x: 8 of 20 bytes came back"):
        stash.get("x", tensor)


def test_vllm_is_quiet_on_cpu(monkeypatch: Patch) -> None:
    # On CUDA its warnings are shown: test_rehearsal.py.
    monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)
    prepare_environment()
    assert os.environ["VLLM_LOGGING_LEVEL"] == "ERROR"


def test_engines_do_without_flashinfer_unless_a_user_asks(monkeypatch: Patch) -> None:
    """Else a dense engine of vLLM 0.26 needs the package, and some machines cannot compile it."""
    for asked in ("", "1"):
        monkeypatch.delenv("VLLM_USE_FLASHINFER_SAMPLER", raising=False)
        if asked:
            monkeypatch.setenv("VLLM_USE_FLASHINFER_SAMPLER", asked)
        prepare_environment()
        assert os.environ["VLLM_USE_FLASHINFER_SAMPLER"] == (asked or "0")


def test_copies_on_the_host_are_reused() -> None:
    tensor = torch.arange(4.0, requires_grad=True)
    first = to_host(tensor)
    assert first.data_ptr() != tensor.data_ptr() and not first.requires_grad
    second = to_host(tensor + 1, first)
    assert second.data_ptr() == first.data_ptr() and second.tolist() == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_expandable_segments_are_refused_under_both_names(name: str, monkeypatch: Patch) -> None:
    config = tiny_config()
    shape = ModelShape.read(config.model.path)
    monkeypatch.setenv(name, "max_split_size_mb:64, Expandable_Segments : True")
    (problem,) = extras.device_problems(config, shape, is_cuda=True)
    assert problem.place == name and "memory handles" in problem.rule and name in problem.fix
    assert extras.device_problems(config, shape, is_cuda=False) == []
    monkeypatch.setenv(name, "expandable_segments:False")
    assert extras.device_problems(config, shape, is_cuda=True) == []


def test_experts_that_the_grouped_product_refuses_on_cuda_are_refused() -> None:
    def found(width: int = 36, changes: dict[str, Any] | None = None, **other: Any) -> list[Any]:
        config = tiny_config(**({"model": {"dtype": "bfloat16"}} | (changes or {})))
        narrow = replace(ModelShape.read(config.model.path), moe_ffn_size=width, **other)
        return extras.device_problems(config, narrow, is_cuda=True)

    assert found(width=64) == []
    (problem,) = found()
    assert (problem.place, "36" in problem.rule) == ("model.experts", True)
    assert found(width=72, changes={"parallel": {"tp": 2}})  # 36 per rank
    # float32 has twice as many bytes per number, and other ways have no such rule.
    assert found(changes={"model": {"dtype": "float32"}}) == []
    assert found(changes={"model": {"dtype": "bfloat16", "experts": "sequential"}}) == []
    assert found(moe_layers=()) == []


def test_free_port_is_no_port_that_a_connection_can_take() -> None:
    range_ = Path("/proc/sys/net/ipv4/ip_local_port_range")
    if not range_.exists() or int(range_.read_text().split()[0]) <= 11000:
        pytest.skip("the kernel leaves no ports below its own range")
    ports = [free_port() for _ in range(50)]
    assert all(10000 <= port < int(range_.read_text().split()[0]) for port in ports)
    assert len(set(ports)) > 40  # 50 draws out of 1,000 or more: 1 or 2 pairs are expected


def numbers_of(text: str, **environment: str) -> list[float]:
    """What a program prints."""
    done = program(sys.executable, "-c", text, env=environment)
    assert done.returncode == 0, done.stderr
    return [*map(float, done.stdout.split())]


def test_freed_memory_is_kept_for_the_next_tensor() -> None:
    """In a process of its own, because the choice holds until a process ends."""
    usual, kept = numbers_of("""
import resource, torch
from r3.extras import cpu_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(12 * 2**20)  # 48 MiB are 12288 pages
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

# The least of some calls: at first, pieces of other objects may be in the way.
usual = min(faults() for _ in range(16))
cpu_memory().keep_freed_memory()
print(usual, min(faults() for _ in range(16)))
""")
    # With huge pages it is 24 instead of 12288.
    assert usual >= 24 and kept <= usual / 4


PAGE = mmap.PAGESIZE


@pytest.mark.parametrize("size", [2 * PAGE, 10 * PAGE + 5, 40 * 2**20])
def test_discarded_memory_leaves_and_reads_as_zeros(size: int) -> None:
    # Of the heap, and of the system: the C library decides by size.
    before, tensor, after = (torch.full((size,), 7, dtype=torch.uint8) for _ in range(3))
    storage, address = tensor.untyped_storage(), tensor.data_ptr()
    assert resident_bytes(storage) >= size
    assert extras.cpu_memory().discard(storage)
    assert resident_bytes(storage) <= 2 * PAGE  # the two that others use as well
    tensor[size // 2] = 3
    assert resident_bytes(storage) <= 3 * PAGE
    assert tensor.data_ptr() == address and int(tensor.sum()) == 3
    assert bool((before == 7).all()) and bool((after == 7).all())


def test_memory_of_files_and_other_processes_is_not_discarded(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"\7" * 4 * PAGE)
    shared = torch.full((4 * PAGE,), 7, dtype=torch.uint8).share_memory_()
    of_file = torch.from_file(str(file), shared=False, size=4 * PAGE, dtype=torch.uint8)
    of_file.fill_(7)
    small = torch.full((PAGE // 2,), 7, dtype=torch.uint8)  # no page of its own
    for tensor in (shared, of_file, small):
        assert not extras.cpu_memory().discard(tensor.untyped_storage())
        assert bool((tensor == 7).all())
    locked = torch.full((8 * PAGE,), 7, dtype=torch.uint8)
    lock_page(locked.untyped_storage())
    assert not extras.cpu_memory().discard(locked.untyped_storage())


@pytest.mark.parametrize("ranks", [1, 4])
def test_much_freed_memory_goes_back_to_the_system_and_little_stays(ranks: int) -> None:
    text = """
import torch
from r3.extras import cpu_memory
from r3.runtime.limits import host_gib
from tests.memory import CPU

cpu_memory().KEPT_SHARE = 0.25 / host_gib()  # 256 MiB for all ranks of the machine
cpu_memory().keep_freed_memory()

def returned(tensors):
    kept = [torch.ones(12 * 2**20) for _ in range(tensors)]  # 48 MiB each
    del kept
    before = CPU.used_gib()
    CPU.release_memory()
    return before - CPU.used_gib()

print(returned(2) * 2**10, returned(8) * 2**10)
"""
    little, much = numbers_of(text, LOCAL_WORLD_SIZE=str(ranks))
    # MiB: 96 stay with one rank, but are more than a rank of four may keep; 384 go. Pages at the
    # edges of blocks stay.
    assert little < 8 if ranks == 1 else little > 90
    assert much > 360
