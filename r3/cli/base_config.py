"""What flags override (a preset, a YAML file, a Python function, an earlier run), and the folder.

    train.py tiny                       a preset of configs/
    train.py my.yaml                    differences from the preset that its key `base` names
    train.py my_presets.py:small        a function without arguments that returns a Config
    train.py --from runs/tiny           the settings of an earlier run

A YAML file has the sections of a run's config.yaml. Without `base` it starts from the defaults:

    base: tiny                          # or another .yaml file, or file.py:function
    train: {lr: 1e-4}
    rollout: {group_size: 16}

Every run writes such a file, overrides.yaml, next to its config.yaml.
"""

from __future__ import annotations

import difflib
import inspect
import runpy
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from r3.config import (
    OF_OBJECTIVE,
    Config,
    ConfigError,
    Problem,
    dump_yaml,
    filled_in,
    flatten,
    from_yaml,
    load_yaml,
    overriding,
    read_values,
    shown,
    with_values,
)
from r3.configs import PRESETS
from r3.user_code.loading import path_fix

OVERRIDES = "overrides.yaml"
_ROOT = "base"  # key of a YAML file
_HEADER = """\
# How this run differs from its base. To start another one like it:
# train.py {file} --log.dir FOLDER
"""


@dataclass(frozen=True, kw_only=True)
class Base:
    """Settings before flags.

    Attributes:
        name: as the command line names it.
        root: the preset or file.py:function that it starts from; "" for the defaults.
        root_config: settings of the root.
        values: what YAML files or an earlier run change, by full names.
        log_dir: folder of the run unless a setting names one.
        notes: what a YAML file says in a way that is seldom meant.
        places: file and line of what a YAML file sets.
        problems: of a YAML file; these settings keep the value that they had below it.
    """

    name: str
    root: str
    root_config: Config
    values: Mapping[str, Any] = field(default_factory=dict)
    log_dir: str
    notes: tuple[str, ...] = ()
    places: Mapping[str, str] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()

    @property
    def config(self) -> Config:
        """The settings."""
        return with_values(self.root_config, self.values)

    def differences(self, config: Config) -> dict[str, tuple[Any, Any]]:
        """Settings that differ from the root: name -> (value, value of the root).

        The run's folder is left out: it says where, not what.
        """
        before = flatten(self.root_config)
        return {
            name: (value, before[name])
            for name, value in flatten(config).items()
            if value != before[name] and name != "log.dir"
        }

    def describe(self, config: Config) -> list[str]:
        """The root and the differences of a run's settings from it, one line each."""
        root = self.root or "defaults"
        name = root if self.name == root else f"{self.name}, from {root}"
        differences = self.differences(config)
        objective = config.train.objective
        brought = {*OF_OBJECTIVE[objective]} - {*self.values}
        count = {0: "no differences", 1: "1 difference"}.get(
            len(differences), f"{len(differences)} differences"
        )
        return [
            f"{name} with {count}",
            *(
                f"  {setting} = {shown(value)} ({root}: {shown(before)})"
                f"{f', for train.objective {objective}' if setting in brought else ''}"
                for setting, (value, before) in differences.items()
            ),
        ]

    def overrides(self, config: Config) -> str:
        """The differences as YAML that `train.py` takes."""
        tree: dict[str, Any] = {_ROOT: self.root} if self.root else {}
        for name, (value, _) in self.differences(config).items():
            section, key = name.split(".")
            tree.setdefault(section, {})[key] = value
        return _HEADER.format(file=OVERRIDES) + dump_yaml(tree)


def find_base(word: str) -> Base:
    """The settings that a word of the command line names.

    Raises:
        ConfigError: there is no such preset or file, or something is wrong with the file.
    """
    if Path(word).suffix in (".yaml", ".yml"):
        return _from_yaml_file(Path(word), ())
    if ".py:" in word:
        root_config, function = _from_python_file(word)
        return Base(name=word, root=word, root_config=root_config, log_dir=f"runs/{function}")
    if word not in PRESETS:
        near = difflib.get_close_matches(word, PRESETS, n=2)
        known = f"one of {', '.join(PRESETS)}, or a .yaml file, or file.py:function"
        fix = f"did you mean {' or '.join(near)}? It must be {known}" if near else known
        raise ConfigError.of("PRESET", word, "there is no such preset", fix)
    return Base(name=word, root=word, root_config=PRESETS[word](), log_dir=f"runs/{word}")


