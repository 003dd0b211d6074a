"""Run a command per episode: an agent that uses OpenAI's API, `--env.command "python agent.py"`.

The command gets OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL, finds the row in the JSON file
R3_TASK_FILE, and writes its reward as JSON to R3_RESULT_FILE. It is a process group of its own and
never outlives its episode, nor the rank, however that ends.
"""

from __future__ import annotations

import asyncio
import json
import os
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
                raise CallError(f"{self._command!r} {failure}{_last_lines(folder)}")
        except asyncio.CancelledError as cancelled:
            cancelled.add_note(f"{self._command!r} was stopped{_last_lines(folder)}")
            raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    async def _run(self, task: Prompt, access: Access, folder: Path, guard: _Guard) -> str:
        """Run the process to its end; return how it failed, "" if it did not."""
        row = {
            name: getattr(task, name) for name in ("id", "messages", "answer", "answers", "tools")
        }
        row["metadata"] = dict(task.metadata)
        (folder / "task.json").write_text(json.dumps(row, default=str), encoding="utf-8")
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
        if code < 0:
            return f"ended with signal {signal.Signals(-code).name}"
        return f"ended with exit code {code}" if code else ""


class _Guard:
    """Kills the commands in flight and removes their files when the rank is gone, even by SIGKILL.

    A process of its own, which sees the end of its input then.

    Attributes:
        folder: for the files of episodes.
    """

    _PROGRAM = """
import os, shutil, signal, sys
groups = set()
for line in sys.stdin:
    (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except OSError:
        pass
shutil.rmtree(sys.argv[1], ignore_errors=True)
"""

    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="r3-episodes-")
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

    def watch(self, group: int) -> None:
        """A process group begins."""
        self._tell(f"+{group}\n")

    def forget(self, group: int) -> None:
        """A process group has been killed."""
        with suppress(ValueError):  # closed already, at the end of the loop
            self._tell(f"-{group}\n")

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line)
        self._process.stdin.flush()

    async def _until_the_loop_ends(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self._process.communicate()


_GUARDS: WeakKeyDictionary[asyncio.AbstractEventLoop, _Guard] = WeakKeyDictionary()


def _environment(access: Access, folder: Path) -> dict[str, str]:
    environment = os.environ | {
        "OPENAI_BASE_URL": access.base_url,
        "OPENAI_API_KEY": access.api_key,
        "OPENAI_MODEL": MODEL,
        "R3_TASK_FILE": str(folder / "task.json"),
        "R3_RESULT_FILE": str(folder / "result.json"),
    }
    host = str(urlsplit(access.base_url).hostname)
    for name in ("NO_PROXY", "no_proxy"):  # a proxy could not reach this machine
        environment[name] = ",".join(filter(None, [os.environ.get(name), host]))
    return environment


def _result(file: Path) -> Any:
    """What a workflow's `run` returns for the content of a result file.

    Raises:
        CallError: there is no such file, or it holds something else.
    """
    try:
        value = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise CallError("wrote no result to R3_RESULT_FILE") from None
    except (OSError, ValueError) as error:
        raise CallError(f"wrote a result that is not JSON ({error})") from None
    if not isinstance(value, dict):
        return value
    if "reward" not in value or not value.keys() <= {"reward", "metrics"}:
        raise CallError(
            f"wrote the result {value!r}: an object has the key reward and may have metrics"
        )
    return value["reward"], value.get("metrics") or {}


def _last_lines(folder: Path) -> str:
    """The end of what a command printed."""
    with suppress(FileNotFoundError):
        lines = (folder / "output.txt").read_bytes()[-_LAST_BYTES:].decode(errors="replace")
        if last := lines.rstrip().splitlines()[-_LAST_LINES:]:
            return "; its last lines:\n" + "\n".join(f"  {line}" for line in last)
    return "; it printed nothing"
