"""Load functions and classes from users' files, each named `path/to/file.py:name`.

A file runs once per process and run, within a time limit: `forget_files` makes the next run read
it again. Like a script, it imports the modules beside it, before others of their names. They are
its folder's own: files of two folders may each have a `helpers.py`. `load_for` and `function_of`
turn everything that can go wrong into one `ConfigError` that names setting, file and fix.

Worker processes import this module first. So it imports what settings need only for their errors.
"""

from __future__ import annotations

import builtins
import hashlib
import importlib
import inspect
import os
import re
import stat
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any, TypeVar, cast

from r3.runtime.process_state import restored
from r3.user_code.time_limit import time_limit

if TYPE_CHECKING:
    from r3.config import ConfigError, Problem
    from r3.config.arguments import Taker

Function = TypeVar("Function", bound=Callable[..., Any])

# For the imports of a user's file, and the start of a worker's interpreter; a loaded machine needs
# seconds.
START_LIMIT_S = 120.0

# What users' functions of the algorithm get by position, by the setting that names them.
ALGORITHM_PARAMETERS = {
    "algo.loss": ("inputs", "bounds"),
    "algo.advantage": ("rewards_R", "groups_R"),
}


def file_fault(path: str) -> str:
    """Why a path is no file to be loaded; "" if it is one. A FIFO would block its reader for
    ever.
    """
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return f"there is no file {path}"
    except (OSError, ValueError) as error:  # ValueError: a null byte
        return f"{path} cannot be read ({getattr(error, 'strerror', None) or error})"
    return "" if stat.S_ISREG(mode) else f"{path} is a folder or a device, not a file"


def path_fix(path: str | os.PathLike[str], fix: str = "correct the path") -> str:
    """What to do about a file that cannot be found: where relative paths begin."""
    if os.path.isabs(path):
        return fix
    return f"{fix}; relative paths begin at {os.getcwd()}, where the run starts"


_MODULE = re.compile(r"\br3_user_(\w+?)_([0-9a-f]{12})\b")


def as_named(text: str) -> str:
    """Write modules of users' files by the names of the files, in messages of Python."""
    return _MODULE.sub(r"\1", text)


class UserFileError(Exception):
    """A user's file that ends the process, or never ends, while it is imported."""


def load(spec: str, *, limit_s: float = START_LIMIT_S) -> Any:
    """Load the object `path/to/file.py:name`. A file runs once per run; it may raise anything.

    Raises:
        UserFileError: the file calls `sys.exit`, or runs for more than `limit_s` seconds.
    """
    file, _, name = spec.rpartition(":")
    path = Path(file).resolve()
    # What imports a file of this name gets this module. Other names have no such import.
    module_name = _name_of(path.stem, path.parent if path.stem.isidentifier() else path)
    if module_name not in sys.modules:
        _files[module_name], others = path, set(sys.modules)
        try:
            late = UserFileError(f"{path} was not imported after {limit_s:g} s")
            with restored(str(path)):
                time_limit(partial(importlib.import_module, module_name), limit_s, lambda: late)
        except SystemExit as error:
            code = error.code if error.code is not None else ""
            raise UserFileError(f"{path} calls sys.exit({code}) while it is imported") from None
        finally:
            new = {name: sys.modules[name] for name in sys.modules.keys() - others}
            _beside.update(name for name, each in new.items() if _is_beside(each, path))
    return getattr(sys.modules[module_name], name)


_files: dict[str, Path] = {}  # users' files by the names of their modules
_folders: dict[str, Path] = {}  # of users' files, by the last part of such names


def _name_of(stem: str, place: Path) -> str:
    """A module's name that no other folder has, and without dots: its objects can be pickled."""
    digest = hashlib.blake2b(str(place).encode(), digest_size=6).hexdigest()
    _folders[digest] = place
    return f"r3_user_{re.sub(r'[^0-9A-Za-z_]', '_', stem)}_{digest}"


