"""Pack what a Hopper GPU machine without a network is missing to run R3 (`make gpu-bundle`).

    .venv/bin/python tools/gpu_bundle.py FOLDER      about five minutes on two cores

The machine has Python 3.12, torch 2.11 for CUDA 13 and transformers. FOLDER gets two archives: vLLM
0.26, from whose CUDA libraries the code for other GPUs is blanked, and packages in the versions of
requirements/cpu.txt. `benchmarks/gpu.sh --bundle FOLDER` unpacks and uses them.
"""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

LIMIT = 48e6  # bytes, so that a copy of the repository with the bundle stays below 64 MiB
VLLM = "vllm==0.26.0"
MISSING = """
annotated-types anthropic apache-tvm-ffi astor blake3 cachetools cbor2 compressed-tensors depyf dill
docstring-parser fastapi fastapi-cli googleapis-common-protos httpcore2 httptools httpx2 ijson
interegular jiter jmespath jsonschema jsonschema-specifications lark llguidance lm-format-enforcer
loguru mcp mcp-types megatron-core mistral-common model-hosting-container-standards msgspec openai
opentelemetry-api opentelemetry-exporter-http-transport opentelemetry-exporter-otlp
opentelemetry-exporter-otlp-proto-common opentelemetry-exporter-otlp-proto-grpc
opentelemetry-exporter-otlp-proto-http opentelemetry-proto opentelemetry-sdk
opentelemetry-semantic-conventions opentelemetry-semantic-conventions-ai outlines-core
partial-json-parser prometheus-fastapi-instrumentator pybase64 pycountry pydantic pydantic-core
pydantic-extra-types pydantic-settings pyjwt python-dotenv python-json-logger python-multipart pyzmq
referencing rich-toolkit rpds-py setproctitle sniffio sse-starlette starlette truststore
typing-inspection uvicorn watchfiles websockets xgrammar
"""
"""Of the lock: what a machine with torch, transformers and the usual tools does not have."""
NOT_LOCKED = ("nvtx==0.2.17", "openai-harmony==0.0.8")  # vLLM 0.26's CUDA build imports them
UNUSED = (  # FlashAttention 2 (Hopper runs 3), code for other GPUs, parts of a server
    "vllm_flash_attn/_vllm_fa2_C.abi3.so",
    *("vllm-rs", "entrypoints/serve/instrumentator/static", "third_party/fmha_sm100"),
    *(f"third_party/deep_gemm/_C.cpython-3{minor}*" for minor in (10, 11, 13, 14)),
    *("**/*.hpp", "**/*.cuh", "**/*.h", "**/*.jpg"),
)
WITH_CODE = ("_C_stable_libtorch.abi3.so", "_moe_C_stable_libtorch.abi3.so")
HOPPER = 90
FATBIN, MACHINE_CODE = 0xBA55ED50, 2  # first word of a container; kind of an entry (1 is PTX)


def locked(names: list[str], lock: str) -> list[str]:
    """`name==version` of packages in the text of a lock.

    Raises:
        ValueError: the lock does not have some of them.
    """
    pins = dict(re.findall(r"^([a-z0-9.-]+)==(\S+)", lock, re.MULTILINE))
    if absent := [name for name in names if name not in pins]:
        raise ValueError(
            f"requirements/cpu.txt does not have {', '.join(absent)}: remove the names from MISSING"
        )
    return [f"{name}=={pins[name]}" for name in names]


def sections(library: bytes) -> Iterator[tuple[bytes, int, int]]:
    """(name, offset, size) of the sections of an ELF file."""
    (table,) = struct.unpack_from("<Q", library, 0x28)
    size, number, names = struct.unpack_from("<HHH", library, 0x3A)
    heads = [struct.unpack_from("<IIQQQQIIQQ", library, table + i * size) for i in range(number)]
    for head in heads:
        start = heads[names][4] + head[0]
        yield library[start : library.index(b"\0", start)], head[4], head[5]


