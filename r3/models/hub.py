"""Models of the Hugging Face hub: `hub:OWNER/NAME[@REVISION]` in place of a folder.

Their files are in the cache of huggingface_hub, where other programs find them too. What is there
is used without a request: a run resumes without network, and a branch that moved changes nothing
until `hf download` fetches it. `r3.tools.download` fills the cache.
"""

from __future__ import annotations

import re
from pathlib import Path

from r3.models.hf_config import ShapeError

INDEX = "model.safetensors.index.json"
SMALL_FILES = (
    *("config.json", "generation_config.json"),
    *("*token*.json", "tekken.json", "vocab*", "merges.txt", "*.model", "*.tiktoken"),
    *("chat_template*", "*.jinja", "additional_chat_templates/*.jinja", "*.py"),
)
"""What loaders read besides the weights: config, tokenizer, chat templates, their code."""

_NAME = re.compile(r"hub:([\w-][\w.-]*/[\w.-]+)(?:@(.+))?")


def is_hub(path: str | Path) -> bool:
    """Whether a setting names a model of the hub and not a folder."""
    return isinstance(path, str) and path.startswith("hub:")


def folder_of(path: str | Path) -> str:
    """The folder of a model: of one of the hub, that in the cache.

    Raises:
        ShapeError: it is not in the cache.
    """
    if not is_hub(path):
        return str(path)
    if folder := cached_folder(*parsed(str(path))):
        return str(folder)
    raise ShapeError("is not in the cache", f"hf download {command(str(path))}")


def parsed(path: str) -> tuple[str, str]:
    """Repository and revision of a name."""
    if match := _NAME.fullmatch(path):
        return match[1], match[2] or "main"
    raise ShapeError("is not a name on the hub", "write hub:OWNER/NAME[@REVISION]")


def command(path: str) -> str:
    repo, revision = parsed(path)
    return repo if revision == "main" else f"{repo} --revision {revision}"


def cached_folder(repo: str, revision: str) -> Path | None:
    """The folder of a model in the cache, if it has all of its small files."""
    from huggingface_hub import snapshot_download

    try:
        folder = Path(
            snapshot_download(
                repo,
                revision=revision,
                local_files_only=True,
                allow_patterns=[*SMALL_FILES, INDEX],
                ignore_patterns=["*/*"],
            )
        )
    except OSError:  # LocalEntryNotFoundError, also for a part of them
        return None
    return folder if (folder / "config.json").is_file() else None
