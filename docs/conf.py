"""How Sphinx builds these pages; `make docs` runs it.

Why Sphinx with MyST: the pages stay plain Markdown that reads well on any code host, Sphinx checks
every link between them and fails on the first broken one, and it is released regularly. MkDocs,
the other candidate, has had no release since 2024.
"""

import re
from typing import Any

project = "R3"
author = "the R3 authors"
extensions = ["myst_parser"]
html_theme = "furo"
html_title = "R3"
exclude_patterns = ["_build"]

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3  # links to headings, made as code hosts make them
myst_fence_as_directive = ["math"]  # ```math is also what code hosts render

LINK = re.compile(r"\]\(([\w-]+)\.md\)")


def with_contents(app: Any, docname: str, source: list[str]) -> None:
    """Turn the link lists of index.md into Sphinx's table of contents, one per heading.

    A toctree in the page itself would show up as code where the page is read as plain Markdown.
    """
    if docname != "index":
        return
    trees = []
    for number, section in enumerate(source[0].split("\n## ")):
        caption = section.splitlines()[0] if number else "Start"  # links before the first heading
        pages = "\n".join(LINK.findall(section))
        trees.append(f"```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{pages}\n```")
    source[0] += "\n\n" + "\n\n".join(trees) + "\n"


def setup(app: Any) -> None:
    """Register with Sphinx."""
    app.connect("source-read", with_contents)
