"""Write what lists things in docs/: settings, metrics, chat templates, names of TRL and verl.

python tools/make_docs.py            write the pages and tables
python tools/make_docs.py --check    exit code 1 if a page is not what the code says
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from textwrap import fill

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # this checkout's code, whichever one is installed

from r3.config import SETTINGS, Config, Setting, as_typed, help_of  # noqa: E402
from r3.configs import PRESETS  # noqa: E402
from r3.metrics import GLOSSARY  # noqa: E402
from r3.metrics.console import COLUMNS as CONSOLE  # noqa: E402
from r3.models.families import FAMILIES, PROOFS  # noqa: E402
from r3.tools.help import COLUMNS_MEAN  # noqa: E402
from tests.matrix.results import table_of_results  # noqa: E402
from tests.templates import COLUMNS, TEMPLATES  # noqa: E402

DOCS = ROOT / "docs"
LIMITS, MODELS = "limits.md", "models.md"
GENERATED = "<!-- Written by tools/make_docs.py from the code: change the code, not this page. -->"

CONFIGURATION = """\
# Configuration

You want to change a setting. Every setting is a flag `--section.field value`; this shows the
resolved configuration without running anything:

<!-- runnable -->
```bash
.venv/bin/python train.py tiny --dry-run --train.lr 1e-4 --rollout.group_size 16
```

`train.py PRESET --help all` prints this page with the preset's defaults. The defaults below are
those of an empty preset.

- A **list** takes one value or several: `--eval.path a.jsonl b.jsonl`. `''` is an empty list.
- A **true or false** setting can stand alone: `--eval.only` means `--eval.only true`.
- An unknown flag, a value out of range and a wrong combination are errors. All are reported at
  once, with field, value, rule and fix. A setting without effect is a warning.
- A **path** takes `~`, `$VAR` and `${VAR}`, in YAML and after `=` too. A variable that is not set
  is an error. A file or folder with exactly this name is used as it is.
- `none`, `None` and `null` are the **empty text**, and a warning says so. They have a meaning of
  their own where the description names `none`.
- **Rule** says which values are accepted: "at least 1". Numbers must be finite.
- **Resume** says whether the setting may change when a run is resumed
  ([Checkpoints and resume](checkpoints-and-resume.md)).

## Where settings come from

| first word of the command line | settings start from |
| --- | --- |
| `train.py tiny` | a preset of `configs/` |
| `train.py my_run.yaml` | a file with differences from another base |
| `train.py my_presets.py:small` | a function of yours, without arguments, that returns a `Config` |
| `train.py --from RUN_DIR` | an earlier run |

Flags override all of them. What then contradicts another setting is refused, with the flag to add.
`train.objective` brings the settings that it needs. A flag or file that names an environment
(`env.name`, `env.path` or `env.command`) replaces that of its base, `env.args` included. If a flag
is given twice, the last one counts, with a warning.

A run file has the sections of this page and names its base: a preset, another file, or
`file.py:function`.

<!-- runnable -->
```bash
cat > my_run.yaml <<'YAML'
base: tiny
train: {lr: 1e-4}
rollout: {group_size: 16}
YAML
.venv/bin/python train.py my_run.yaml --dry-run
```

A section or setting that stands in a file twice is an error. `train.lr: 1e-4` is the same as
`train: {lr: 1e-4}`. Values are read by YAML 1.2: `010` is ten, `1:30`, `off` and dates are texts. A
comment begins at ` #`, so put a text with `#` in quotes:

```yaml
data:
  system_prompt: "Put the answer after ####."
```

Every run writes such a file, `overrides.yaml`, beside its `config.yaml`: share it to let others
repeat the run.

## Keys and passwords

Give a key in a variable of the environment: your code and agents read it there, and
`reward.api_key_env` names one for the HTTP judge. A setting that looks like a key or a password
(`api_key=...`, `--token ...`, `https://user:password@host`, `hf_...`) is refused before the run
starts, because files of the run, trackers and errors show settings.

## Presets
"""

AFTER_PRESETS = """\
A preset is a function in `configs/` that returns a `Config`, and a line in `configs/__init__.py`.
The presets of large models name data and weights that you must download; the files in `configs/`
say where from. Their `--dry-run` works without.

## The model folder

`--model.path FOLDER` is a Hugging Face folder with `config.json`, `*.safetensors`, `tokenizer.json`
and a chat template, and `--model.path hub:OWNER/NAME` a model of the hub. See [Models](models.md).
"""

METRICS = """\
# Metrics

You have a run and want to know what a number means. Print the last row:

