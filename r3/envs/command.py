"""Agents in other processes that use OpenAI's API: one per episode, or one that stays.

    --env.command "python agent.py"          started for each episode
    --env.command "python agent.py:Agent"    a class: one process per rank runs all episodes

A command of the first kind gets OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL, and Anthropic's
variables likewise, finds the row in the JSON file R3_TASK_FILE, and writes its reward as JSON to
R3_RESULT_FILE. The class has a method `run(self, task, model)`, see `resident.py`. A process leads
a process group, which never outlives its episode, or the run, nor the rank, however that ends.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from r3.envs.apis.common import MODEL
from r3.envs.apis.handlers import Access
from r3.envs.endpoint import serve
from r3.envs.workflow import Model
from r3.types import Prompt
from r3.user_code.calls import CallError

_LAST_LINES = 20
_LAST_BYTES = 4000
_LONGEST_LINE = 1 << 26  # of a result: metrics and a reward per call
_SILENT_S = 10.0  # until a process that does not take a cancellation is killed
_END_S = 5.0  # for an agent that stays to end with the run

_CLASS = re.compile(r".+\.py:[A-Za-z_]\w*")


def split(command: str) -> tuple[list[str], int]:
    """Return the words of a command, and where `agent.py:Class` stands in them, or -1.

    Raises:
        ValueError: a quotation is not closed.
    """
    words = shlex.split(command)
    places = [index for index, word in enumerate(words) if index and _CLASS.fullmatch(word)]
    return words, places[0] if places else -1


def stays(command: str) -> bool:
    """Whether a command names a class, whose process runs all episodes."""
    return split(command)[1] >= 0


class Command:
    """The workflow that runs the command of `env.command`."""

    def __init__(self, command: str) -> None:
        """Take the command line; no shell runs it."""
        self._command = command

    async def run(self, task: Prompt, model: Model) -> Any:
        """Run the command for one episode; return what it wrote as its result.

        Raises:
            ModelLimit: it failed after the model could not be called any more.
            CallError: it failed, or its result cannot be read.
        """
        guard = _Guard.of_loop()
        folder = Path(tempfile.mkdtemp(dir=guard.folder))
        try:
            async with serve(model) as access:
                failure = await self._run(task, access, folder, guard)
                if not failure:
                    try:
                        return _result(folder / "result.json")
                    except CallError as error:
                        failure = str(error)
                if access.limit is not None:
                    raise access.limit
                text = f"{self._command!r} {failure}{_last_lines(folder / 'output.txt')}"
                raise CallError(text)
        except asyncio.CancelledError as cancelled:
            last = _last_lines(folder / "output.txt")
            cancelled.add_note(f"{self._command!r} was stopped{last}")
            raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    async def _run(self, task: Prompt, access: Access, folder: Path, guard: _Guard) -> str:
        """Run the process to its end; return how it failed, "" if it did not."""
        (folder / "task.json").write_text(_line_of(row_of(task)), encoding="utf-8")
        with (folder / "output.txt").open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *shlex.split(self._command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=_environment(access, folder),
                start_new_session=True,  # so that it can be killed with everything it started
            )
        guard.watch(process.pid)
        try:
            code = await process.wait()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            guard.forget(process.pid)
        return _end_of(code) if code else ""


class Resident:
    """The workflow that passes episodes to the process of `env.command`, which stays."""

    def __init__(self, command: str, **arguments: Any) -> None:
        """Take the command line, and the arguments of its class."""
        self._command, self._arguments = command, arguments

    async def run(self, task: Prompt, model: Model) -> Any:
        """Let the process live one episode; return its result.

        Raises:
            ModelLimit: it failed after the model could not be called any more.
            CallError: it failed or died, or its result cannot be used.
        """
        async with serve(model) as access:
            process = await _Process.of_loop(self._command, self._arguments, access)
            try:
                return checked(await process.run_episode(task, access))
            except CallError as error:
                if access.limit is not None:
                    raise access.limit from None
                raise CallError(f"{self._command!r} {error}", again=error.again) from None


class _Process:
    """An agent's process, with the episodes that it runs."""

    @classmethod
    async def of_loop(cls, command: str, arguments: dict[str, Any], access: Access) -> _Process:
        """Return the process that runs episodes now; start it first, or again."""
        guard = _Guard.of_loop()
        key = command, json.dumps(arguments, default=str)
        async with guard.starts:
            process = guard.residents.get(key)
            if process is None or process._is_over:
                process = guard.residents[key] = cls()
                await process._start(command, arguments, access, guard)
            return process

    async def _start(
        self, command: str, arguments: dict[str, Any], access: Access, guard: _Guard
    ) -> None:
        words, place = split(command)
        words.insert(place, str(Path(__file__).with_name("resident.py")))
        folder = Path(os.environ.get("R3_RUN_DIR", guard.folder)) / "agents"
        folder.mkdir(exist_ok=True)
        self._log = folder / f"rank_{int(os.environ.get('RANK', '0')):05d}.txt"
        self._guard, self._why, self._is_over, self._is_ready = guard, "", False, False
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        with self._log.open("ab") as output:
            self._began = output.tell()
            self._process = await asyncio.create_subprocess_exec(
                *words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=os.environ | _unproxied(access),
                start_new_session=True,  # so that it can be killed with everything it started
                limit=_LONGEST_LINE,
            )
        guard.watch(self._process.pid, patient=True)
        self._say(arguments)
        self._reader = asyncio.create_task(self._read())

    async def run_episode(self, task: Prompt, access: Access) -> Any:
        """Pass an episode on; return what the class returned for it.

        Raises:
            CallError: it raised an exception, or the process died.
        """
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        how = {"base_url": access.base_url, "api_key": access.api_key, "name": MODEL}
        self._say({"episode": number, "task": row_of(task), **how})
        try:
            return await answer
        except asyncio.CancelledError as cancelled:
            self._say({"episode": number})
            if self._is_ready:
                asyncio.get_running_loop().call_later(_SILENT_S, self._kill_if_silent, number)
            else:
                text = f"the process of {self._log} is still loading its file: raise env.timeout_s"
                cancelled.add_note(text)
            raise

    async def end(self) -> None:
        """Let the process end with its input; kill what is left of its group."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._process.wait(), _END_S)
        self._kill()

    def _say(self, order: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        if not self._is_over:
            self._process.stdin.write(_line_of(order).encode() + b"\n")

    def _kill_if_silent(self, number: int) -> None:
        if number in self._waiting and not self._is_over:
            self._why = f"did not take the end of an episode for {_SILENT_S:g} s: R3 killed it"
            self._kill()

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def _read(self) -> None:
        assert self._process.stdout is not None
        try:
            while line := await self._process.stdout.readline():
                answer = json.loads(line)
                self._is_ready = True
                waiting = self._waiting.pop(answer.get("episode"), None)
                if waiting is not None and not waiting.done():
                    if "error" in answer:
                        waiting.set_exception(CallError(f"failed:\n{answer['error']}"))
                    else:
                        waiting.set_result(answer["result"])
        except ValueError:
            self._why = f"gave a result of more than {_LONGEST_LINE >> 20} MiB: R3 killed it"
            self._kill()
        self._is_over = True
        code = await self._process.wait()
        self._kill()
        self._guard.forget(self._process.pid)
        last = _last_lines(self._log, self._began)
        text = f"{self._why or _end_of(code)} (output: {self._log}){last}"
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(CallError(text, again=self._is_ready))


class _Guard:
    """Kills processes and removes the files of episodes when the rank is gone, even by SIGKILL.

    A process of its own, which sees the end of its input then.

    Attributes:
        folder: for the files of episodes.
        residents: processes that stay, by command and arguments.
        starts: held while one is started.
    """

    _PROGRAM = """
