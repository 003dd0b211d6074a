"""Load tokenizers that read texts as their tokenizer.json says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from r3.models.hub import folder_of
from r3.runtime.process import importing, is_leader
from r3.runtime.terminal import say

TIKTOKEN = "tiktoken.model"
TIKTOKEN_FIX = 'convert it, see "Models without tokenizer.json" in docs/models.md'
"""What Kimi-K2 has in place of tokenizer.json, and what to do."""

# Letters, digits, white space, an accent and other scripts, which such rules treat differently.
_PROBE = "Tom's 12345 books,\n\n  and 3\u00e9 \u65e5\u672c"


def load_tokenizer(path: str | Path) -> Any:
    """Load the tokenizer of a model, with the rules of its tokenizer.json.

    Where tokenizer_config.json names certain classes, transformers 5 follows the class instead (its
    issue 45488): with LlamaTokenizerFast, DeepSeek's distilled models see no spaces.

    For a model_type that it does not know (kimi_k2), it may fail at config.json.

    Args:
        path: a folder, or a model of the hub in the cache.

    Raises:
        OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError: of transformers,
            for files that are missing or damaged.
    """
    with importing():
        from tokenizers import Tokenizer
        from transformers import CONFIG_MAPPING, AutoTokenizer, PreTrainedTokenizerFast

    folder = Path(folder_of(path))
    file, config = folder / "tokenizer.json", folder / "config.json"
    if not file.is_file() and (folder / TIKTOKEN).is_file():
        # transformers would split texts by a rule of its own. The model's is in its code.
        raise ValueError(f"it has {TIKTOKEN} and no tokenizer.json: {TIKTOKEN_FIX}")
    # R3 checks lengths itself and names the row, so the warning of transformers is off. Without
    # trust_remote_code, transformers asks in the terminal whether code of the model may run.
    keys: dict[str, Any] = dict(model_max_length=10**9, trust_remote_code=False)
    values = json.loads(config.read_bytes()) if config.is_file() else {}
    kinds = {part.get("model_type", "llama") for part in (values, values.get("text_config", {}))}
    if file.is_file() and not all(kind in CONFIG_MAPPING for kind in kinds):
        return PreTrainedTokenizerFast.from_pretrained(folder, **keys)
    found: Any = AutoTokenizer.from_pretrained(folder, **keys)
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
    return PreTrainedTokenizerFast.from_pretrained(folder, **keys)