```bash
tail -n 1 runs/tiny/metrics.jsonl | python -m json.tool
```

TensorBoard shows the same keys: `python -m tensorboard.main --logdir runs`. Its custom scalars have
the page to watch first and a page that compares replayed with live routes.
[Rollout Routing Replay](replay.md) explains how to read `mismatch/*` and `routing/*`.

A key that this page does not list is an error in R3. SET is the name of a held-out set, SOURCE that
of a source of rows, COMPONENT that of a reward function, NAME that of a number that your code
reports, LAYER a decoder layer from 0, K a number, and DEPTH 0-1k, 1-4k, 4-16k or 16k_up (positions
in the conversation).
"""

CONSOLE_PAGE = """\
## Columns of the console

A run prints a row per step: on a terminal as a table that drops columns where it is narrow, in a
log file as a line of labelled figures. `train.py --help columns` prints this table.
"""

CHAT_TEMPLATES = """\
# Chat templates

You have a model folder and want to know what its chat template allows. `--check` renders every row
and raises an error if the template changes or drops part of it:

<!-- runnable -->
```bash
.venv/bin/python train.py tiny --check
```

A template may drop what it does not know: a role, a tool call, reasoning of an earlier turn. The
error names the row, the message and the cause.

## Message formats

Rows, environments, workflows and clients of the endpoint may write messages in these formats. R3
converts them to the one that the template reads.

| given | what R3 does |
|---|---|
| `content` as a list of parts | joins texts; refuses images and other parts |
| `content: null` with `tool_calls` | unchanged; empty text where the template prints `None` |
| `arguments` as JSON text or an object | an object; text where the template joins text (DeepSeek) |
| `reasoning`, `reasoning_content` or `thinking` | the name that the template reads |
| role `developer` | `system` where the template does not name it |
| another role that the template does not name | refused in rows |
| `weight: 0`, `train: false` or `loss: false` | the message is context, without loss |
| any other key | refused in rows unless the template reads it |
| keys with null, as tables have them | left out |
| messages or tools as JSON text | decoded |

## Tested templates

