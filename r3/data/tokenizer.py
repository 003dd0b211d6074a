"""Load tokenizers that read texts as their tokenizer.json says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from r3.models.hub import folder_of
from r3.runtime.process import importing, is_leader
from r3.runtime.terminal import say

# Letters, digits, white space, an accent and other scripts, which such rules treat differently.
_PROBE = "Tom's 12345 books,\n\n  and 3\u00e9 \u65e5\u672c"


def load_tokenizer(path: str | Path) -> Any:
    """Load the tokenizer of a model, with the rules of its tokenizer.json.

    Where tokenizer_config.json names certain classes, transformers 5 follows the class instead (its
    issue 45488): with LlamaTokenizerFast, DeepSeek's distilled models see no spaces.

    Args:
        path: a folder, or a model of the hub in the cache.

    Raises:
        OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError: of transformers,
            for files that are missing or damaged.
    """
    with importing():
        from tokenizers import Tokenizer
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

    folder = Path(folder_of(path))
    # R3 checks lengths itself and names the row, so the warning of transformers is off.
    found: Any = AutoTokenizer.from_pretrained(folder, model_max_length=10**9)
    file = folder / "tokenizer.json"
    if type(found) is PreTrainedTokenizerFast or not file.is_file():
        return found
    tokens = Tokenizer.from_file(str(file)).encode(_PROBE, add_special_tokens=False).ids
    if found(_PROBE, add_special_tokens=False)["input_ids"] == tokens:
        return found
    if is_leader():
        say(
            f"warning: {path}: transformers would read texts as {type(found).__name__} does, "
            "otherwise than tokenizer.json says. R3 reads them by the file. For servers of the "
            'export, write "tokenizer_class": "PreTrainedTokenizerFast" into tokenizer_config.json',
            error=True,
        )
    return PreTrainedTokenizerFast.from_pretrained(folder, model_max_length=10**9)
