"""Load functions and classes from users' files, each named `path/to/file.py:name`; limit time.

A file runs once per process and run, within a time limit: `forget_files` makes the next run read
it again. Like a script, it imports the modules beside it, before others of their names. They are
its folder's own: files of two folders may each have a `helpers.py`. `load_for` and `load_functions`
turn everything that can go wrong into one `ConfigError` that names setting, file and fix.

Worker processes import this module first. So it imports what settings need only for their errors.
"""

from __future__ import annotations

import builtins
import ctypes
import hashlib
import importlib
import inspect
import os
import re
import signal
import stat
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any, TypeVar, cast

from r3 import extras
from r3.errors import ConfigError, Fault, Problem

if TYPE_CHECKING:
    from r3.config import AlgoConfig

Function = TypeVar("Function", bound=Callable[..., Any])
Result = TypeVar("Result")

# For the imports of a user's file, and the start of a worker's interpreter; a loaded machine needs
# seconds.
START_LIMIT_S = 120.0
_AGAIN_S = 1.0  # until code that has caught its end is ended again, in the main thread

# What users' functions of the algorithm get by position.
_PASSED = {"loss": ("inputs", "bounds"), "advantage": ("rewards_R", "groups_R")}


class _Expired(BaseException):
    """Ends a function; no handler of `Exception` stops it."""


def time_limit(
    function: Callable[[], Result], seconds: float, error: Callable[[], Exception]
) -> Result:
    """Call a function in any thread, and raise `error()` out of it after so many seconds.

    Python code is interrupted between two of its instructions, a call into C when it returns. In
    the main thread a regular expression is interrupted, too.
    """
    if threading.current_thread() is threading.main_thread():
        expired = _Expired()
        try:
            with _alarm(seconds, expired):
                return function()
        except _Expired as caught:
            if caught is not expired:  # of a limit around this one
                raise
            raise error() from None
    # Threads get no signals: another thread sets the exception.
    thread, lock = threading.get_ident(), threading.Lock()
    over = sent = received = False

    def expire() -> None:
        nonlocal sent
        with lock:
            if not over:
                sent = True
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(thread), ctypes.py_object(_Expired)
                )

    timer = threading.Timer(seconds, expire)
    timer.daemon = True
    try:
        try:
            timer.start()
            return function()
        except _Expired:
            received = True
            raise
        finally:
            timer.cancel()
            with lock:
                over = True
            while sent and not received:  # it is raised here, and in nothing that follows
                time.sleep(0.001)
    except _Expired:
        raise error() from None


@contextmanager
def _alarm(seconds: float, expired: _Expired) -> Iterator[None]:
    """Raise `expired` in the block of the main thread after so many seconds, by a signal."""

    def end(number: int, frame: FrameType | None) -> None:
        raise expired

    previous = signal.signal(signal.SIGALRM, end)
    began = time.monotonic()
    pending_s, _ = signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN_S)
    try:
        yield
    finally:
        # An earlier alarm, such as that of a test's time limit, stays set.
        left_s = max(pending_s - (time.monotonic() - began), 0.001) if pending_s else 0.0
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, previous)
        signal.setitimer(signal.ITIMER_REAL, left_s)


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