import os, shutil, signal, sys, time
groups = {}
for line in sys.stdin:
    group, patience = line.split()
    groups[int(group)] = float(patience)
    if patience == "-1":
        del groups[int(group)]
began = time.monotonic()
for group, patience in sorted(groups.items(), key=lambda each: each[1]):
    try:
        while time.monotonic() - began < patience:
            os.killpg(group, 0)
            time.sleep(0.05)
        os.killpg(group, signal.SIGKILL)
    except OSError:
        pass
shutil.rmtree(sys.argv[1], ignore_errors=True)
"""

    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="r3-episodes-")
        self.residents: dict[tuple[str, str], _Process] = {}
        self.starts = asyncio.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", self._PROGRAM, self.folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C must not end it
            text=True,
        )
        self._task = asyncio.create_task(self._until_the_loop_ends())

    @classmethod
    def of_loop(cls) -> _Guard:
        """The guard of this event loop."""
        loop = asyncio.get_running_loop()
        if loop not in _GUARDS:
            _GUARDS[loop] = cls()
        return _GUARDS[loop]

    def watch(self, group: int, *, patient: bool = False) -> None:
        """A process group begins; a patient guard lets it end by itself first."""
        self._tell(f"{group} {_END_S if patient else 0}\n")

    def forget(self, group: int) -> None:
        """A process group has been killed."""
        with suppress(ValueError):  # closed already, at the end of the loop
            self._tell(f"{group} -1\n")

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line)
        self._process.stdin.flush()

    async def _until_the_loop_ends(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.gather(*(resident.end() for resident in self.residents.values()))
            self._process.communicate()


_GUARDS: WeakKeyDictionary[asyncio.AbstractEventLoop, _Guard] = WeakKeyDictionary()


def row_of(task: Prompt) -> dict[str, Any]:
    """What agents get of a row."""
    names = ("id", "messages", "answer", "answers", "tools")
    return {name: getattr(task, name) for name in names} | {"metadata": dict(task.metadata)}


def _line_of(value: Any) -> str:
    return json.dumps(value, default=str)


def _environment(access: Access, folder: Path) -> dict[str, str]:
    keys = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN")
    models = ("OPENAI_MODEL", "ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL")
    return os.environ | {
        **dict.fromkeys(models, MODEL),
        **dict.fromkeys(keys, access.api_key),
        "OPENAI_BASE_URL": access.base_url,
        "ANTHROPIC_BASE_URL": access.base_url.removesuffix("/v1"),
        "R3_TASK_FILE": str(folder / "task.json"),
        "R3_RESULT_FILE": str(folder / "result.json"),
        **_unproxied(access),
    }


def _unproxied(access: Access) -> dict[str, str]:
    """A proxy could not reach this machine."""
    host, names = str(urlsplit(access.base_url).hostname), ("NO_PROXY", "no_proxy")
    return {name: ",".join(filter(None, [os.environ.get(name), host])) for name in names}


def _end_of(code: int) -> str:
    if code < 0:
        return f"ended with signal {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def _result(file: Path) -> Any:
    """Return the checked content of a result file.

    Raises:
        CallError: there is no such file, or it holds something else.
    """
    try:
        value = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise CallError("wrote no result to R3_RESULT_FILE") from None
    except (OSError, ValueError) as error:
        raise CallError(f"wrote a result that is not JSON ({error})") from None
    return checked(value)


def checked(value: Any) -> Any:
    """Return what a workflow's `run` returns for an agent's result.

    Raises:
        CallError: it is an object with other keys.
    """
    if not isinstance(value, dict):
        return value
    if "reward" not in value or not value.keys() <= {"reward", "metrics"}:
        raise CallError(
            f"gave the result {value!r}: an object has the key reward and may have metrics"
        )
    return value["reward"], value.get("metrics") or {}


def _last_lines(file: Path, start: int = 0) -> str:
    """The end of what a command printed."""
    with suppress(FileNotFoundError):
        with file.open("rb") as output:
            output.seek(max(start, file.stat().st_size - _LAST_BYTES))
            lines = output.read().decode(errors="replace")
        if last := lines.rstrip().splitlines()[-_LAST_LINES:]:
            return "; its last lines:\n" + "\n".join(f"  {line}" for line in last)
    return "; it printed nothing"
