"""Rows of any source, each checked once, and the seeded order of prompts."""

from r3 import names_of

__getattr__ = names_of(
    __name__,
    prompts="DataError Dataset load_prompts prompts_from source_labels turns",
    rows="Columns Row RowProblem columns_of",
    sources="read_rows",
    template="Renderer load_tokenizer",
)