def load(spec: str, *, limit_s: float = START_LIMIT_S) -> Any:
    """Load the object `path/to/file.py:name`. A file runs once per run; it may raise anything.

    Raises:
        Fault: the file calls `sys.exit`, or runs for more than `limit_s` seconds.
    """
    file, _, name = spec.rpartition(":")
    path = Path(file).resolve()
    # What imports a file of this name gets this module. Other names have no such import.
    module_name = _name_of(path.stem, path.parent if path.stem.isidentifier() else path)
    if module_name not in sys.modules:
        _files[module_name], others = path, set(sys.modules)
        try:
            late = Fault(f"{path} was not imported after {limit_s:g} s")
            with extras.surroundings().restored(str(path)):
                time_limit(partial(importlib.import_module, module_name), limit_s, lambda: late)
        except SystemExit as error:
            code = error.code if error.code is not None else ""
            raise Fault(f"{path} calls sys.exit({code}) while it is imported") from None
        finally:
            new = {name: sys.modules[name] for name in sys.modules.keys() - others}
            _beside.update(name for name, module in new.items() if _is_beside(module, path))
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
        spec = PathFinder.find_spec(name if dot else known[1], path or [str(folder)])
        if spec is None or not isinstance(spec.loader, SourceFileLoader):
            return spec
        return spec_from_file_location(
            name,
            spec.loader.path,
            loader=_Loader(name, spec.loader.path, folder),
            submodule_search_locations=spec.submodule_search_locations,
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
    cached_function = cache(function)
    _caches.append(cached_function.cache_clear)
    return cast("Function", cached_function)


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
        raise ConfigError.of(field, spec, fault, path_fix(file))
    try:
        return load(spec)
    except Fault as error:
        fix = "keep only definitions at the top of the file"
        raise ConfigError.of(field, spec, f"{error}", fix) from None
    except Exception as error:  # a user's file may raise anything; the message names it
        if isinstance(error, AttributeError) and error.name == name:
            rule = f"{file} defines no {name!r}"
            raise ConfigError.of(field, spec, rule, f"write `{definition}` there") from None
        rule = f"{_place(error, file)} raised {type(error).__name__}: {as_named(str(error))}"
        fix = "correct the file"
        if isinstance(error, ModuleNotFoundError):
            fix = "install it, or name the folder that has it in PYTHONPATH"
        raise ConfigError.of(field, spec, rule, fix) from error


def _place(error: Exception, file: str) -> str:
    """The file of a user and the line at which its import failed."""
    if isinstance(error, SyntaxError):  # says the line itself
        return file
    whole = str(Path(file).resolve())
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == whole]
    return f"{file}:{lines[-1]}" if lines else file


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A function or class that a setting names, and how R3 will call it.

    Attributes:
        field: the setting.
        name: as NAME.key=value of a setting with arguments has it.
        passed: names of what R3 passes by position.
        optional: names of what R3 passes by keyword if the function has such a parameter.
        also: another form of the definition, for messages.
        is_class: whether it is a class.
    """

    field: str
    name: str
    spec: str
    passed: tuple[str, ...]
    optional: tuple[str, ...] = ()
    also: str = ""
    is_class: bool = False

    @property
    def definition(self) -> str:
        """How the function or class begins."""
        name = self.spec.rpartition(":")[2]
        return f"class {name}" if self.is_class else f"def {name}({', '.join(self.passed)})"

    def load(self) -> Callable[..., Any]:
        """Load the function.

        Raises:
            ConfigError: it cannot be loaded, or is no function.
        """
        function = load_for(self.field, self.spec, self.definition)
        if not (inspect.isclass(function) if self.is_class else callable(function)):
            file, _, name = self.spec.rpartition(":")
            rule = f"{name} is not a {'class' if self.is_class else 'function'} in {file}"
            raise ConfigError.of(self.field, self.spec, rule, f"write `{self.definition}` there")
        return cast("Callable[..., Any]", function)

    def require_call(
        self, signature: inspect.Signature, arguments: Mapping[str, Any], items_field: str
    ) -> None:
        """Raise ConfigError if the function cannot be called with these arguments of a setting."""
        optional = {key: () for key in self.optional if key in signature.parameters}
        try:
            signature.bind(*self.passed, **arguments, **optional)
        except TypeError as error:
            name = self.spec.rpartition(":")[2]
            listed = [*self.passed, *(f"{key}={value!r}" for key, value in arguments.items())]
            rule = f"{name} cannot be called as {name}({', '.join(listed)}): {error}"
            fix = f"write `{self.definition}`{self.also}; --{items_field} sets further parameters"
            raise ConfigError.of(self.field, self.spec, rule, fix) from None


@dataclass(frozen=True, kw_only=True)
class UserFunction:
    """A function of a user's file, with the keyword arguments that it gets."""

    function: Callable[..., Any]
    parameters: tuple[str, ...]
    arguments: dict[str, Any]

    @property
    def is_of_group(self) -> bool:
        """Whether a reward function scores all samples of a prompt at once."""
        return self.parameters[:1] == ("responses",)


def load_functions(
    wanted: Sequence[Wanted], items_field: str, items: Sequence[str]
) -> list[UserFunction]:
    """Load users' functions, and check that they can be called as R3 will call them.

    Args:
        items_field: the setting with keyword arguments for them.
        items: its key=value items; each is for the functions that have the parameter.

    Raises:
        ConfigError: everything that keeps them from being loaded and called so.
    """
    from r3.config.arguments import Taker, assigned

    problems: list[Problem] = []
    functions: list[tuple[Callable[..., Any], inspect.Signature] | None] = []
    for want in wanted:
        try:
            function = want.load()
            functions.append((function, inspect.signature(function)))
        except ConfigError as error:
            problems += error.problems
            functions.append(None)
    assignments, faults = assigned(
        items,
        [
            Taker(
                name=want.name,
                signature=own and own[1],
                passed=len(want.passed),
                optional=want.optional,
            )
            for want, own in zip(wanted, functions, strict=True)
        ],
    )
    problems += [Problem(items_field, *fault) for fault in faults]
    loaded = []
    for want, own, arguments in zip(wanted, functions, assignments, strict=True):
        if own is None or faults:
            continue
        function, signature = own
        try:
            want.require_call(signature, arguments, items_field)
        except ConfigError as error:
            problems += error.problems
        parameters = tuple(signature.parameters)
        loaded.append(UserFunction(function=function, parameters=parameters, arguments=arguments))
    if problems:
        raise ConfigError(problems)
    return loaded


def functions_of_algorithm(algo: AlgoConfig) -> dict[str, UserFunction]:
    """Load a user's loss and advantage, by "loss" and "advantage".

    Raises:
        ConfigError: one cannot be loaded or called, or an item of `algo.args` fits none.
    """
    wanted = [
        Wanted(field=f"algo.{role}", name=role, spec=spec, passed=_PASSED[role])
        for role, spec in algo.own_functions.items()
    ]
    loaded = load_functions(wanted, "algo.args", algo.args)
    return dict(zip(algo.own_functions, loaded, strict=True))
