"""The pages: current where they are generated, true where they name settings, metrics, files and
errors.
"""

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from r3.config import SETTINGS
from r3.metrics import UnknownMetricError, explain
from tests.pages import MARKER, ROOT, Block, BlockError, blocks, run
from tools import make_docs

README_WORDS = 1300
SECTIONS = {name.partition(".")[0] for name in SETTINGS}
AREAS = "reward|eval|rollout|env|mismatch|routing|loss|correction|policy|optim|time|perf|memory"
# Private ones never reach a user.
ERRORS = re.compile(
    r"^class ([A-Z]\w*)\((?:\w*Error|Exception|Explained|Fault|Problem)\):", re.MULTILINE
)


def texts() -> Iterator[tuple[str, str]]:
    """Every page that a user reads, by its name."""
    names = ("README.md", "CONTRIBUTING.md", "launch/README.md", "requirements/README.md")
    files = [*(ROOT / name for name in names), *ROOT.glob("benchmarks/*.md")]
    files += ROOT.glob("r3/*/README.md")
    for file in sorted([*files, *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/*.md")]):
        yield str(file.relative_to(ROOT)), file.read_text(encoding="utf-8")


def code_spans(text: str) -> list[str]:
    """What stands in backticks outside of code blocks."""
    return re.findall(
        r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    )


def of_r3(page: str, text: str) -> str:
    """The text without names of other programs: their columns in the tables that map flags."""
    if "coming-from" not in page:
        return text
    return re.sub(r"^\|.*\|(.*)\|$", r"\1", text, flags=re.MULTILINE)


# --- what can be wrong with a page: each yields complaints ------------------------------------


def unknown_settings(page: str, text: str) -> Iterator[str]:
    """`section.field` and `--section.field` must exist."""
    section = "|".join(sorted(SECTIONS))
    named = [
        span.split()[0]
        for span in code_spans(of_r3(page, text))
        if re.match(rf"({section})\.[a-z0-9_]+($|\s)", span)
    ]
    for name in [*named, *re.findall(r"--([a-z]+\.[a-z0-9_]+)", text)]:
        if name not in SETTINGS and not name.endswith(".py") and name != "section.field":
            yield f"{page}: there is no setting {name}"


def unknown_metrics(page: str, text: str) -> Iterator[str]:
    """`area/name` must be in the glossary."""
    for span in code_spans(text):
        if re.fullmatch(rf"({AREAS})/[A-Za-z0-9_/]+", span):
            try:
                explain(span)
            except UnknownMetricError:
                yield f"{page}: there is no metric {span}"


def missing_files(page: str, text: str) -> Iterator[str]:
    """Files and folders of the repository that a page names in backticks must exist."""
    folders = "r3|configs|docs|examples|launch|tests|tools|benchmarks|requirements"
    for span in code_spans(text):
        if span.startswith("docs/_build"):  # made by `make docs`
            continue
        if re.fullmatch(rf"({folders})/[\w./-]*", span) and not (ROOT / span).exists():
            yield f"{page}: there is no {span}"


def broken_links(page: str, text: str) -> Iterator[str]:
    """Links inside the repository must lead somewhere, to a heading too."""
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        if not file.exists():
            yield f"{page}: the link {target} leads nowhere"
        elif anchor and anchor not in anchors(file.read_text(encoding="utf-8")):
            yield f"{page}: {target} names no heading"


def anchors(text: str) -> set[str]:
    """Anchors of the headings of a page, as code hosts make them."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def long_lines(page: str, text: str) -> Iterator[str]:
    """Prose and code are at most 100 columns; tables and links cannot be broken."""
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > 100 and not line.startswith(("|", "> |")) and "](" not in line:
            yield f"{page}:{number} has {len(line)} columns"


def uneven_tables(page: str, text: str) -> Iterator[str]:
    """Every row of a table has as many cells as the row above it."""
    above = 0
    for number, line in enumerate(text.splitlines(), 1):
        cells = len(re.findall(r"(?<!\\)\|", line)) if line.startswith(("|", "> |")) else 0
        if above and cells not in (0, above):
            yield f"{page}:{number} has {cells - 1} cells, the row above has {above - 1}"
        above = cells


# Each with a page that breaks it.
RULES: dict[Callable[[str, str], Iterator[str]], str] = {
    unknown_settings: "use `train.learning_rate` or `--model.pathh x`",
    unknown_metrics: "look at `mismatch/k4`",
    missing_files: "see `r3/no_such_file.py`",
    broken_links: "[here](no-such-page.md)",
    long_lines: "a" * 101,
    uneven_tables: "| a | b |\n|---|---|\n| 1 |",
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_pages_keep_the_rule(rule: Callable[[str, str], Iterator[str]]) -> None:
    complaints = [complaint for page, text in texts() for complaint in rule(page, text)]
    assert not complaints, "\n".join(complaints)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_page_that_breaks_the_rule_is_noticed(rule: Callable[[str, str], Iterator[str]]) -> None:
    assert list(rule("README.md", RULES[rule]))


def test_every_error_class_is_in_troubleshooting() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    sources = (file.read_text(encoding="utf-8") for file in ROOT.glob("r3/**/*.py"))
    classes = {name for source in sources for name in ERRORS.findall(source)}
    assert len(classes) > 15, classes
    listed = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    assert listed == classes, f"missing {classes - listed}, gone {listed - classes}"


def test_generated_pages_are_current(tmp_path: Path) -> None:
    assert make_docs.stale() == [], "run python tools/make_docs.py"
    for name, text in make_docs.pages().items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert make_docs.stale(tmp_path) == []
    (tmp_path / "metrics.md").write_text("something else", encoding="utf-8")
    assert make_docs.stale(tmp_path) == ["metrics.md"]


def test_generated_pages_have_every_setting_with_its_help() -> None:
    text = make_docs.configuration()
    rows = re.findall(r"^\| `(\w+\.\w+)` \|.*\| (.+) \|$", text, re.MULTILINE)
    assert {name for name, _ in rows} == set(SETTINGS)
    assert all(meaning.strip() for _, meaning in rows)


def test_readme_is_a_front_door() -> None:
    words = (ROOT / "README.md").read_text(encoding="utf-8").split()
    assert len(words) <= README_WORDS, f"{len(words)} words: move reference material to docs/"


def test_every_package_has_a_short_readme() -> None:
    """Its purpose, its door, what it must not do, what to read first: at most ten lines."""
    for package in sorted(path.parent for path in ROOT.glob("r3/*/__init__.py")):
        readme = package / "README.md"
        text = readme.read_text(encoding="utf-8") if readme.is_file() else ""
        parts = ("- Door: ", "- Must not: ", "- Read first: ")
        assert len(text.splitlines()) <= 10 and all(part in text for part in parts), readme


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    pages = {file.name for file in ROOT.glob("docs/*.md")} - {"index.md"}
    assert {page for page in pages if f"({page})" not in index} == set()


# --- the blocks that are run in tests/e2e/test_docs_commands.py -------------------------------


def page_with(script: str) -> str:
    return f"# A page\n\n{MARKER}\n```bash\n{script}\n```\n\n```bash\nnot marked\n```\n"


def test_marked_blocks_are_found_and_others_are_not() -> None:
    found = blocks("page.md", page_with("echo one\necho two"))
    assert found == [Block(page="page.md", line=5, script="echo one\necho two")]


@pytest.mark.parametrize(
    "text", [f"{MARKER}\n\n```bash\nls\n```", f"{MARKER}\n```bash\nls", MARKER]
)
def test_a_marker_without_a_block_is_noticed(text: str) -> None:
    with pytest.raises(BlockError, match=r"page.md:\d"):
        blocks("page.md", text)


def test_a_working_block_says_what_it_printed(tmp_path: Path) -> None:
    (block,) = blocks("page.md", page_with("echo pasted > file\ncat file"))
    assert run(block, tmp_path) == "pasted\n"


FAILS = "docs/page.md:5: exit code [1-9]"


@pytest.mark.parametrize(
    ("script", "said"),
    [
        *((script, FAILS) for script in ("false", "false | cat", "no_such", "false\necho fine")),
        ("echo begun; exec sleep 60", "docs/page.md:5: not done after 3 s\nbegun"),
    ],
)
def test_a_broken_block_is_noticed(script: str, said: str, tmp_path: Path) -> None:
    (block,) = blocks("docs/page.md", page_with(script))
    with pytest.raises(BlockError, match=said):
        run(block, tmp_path, timeout_s=3.0)


def test_docs_configuration_is_valid_python() -> None:
    ast.parse((ROOT / "docs" / "conf.py").read_text(encoding="utf-8"))
