"""Download models of the hub into the cache: small files first, which a plan needs, then weights.

One process of a machine downloads; the others wait for it, and find the files. An interrupted
download resumes where it stopped.
"""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from r3.models.files import AbsentWeightsError, weight_files
from r3.models.hub import INDEX, SMALL_FILES, ShapeError, cached_folder, command, parsed

T = TypeVar("T")

_WHOLE = "model.safetensors"
_KEPT_FREE = 2**30  # bytes of the disk


def cache_folder() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def fetch_small(path: str) -> Path:
    """Return the folder of a model of the hub that has all files but the weights.

    Raises:
        ShapeError: they are neither in the cache nor to be had.
    """
    if isinstance(content := _fetched(path), ShapeError):
        raise content
    return content


def fetch_weights(path: str, say: Callable[[str], None]) -> None:
    """Download the weights of a model, unless they are in the cache.

    Args:
        path: hub:OWNER/NAME[@REVISION].
        say: gets one line before a download.

    Raises:
        ShapeError: they are not to be had, or the disk has no room for them.
    """
    folder, (repo, _) = fetch_small(path), parsed(path)
    with _alone(repo):
        if not (missing := _missing_weights(path)):
            return
        _require_room(path, sum(missing.values()))
        say(f"downloading {path}: {_gib(sum(missing.values()))} to {cache_folder()}")
        _ask(path, lambda: _download(repo, folder.name, list(missing)))


def weights_note(path: str) -> str:
    """What a start has to download of a model whose small files are here; "" if nothing.

    Raises:
        ShapeError: the disk has no room for it.
    """
    try:
        size = sum(_missing_weights(path).values())
    except ShapeError as error:
        return f"not all of its weights are in the cache {cache_folder()}, and {error.rule}"
    _require_room(path, size)
    return f"{_gib(size)} of weights are not in the cache {cache_folder()} yet" if size else ""


@lru_cache(maxsize=64)  # settings are checked several times: of a failure, too, one request
def _fetched(path: str) -> Path | ShapeError:
    try:
        repo, revision = parsed(path)
        if folder := cached_folder(repo, revision):
            return folder
        with _alone(repo):
            if folder := cached_folder(repo, revision):  # another process has downloaded it
                return folder
            sizes = _sizes(path)
            small = [name for name in sizes if _is_small(name)]
            if "config.json" not in sizes:
                fix = "give a model that transformers loads, with config.json and *.safetensors"
                raise ShapeError("has no config.json", fix)
            _require_room(path, sum(sizes[name] for name in small))
            return Path(_ask(path, lambda: _download(repo, revision, small)))
    except ShapeError as error:
        return error


def _missing_weights(path: str) -> dict[str, int]:
    """Bytes of the files with weights that the folder lacks, of all of them if any is missing."""
    folder = fetch_small(path)
    index = folder / INDEX
    if index.is_file():
        try:
            wanted = set(json.loads(index.read_bytes())["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError):
            return {}  # reading the folder says what is wrong
        missing = sorted(name for name in wanted if not (folder / name).is_file())
    else:
        try:
            weight_files(folder)
            return {}
        except AbsentWeightsError:
            missing = [_WHOLE]
    if not missing:
        return {}
    sizes = _sizes(path)
    if not index.is_file() and _WHOLE not in sizes:
        missing = [name for name in sizes if fnmatch(name, "*.safetensors") and "/" not in name]
    if not missing or (absent := [name for name in missing if name not in sizes]):
        rule = f"has no {absent[0]}" if missing else "has no *.safetensors files"
        raise ShapeError(rule, "use a repository with weights as safetensors")
    return {name: sizes[name] for name in missing}


def _is_small(name: str) -> bool:
    is_inside = name.startswith("additional_chat_templates/") or "/" not in name
    return is_inside and any(fnmatch(name, pattern) for pattern in (*SMALL_FILES, INDEX))


def _download(repo: str, revision: str, names: list[str]) -> str:
    from huggingface_hub import snapshot_download

    return str(snapshot_download(repo, revision=revision, allow_patterns=names))


def _sizes(path: str) -> dict[str, int]:
    """Bytes of every file of a repository, as the hub says."""
    from huggingface_hub import HfApi

    repo, revision = parsed(path)
    info = _ask(path, lambda: HfApi().model_info(repo, revision=revision, files_metadata=True))
    return {file.rfilename: file.size or 0 for file in info.siblings or ()}


def _ask(path: str, request: Callable[[], T]) -> T:
    """Return the result of a request to the hub; what fails becomes a ShapeError."""
    from huggingface_hub import errors

    # What huggingface_hub raises without an answer, with another one, or on a full disk.
    by_xet: Any = getattr(errors, "XetDownloadError", RuntimeError)
    without_answer = (errors.HTTPError, OSError, RuntimeError, by_xet)
    token = "log in with `hf auth login`, or set HF_TOKEN"
    repo, revision = parsed(path)
    try:
        return request()
    except errors.GatedRepoError:
        fix = f"accept its terms on the page of {repo}, then {token}"
        raise ShapeError("is gated: its owners let in whom they accept", fix) from None
    except errors.RevisionNotFoundError:
        fix = f"name a branch, tag or commit of {repo}"
        raise ShapeError(f"has no revision {revision!r}", fix) from None
    except errors.RepositoryNotFoundError:
        raise ShapeError(
            "is not on the hub, or is private", f"check the name; for a private model, {token}"
        ) from None
    except without_answer as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        status = getattr(getattr(error, "response", None), "status_code", None)
        rule = f"the hub answers {status}" if status else f"the hub gives no answer: {reason[0]}"
        if isinstance(error, errors.OfflineModeIsEnabled):
            rule = "HF_HUB_OFFLINE forbids to ask the hub"
        fix = (
            f"try again, or copy {cache_folder()} from where `hf download {command(path)}` works. "
            "HF_ENDPOINT names another server"
        )
        raise ShapeError(rule, fix) from None


def _require_room(path: str, size: int) -> None:
    """Raise ShapeError if the disk of the cache has no room for so many bytes."""
    folder = cache_folder()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(there).free
    if size + _KEPT_FREE > free:
        rule = f"{_gib(size)} are to be downloaded, and the disk of {folder} has {_gib(free)} free"
        raise ShapeError(rule, "free space, or name a cache on another disk with HF_HUB_CACHE")


def _gib(size: float) -> str:
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.1f} MiB"


@contextmanager
def _alone(repo: str) -> Iterator[None]:
    """Wait until no other process of this machine downloads the model."""
    file = cache_folder() / ".locks" / f"r3--{repo.replace('/', '--')}.lock"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle = file.open("w")
    except OSError as error:
        fix = "name a cache that may be written with HF_HUB_CACHE"
        raise ShapeError(f"cannot be kept in {cache_folder()}: {error.strerror}", fix) from None
    with handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