def blank(library: bytearray, architecture: int) -> int:
    """Overwrite the GPU code of other architectures with zeros; return the bytes of what is kept.

    A CUDA library has its kernels once for each architecture, and as PTX, in containers of its
    section .nv_fatbin. The driver reads only the code of its own device. Headers and sizes stay, so
    that nothing moves; zeros compress to nothing.
    """
    kept = 0
    for name, at, size in list(sections(bytes(library))):
        last = at + size if name == b".nv_fatbin" else at
        while at + 16 <= last:
            magic, _, head, length = struct.unpack_from("<IHHQ", library, at)
            if magic != FATBIN:
                at += 8  # padding between containers
                continue
            entry, at = at + head, at + head + length
            while entry + 64 <= at:
                kind, _, start, stored = struct.unpack_from("<HHIQ", library, entry)
                (of,) = struct.unpack_from("<I", library, entry + 28)
                if (kind, of) == (MACHINE_CODE, architecture):
                    kept += stored
                else:
                    library[entry + start : entry + start + stored] = bytes(stored)
                entry += start + stored
    return kept


def pip(action: str, *arguments: str) -> None:
    """Run pip for the machine's Python, without dependencies and builds."""
    target = ["--no-deps", "--only-binary", ":all:", "--python-version", "3.12"]
    target += ["--implementation", "cp"]
    for abi in ("cp312", "abi3", "none"):
        target += ["--abi", abi]
    for glibc in (17, 24, 26, 27, 28, 31, 34, 35):  # manylinux2014 is 2_17
        target += ["--platform", f"manylinux_2_{glibc}_x86_64"]
    for other in ("manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "any"):
        target += ["--platform", other]
    command = [sys.executable, "-m", "pip", action, "--quiet", "--disable-pip-version-check"]
    subprocess.run([*command, *target, *arguments], check=True)


def main() -> None:
    """Download, reduce, pack; exit code 1 and no archive if the bundle is too large."""
    folder = Path(sys.argv[1]).resolve()
    lock = Path(__file__).parents[1] / "requirements/cpu.txt"
    names = locked(MISSING.split(), lock.read_text())
    with tempfile.TemporaryDirectory(prefix="r3-bundle-") as made:
        work = Path(made)
        pip("download", "--dest", str(work), VLLM)
        zipfile.ZipFile(next(work.glob("vllm-*.whl"))).extractall(work / "vllm")
        code = work / "vllm/vllm"
        for pattern in UNUSED:
            for path in list(code.glob(pattern)):
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        for name in WITH_CODE:
            library = bytearray((code / name).read_bytes())
            kept = blank(library, HOPPER)
            if not kept:
                sys.exit(f"{VLLM}: {name} has no code for architecture {HOPPER}")
            (code / name).write_bytes(library)
            print(f"{name}: {kept / 1e6:.1f} MB of code for architecture {HOPPER}")
        pip("install", "--no-compile", "--target", str(work / "packages"), *names, *NOT_LOCKED)
        for unused in ("bin", "pycountry/locales", "mistral_common/data"):
            shutil.rmtree(work / "packages" / unused, ignore_errors=True)
        archives = [work / "vllm.tar.xz", work / "packages.tar.xz"]
        for archive in archives:
            content = archive.name.partition(".")[0]
            command = ["tar", "--directory", made, "-cJf", str(archive), content]
            subprocess.run(command, check=True, env=os.environ | {"XZ_OPT": "-9e"})
        size = sum(archive.stat().st_size for archive in archives)
        if size > LIMIT:
            sys.exit(f"the bundle has {size / 1e6:.1f} MB, more than {LIMIT / 1e6:.0f}")
        folder.mkdir(parents=True, exist_ok=True)
        for archive in archives:
            shutil.move(archive, folder / archive.name)
    print(f"{folder}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