class _Finder(MetaPathFinder):
    """Finds users' files and what is beside them by the names of `_name_of`."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        top, dot, _ = name.partition(".")
        if not (known := _MODULE.fullmatch(top)):
            return None
        file = _files.get(top)
        folder = file.parent if file else _folders.get(known[2])
        if folder is None:
            return None
        if file and not dot:
            return spec_from_file_location(name, file, loader=_Loader(name, str(file), folder))
        found = PathFinder.find_spec(name if dot else known[1], path or [str(folder)])
        if found is None or not isinstance(found.loader, SourceFileLoader):
            return found
        return spec_from_file_location(
            name,
            found.loader.path,
            loader=_Loader(name, found.loader.path, folder),
            submodule_search_locations=found.submodule_search_locations,
        )


sys.meta_path.insert(0, _Finder())


class _Loader(SourceFileLoader):
    """Runs a file as it is now: Python's cache would take one of the same second for the same."""

    def __init__(self, name: str, path: str, folder: Path) -> None:
        super().__init__(name, path)
        self._folder = folder

    def get_code(self, fullname: str) -> Any:
        """Compile the file."""
        return self.source_to_code(self.get_data(self.path), self.path)

    def exec_module(self, module: ModuleType) -> None:
        """Run the file with an `import` that looks into the folder first, also in its functions."""
        module.__dict__["__builtins__"] = {**vars(builtins), "__import__": self._import}
        super().exec_module(module)

    def _import(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] = (),
        level: int = 0,
    ) -> ModuleType:
        if level == 1 and not (globals or {}).get("__package__"):
            level = 0  # from .helpers import x, in a file of no package
        top, dot, rest = name.partition(".")
        own = _name_of(top, self._folder)
        if top and not level and (own in sys.modules or _is_own(top, self._folder)):
            name = f"{own}{dot}{rest}"
        return builtins.__import__(name, globals, locals, fromlist, level)


def _is_own(name: str, folder: Path) -> bool:
    """Whether an import means a file of the folder that Python would not find by this name."""
    if name == "r3" or name in sys.stdlib_module_names:
        return False
    own = PathFinder.find_spec(name, [str(folder)])
    if own is None or not isinstance(own.loader, SourceFileLoader):
        return False
    others = getattr(sys.modules.get(name), "__spec__", None) or PathFinder.find_spec(name)
    return others is None or others.origin != own.origin