The tests try rebuilds of these templates (`tests/templates`) with one turn, several turns, tools,
tool calls in a prompt, and SFT on several messages, on reasoning and on calls. What the table does
not name works. Several turns are [environments](environments.md#tokens-masks-and-routes), where
Hermes is refused if there are tools. In [workflows](workflows.md) earlier turns may change.
"""

AREAS = {
    "reward": "Rewards",
    "eval": "Evaluation",
    "rollout": "Rollouts",
    "env": "Environments",
    "source": "Sources of rows",
    "curriculum": "Curriculum",
    "mismatch": "Mismatch between policy and engine",
    "routing": "Routes",
    "loss": "Loss",
    "correction": "Corrections for the engine mismatch",
    "policy": "Policy",
    "optim": "Optimizer",
    "time": "Time",
    "perf": "Throughput",
    "memory": "Memory",
    "engine": "Engine",
}


def resume_in_words(setting: Setting) -> str:
    """Whether a resumed run may change a setting: yes, no, or "yes, unless ..."."""
    end = f", {setting.unless[1]}" if setting.unless else ""
    return f"yes{end}" if setting.resume else "no"


def pages() -> dict[str, str]:
    """Return the generated pages: file name -> text."""
    return {
        "configuration.md": configuration(),
        "metrics.md": metrics(),
        "chat-templates.md": chat_templates(),
        LIMITS: filled(LIMITS, "models", model_families()),
        MODELS: filled(MODELS, "matrix", matrix(), source="tests/published.py"),
    }


def stale(folder: Path = DOCS) -> list[str]:
    """Return the names of the pages in a folder that differ from the generated ones."""
    return [
        name
        for name, text in pages().items()
        if not (folder / name).is_file() or (folder / name).read_text(encoding="utf-8") != text
    ]


def configuration() -> str:
    """Return one table per section of `Config`."""
    presets = [
        (f"`{name}`", (make.__doc__ or "").splitlines()[0]) for name, make in PRESETS.items()
    ]
    parts = [
        GENERATED,
        CONFIGURATION,
        f"{table(('preset', 'what it is'), presets)}\n",
        AFTER_PRESETS,
    ]
    header = ("setting", "type", "default", "rule", "resume", "meaning")
    for section in fields(Config):
        rows = [
            (
                f"`{setting.name}`",
                kind(setting.type_in_words),
                f"`{default}`" if (default := as_typed(setting.default)) else "empty",
                (setting.rule or "-").removeprefix("must be "),
                resume_in_words(setting),
                help_of(setting.name),
            )
            for setting in SETTINGS.values()
            if setting.name.startswith(f"{section.name}.")
        ]
        intro = fill(" ".join((type(section.default).__doc__ or "").split()), width=100)
        parts.append(f"## {section.name}\n\n{intro}\n\n{table(header, rows)}\n")
    return "\n".join(parts)


def metrics() -> str:
    """Return one table per area of `GLOSSARY`."""
    areas = list(dict.fromkeys([*AREAS, *(key.partition("/")[0] for key in GLOSSARY)]))
    shown = {column.title: column.keys for column in CONSOLE}
    columns = [
        (f"`{title}`", " or ".join(f"`{key}`" for key in shown.get(title, ())), meaning)
        for title, meaning in COLUMNS_MEAN.items()
    ]
    heads = ("column", "metric", "meaning")
    parts = [GENERATED, METRICS, f"{CONSOLE_PAGE}\n{table(heads, columns)}\n"]
    for area in areas:
        rows = [
            (f"`{key}`", meaning)
            for key, meaning in GLOSSARY.items()
            if key.partition("/")[0] == area
        ]
        if rows:
            heading = AREAS.get(area, area)
            parts.append(f"## {heading}\n\n{table(('metric', 'meaning'), rows)}\n")
    return "\n".join(parts)


def chat_templates() -> str:
    """Return what known chat templates do not allow, and the words of the errors."""
    causes = list(
        dict.fromkeys(cause for each in TEMPLATES.values() for cause in each.refused.values())
    )
    rows = [
        (
            template.title,
            "; ".join(
                ", ".join(COLUMNS[use] for use, each in template.refused.items() if each == cause)
                + f" ({causes.index(cause) + 1})"
                for cause in dict.fromkeys(template.refused.values())
            ),
        )
        for template in TEMPLATES.values()
    ]
    reasons = [f"{number}. \u2026 {cell(cause)} \u2026" for number, cause in enumerate(causes, 1)]
    parts = [GENERATED, CHAT_TEMPLATES, table(("model", "refused"), rows)]
    return "\n".join([*parts, "\nThe errors say:\n", *reasons, ""])


def model_families() -> str:
    """Return the list of model families, and what is tested for which."""
    rows = [f"- `{name}`: {family.models}" for name, family in FAMILIES.items()]
    proofs = []
    for proof, text in PROOFS.items():
        names = [f"`{name}`" for name, family in FAMILIES.items() if proof in family.proved]
        which = "all" if len(names) == len(FAMILIES) else ", ".join(names)
        proofs.append(fill(f"- **{proof}** ({which}): {text}", width=100, subsequent_indent="  "))
    return "\n".join([*rows, "", "Tested:", "", *proofs])


def matrix() -> str:
    """Return what each published layout did in the last `make test-matrix`."""
    header, rows, limits = table_of_results()
    named = [
        f"{number}. \u2026 {limit.documented} \u2026 ([{limit.page}]({limit.page}))"
        for number, limit in enumerate(limits, 1)
    ]
    return "\n".join([table(header, rows), "", "Limits:", "", *named])


def filled(page: str, name: str, text: str, source: str = "r3/models/families.py") -> str:
    """Return a page with its generated part replaced."""
    begin = f"<!-- {name}: written by tools/make_docs.py from {source} -->\n"
    before, mark, rest = (DOCS / page).read_text(encoding="utf-8").partition(begin)
    assert mark, f"{page} has no line {begin!r}"
    return f"{before}{begin}{text}\n<!-- end -->{rest.partition('<!-- end -->')[2]}"


def kind(words: str) -> str:
    """Return the type of a setting, with choices as code."""
    if "," not in words:
        return words
    return ", ".join(f"`{choice}`" for choice in words.split(", "))


def table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Return a Markdown table."""
    lines = [header, ("---",) * len(header), *(tuple(map(cell, row)) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell(text: str) -> str:
    """Escape text for a Markdown table."""
    parts = re.split(r"(`[^`]*`)", text)
    plain = [re.sub(r"([|*_<>\\$])", r"\\\1", part) for part in parts[::2]]
    code = [part.replace("|", "\\|") for part in parts[1::2]]
    mixed = [piece for pair in zip(plain, [*code, ""], strict=True) for piece in pair]
    return "".join(mixed)


def main(argv: list[str]) -> int:
    """Write the pages, or check them."""
    if argv == ["--check"]:
        names = stale()
        if names:
            print(f"not what the code says: {', '.join(names)}. Run python tools/make_docs.py")
        return 1 if names else 0
    written: Mapping[str, str] = pages()
    for name, text in written.items():
        (DOCS / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