def base_of_run(folder: str) -> Base:
    """The settings of an earlier run, and what they were differences from.

    Raises:
        ConfigError: the folder has no config.yaml, or something is wrong with it.
    """
    try:
        config = from_yaml((Path(folder) / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        fix = "give the folder of a run, such as runs/tiny"
        rule = "there is no config.yaml to read"
        raise ConfigError.of("--from", folder, rule, fix) from None
    # The folder is the run, even if it was moved after it wrote its config.
    config = with_values(config, {"log.dir": folder})
    try:
        text = (Path(folder) / OVERRIDES).read_text(encoding="utf-8")
        root = str(load_yaml(text, OVERRIDES).get(_ROOT, ""))
        root_config = find_base(root).config if root else Config()
    except (OSError, UnicodeDecodeError, ConfigError):
        # A run of before, or its base is gone: its own settings are the base.
        return Base(name=folder, root=folder, root_config=config, log_dir=folder)
    values = changed_settings(root_config, config)
    return Base(name=folder, root=root, root_config=root_config, values=values, log_dir=folder)


def changed_settings(before: Config, after: Config) -> dict[str, Any]:
    """Settings of `after` that differ, by full names."""
    old = flatten(before)
    return {name: value for name, value in flatten(after).items() if value != old[name]}


def _from_yaml_file(path: Path, inside: tuple[Path, ...]) -> Base:
    """Settings of a YAML file; `inside` are the files whose base it is."""
    if path.resolve() in inside:
        rule = "names itself as its base, through the files in between"
        raise ConfigError.of("base", str(path), rule, "name a preset")
    notes, places = list[str](), dict[str, str]()
    try:
        tree = load_yaml(path.read_text(encoding="utf-8"), str(path), notes, places)
    except (OSError, UnicodeDecodeError) as error:
        rule = f"cannot be read ({getattr(error, 'strerror', None) or error})"
        raise ConfigError.of("PRESET", str(path), rule, path_fix(path)) from None
    word = tree.pop(_ROOT, "")
    if not isinstance(word, str):
        fix = "write base: tiny"
        raise ConfigError.of("base", word, f"{path}: must be text", fix)
    problems: list[Problem] = []
    try:
        word = filled_in(word)
    except ValueError as error:
        problems.append(Problem("base", word, f"{path}: {error}", "give the path itself"))
    found: list[Problem] = []
    values = read_values(tree, found, notes)
    problems += [replace(problem, origin=places.get(problem.place, "")) for problem in found]
    root = Base(name="", root="", root_config=Config(), log_dir="")
    try:
        if Path(word).suffix in (".yaml", ".yml"):
            root = _from_yaml_file(_beside(path, word), (*inside, path.resolve()))
        elif word:
            root = find_base(str(_beside(path, word)) if ".py:" in word else word)
    except ConfigError as error:
        raise ConfigError([*error.problems, *problems]) from None
    # runs/a/overrides.yaml and runs/b/overrides.yaml start two different runs.
    is_of_run = path.stem in ("overrides", "config")
    name = f"{path.resolve().parent.name}-{path.stem}" if is_of_run else path.stem
    return Base(
        name=str(path),
        root=root.root,
        root_config=root.root_config,
        values={**root.values, **overriding(root.config, values)},
        log_dir=f"runs/{name}",
        notes=(*root.notes, *notes),
        places={**root.places, **places},
        problems=(*root.problems, *problems),
    )


def _beside(path: Path, word: str) -> Path:
    """A file that a YAML file names: relative to its folder, or else to the working folder."""
    beside = path.parent / word
    return beside if Path(str(beside).partition(":")[0]).exists() else Path(word)


def _from_python_file(word: str) -> tuple[Config, str]:
    """What a function of a Python file returns, and the function's name."""
    path, _, name = word.rpartition(":")

    def refused(rule: str, fix: str) -> ConfigError:
        return ConfigError.of("PRESET", word, rule, fix)

    if not Path(path).is_file():
        raise refused("there is no such file", "give path/to/file.py:function")
    try:
        defined = runpy.run_path(path)
        config = defined[name]() if callable(defined.get(name)) else defined.get(name)
    except (Exception, SystemExit) as error:  # users' code may raise anything, sys.exit(0) too
        frames = traceback.extract_tb(error.__traceback__)
        line = next((frame.lineno for frame in reversed(frames) if frame.filename == path), 0)
        rule = f"{f'line {line} ' if line else ''}raises {type(error).__name__}: {error}"
        raise refused(rule, "correct the file") from error
    if name not in defined:
        own = [key for key, value in defined.items() if callable(value) and key[0] != "_"]
        raise refused(f"the file defines no {name!r}", f"it defines {', '.join(own) or 'nothing'}")
    if not isinstance(config, Config):
        if inspect.iscoroutine(config):
            config.close()  # else Python warns that nobody awaits it
        fix = "return a Config of r3.config"
        raise refused(f"{name} gives {config!r:.60}, not a Config", fix)
    return config, name