def _is_beside(module: ModuleType, path: Path) -> bool:
    """Whether a module was imported from the folder of a user's file, and is no installed one."""
    file = getattr(module, "__file__", None)
    if not file or module.__name__.partition(".")[0] == "r3":
        return False
    installed = (sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
    source = Path(file).resolve()
    inside = source.is_relative_to(path.parent)
    return inside and not any(source.is_relative_to(folder) for folder in installed)


_beside: set[str] = set()  # modules that users' files import from their folders
_caches: list[Callable[[], None]] = []


def cached(function: Function) -> Function:
    """As `functools.cache`, for functions that load users' files, until `forget_files`."""
    found = cache(function)
    _caches.append(found.cache_clear)
    return cast("Function", found)


def forget_files() -> None:
    """Have users' files, and what they import from their folders, run again when they are needed.

    A process that makes several runs calls it before each: the files may have been edited.
    """
    for name in [name for name in sys.modules if _MODULE.match(name)]:
        del sys.modules[name]
    for name in _beside:
        sys.modules.pop(name, None)
    _beside.clear()
    for clear in _caches:
        clear()
    importlib.invalidate_caches()


def load_for(field: str, spec: str, definition: str) -> Any:
    """Load what a setting names as `path/to/file.py:name`.

    Args:
        field: the setting.
        definition: what the file should have, such as "def f(response, prompt)".

    Raises:
        ConfigError: the file cannot be loaded, or has no such name.
    """
    file, _, name = spec.rpartition(":")
    if fault := file_fault(file):
        raise problem(field, spec, fault, path_fix(file))
    try:
        return load(spec)
    except UserFileError as error:
        fix = "keep only definitions at the top of the file"
        raise problem(field, spec, f"{error}", fix) from None
    except Exception as error:  # a user's file may raise anything; the message names it
        if isinstance(error, AttributeError) and error.name == name:
            rule = f"{file} defines no {name!r}"
            raise problem(field, spec, rule, f"write `{definition}` there") from None
        rule = f"{file} raised {type(error).__name__}: {as_named(str(error))}"
        fix = "correct the file"
        if isinstance(error, ModuleNotFoundError):
            fix = "install it, or name the folder that has it in PYTHONPATH"
        raise problem(field, spec, rule, fix) from error


def callable_of(field: str, spec: str, parameters: Sequence[str]) -> Callable[..., Any]:
    """Load a user's function.

    Args:
        field: the setting that names it.
        parameters: names of what R3 passes by position.

    Raises:
        ConfigError: it cannot be loaded, or is no function.
    """
    file, _, name = spec.rpartition(":")
    definition = f"def {name}({', '.join(parameters)})"
    function = load_for(field, spec, definition)
    if not callable(function):
        rule = f"{name} is not a function in {file}"
        raise problem(field, spec, rule, f"write `{definition}` there")
    return cast("Callable[..., Any]", function)


def function_of(
    field: str,
    spec: str,
    parameters: Sequence[str],
    arguments: Mapping[str, Any] = MappingProxyType({}),
    *,
    optional: Sequence[str] = (),
) -> Callable[..., Any]:
    """Load a user's function and check that it can be called as R3 will call it.

    Args:
        field: the setting that names it. Its section has a setting `args`.
        parameters: names of what R3 passes by position.
        arguments: keyword arguments from `args`.
        optional: names of what R3 passes by keyword if the function has such a parameter.

    Raises:
        ConfigError: it cannot be loaded, or not be called so.
    """
    function = callable_of(field, spec, parameters)
    signature = inspect.signature(function)
    if wrong := call_problem(field, spec, signature, parameters, arguments, optional=optional):
        from r3.config import ConfigError

        raise ConfigError([wrong])
    return function


def call_problem(
    field: str,
    spec: str,
    signature: inspect.Signature,
    parameters: Sequence[str],
    arguments: Mapping[str, Any],
    *,
    optional: Sequence[str] = (),
) -> Problem | None:
    """Return why a function cannot be called as R3 will call it, or None. See `function_of`."""
    name = spec.rpartition(":")[2]
    wanted = {each: () for each in optional if each in signature.parameters}
    try:
        signature.bind(*parameters, **arguments, **wanted)
    except TypeError as error:
        given = ", ".join([*parameters, *(f"{key}={value!r}" for key, value in arguments.items())])
        rule = f"{name} cannot be called as {name}({given}): {error}"
        definition = f"def {name}({', '.join(parameters)})"
        if field == "reward.function":
            definition += f"` or, for all samples of a prompt, `def {name}(responses, prompt)"
        fix = f"write `{definition}`; --{field.partition('.')[0]}.args sets further parameters"
        from r3.config import Problem

        return Problem(field, spec, rule, fix)
    return None


def assign(field: str, items: Sequence[str], takers: Sequence[Taker]) -> list[dict[str, Any]]:
    """Return the keyword arguments of each function from a setting; see `assigned`.

    Raises:
        ConfigError: an argument fits none.
    """
    from r3.config import ConfigError, Problem
    from r3.config.arguments import assigned

    given, faults = assigned(items, takers)
    if faults:
        raise ConfigError([Problem(field, *fault) for fault in faults])
    return given


def problem(field: str, spec: object, rule: str, fix: str) -> ConfigError:
    """Return the error of one setting."""
    from r3.config import ConfigError, Problem

    return ConfigError([Problem(field=field, value=spec, rule=rule, fix=fix)])
