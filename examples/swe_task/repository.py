"""A temporary copy of a row's repository, a shell in it, and its score. Standard library only.

Commands run in a process namespace and without network where the system allows it: whatever they
start ends with them, even a daemon, also when the agent is killed. They can still write wherever
the user can: for a model that could do harm, run the agent in a container.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

PYTHON = os.path.abspath(sys.executable)
LIMIT_S = 10  # for a command
TESTS_S = 120  # for all tests; on a busy machine 10 s of computing may take as long
LONGEST = 400  # characters of output that the model sees
NAMESPACES = ["--map-root-user", "--net", "--pid", "--mount-proc"]
ISOLATED = ["unshare", *NAMESPACES, "--fork", "--kill-child"]
# Ends the process group of a command, daemons excepted.
LIMITED = ["timeout", "--signal=KILL", str(TESTS_S)]
LIMITS = "ulimit -c 0 -f 2000 -t 10 -v 4000000"  # 2 MB per file, 10 s of computing, 4 GB
GROUPS = "tests", "hidden"
IDENTITY = ["-c", "user.name=rows", "-c", "user.email=rows@localhost"]
# The tests import the repository, so their process may be stopped by it: only a report counts.
RUN_TESTS = """
import json, os, sys, unittest
report = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
sys.path.append(os.getcwd())  # at the end: no file of the repository replaces unittest
good = {}
for name in sys.argv[1:]:
    result = unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromName(name))
    good[name] = result.wasSuccessful() and result.testsRun > 0
report.write(json.dumps(good))
report.flush()
"""


def isolation() -> list[str]:
    """The words before a command: those that isolate it, or those that limit its time alone."""
    try:
        done = subprocess.run([*ISOLATED, "true"], capture_output=True, check=False)
    except FileNotFoundError:
        return LIMITED
    return LIMITED if done.returncode else ISOLATED


class Repository:
    """A copy of the repository of one episode; use it as a context."""

    def __init__(self, row: dict[str, Any], prefix: list[str]) -> None:
        """Take the columns of a row, and what `isolation` found."""
        self._row, self._prefix = row, prefix

    def __enter__(self) -> "Repository":
        self._folder = Path(tempfile.mkdtemp(prefix="swe-task-"))
        self._original, self.path = self._folder / "original", self._folder / "copy"
        self._write(self._original, self._row["files"] | self._row["tests"])
        (self._folder / "excluded").write_text("__pycache__/\n")
        self._git(self._original, "init", "--quiet", "--template=")
        self._git(self._original, "add", "--all")
        self._git(self._original, *IDENTITY, "commit", "--quiet", "--message", "The repository")
        shutil.copytree(self._original, self.path)
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def run(self, command: str) -> tuple[str, int]:
        """Run a command; return what the model sees of its output, and its exit code."""
        code, text = self._run(["bash", "-c", command], self.path, LIMIT_S)
        left_out = len(text) - LONGEST
        if left_out > 0:
            half = LONGEST // 2
            text = f"{text[:half]}\n[... {left_out} characters left out ...]\n{text[-half:]}"
        if code is None:
            return f"{text}\n[ended after {LIMIT_S} s]", 124
        return text, code

    def edits(self) -> str:
        """What the agent has changed, tests excluded; its own .git and the index do not count."""
        index = {"GIT_INDEX_FILE": str(self._folder / "index")}
        here = [f"--git-dir={self._original / '.git'}", f"--work-tree={self.path}"]
        self._git(self.path, *here, "add", "--all", env=index)
        names = [f":(exclude,top){name}" for name in self._row["tests"] | self._row["hidden"]]
        words = ["diff", "--cached", "--binary", "HEAD", "--", ".", *names]
        return self._git(self.path, *here, *words, env=index)

    def score(self, edits: str) -> tuple[float, dict[str, int]]:
        """Apply edits to a fresh copy and run all tests; return the reward and metrics."""
        if not edits:
            return 0.0, {"swe_valid": 0, "swe_solved": 0, "swe_late": 0}
        fresh = Path(tempfile.mkdtemp(dir=self._folder)) / "fresh"
        shutil.copytree(self._original, fresh)
        self._git(fresh, "apply", "--whitespace=nowarn", "-", text=edits)
        self._write(fresh, self._row["tests"] | self._row["hidden"])
        groups = [[name.removesuffix(".py") for name in self._row[key]] for key in GROUPS]
        names = [name for group in groups for name in group]
        code, report = self._run([PYTHON, "-I", "-c", RUN_TESTS, *names], fresh, TESTS_S)
        try:
            good = json.loads(report)
        except ValueError:
            good = {}
        visible, hidden = (all(good.get(name) is True for name in group) for group in groups)
        solved = visible and hidden
        metrics = {"swe_valid": visible, "swe_solved": solved, "swe_late": code is None}
        return (1.0 if solved else 0.1 * visible), metrics

    def _run(self, words: list[str], folder: Path, limit_s: int) -> tuple[int | None, str]:
        """Run a program; its output goes to a file, whose size has a limit."""
        shell = ["bash", "-c", f'{LIMITS}; exec "$@"', "bash", *words]
        with (self._folder / "output").open("w+b") as output:
            process = subprocess.Popen(
                [*self._prefix, *shell],
                cwd=folder,
                env=os.environ
                | {"BASH_ENV": "commands.sh", "PYTHONDONTWRITEBYTECODE": "1", "HOME": str(folder)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT if folder == self.path else subprocess.DEVNULL,
            )
            try:
                code = process.wait(timeout=limit_s)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                process.kill()  # with it everything in its process namespace
                if self._prefix == LIMITED:
                    with suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            output.seek(0)
            return code, output.read().decode(errors="replace").strip()

    def _write(self, folder: Path, files: dict[str, str]) -> None:
        for name, text in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def _git(
        self, folder: Path, *words: str, text: str = "", env: dict[str, str] | None = None
    ) -> str:
        done = subprocess.run(
            ["git", "-c", f"core.excludesFile={self._folder / 'excluded'}", *words],
            cwd=folder,
            env=os.environ | (env or {}),
            input=text,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout
