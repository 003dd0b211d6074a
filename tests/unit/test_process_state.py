"""What users' code changes for the whole process is set back, and the person hears who did it; the
limit of open files is raised.
"""

import os
import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from r3.runtime import open_missing
from r3.tools.beside import Surroundings
from r3.user_code import load
from tests.errors import Capsys
from tests.runs import program
from tests.tables import table
from tests.world import ROOT


@pytest.mark.parametrize(("line", "said"), table("process_changes"))
def test_a_file_that_changes_the_process_when_it_is_imported_is_undone(
    line: str, said: str, tmp_path: Path, capsys: Capsys
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        f"import locale, os, signal, numpy, torch\n{line}\ndef f(response, prompt): return 1.0\n"
    )
    before = Surroundings()
    try:
        assert load(f"{file}:f")("", None) == 1.0
        text = capsys.readouterr().err
        assert text.startswith(f"note: {file} changed ") and said in text
        assert text.endswith("; R3 has set it back\n") and text.count("note:") == 1
        before.restore("this test")
        assert capsys.readouterr().err == "", "nothing was left to set back"
    finally:
        before.restore("this test")


def test_what_a_thread_changed_is_set_back_and_said_once(capsys: Capsys) -> None:
    kept = Surroundings()
    for _ in range(2):
        thread = threading.Thread(target=torch.set_default_dtype, args=(torch.float64,))
        thread.start()
        thread.join()
        kept.restore("your code (mine.py)")
        assert torch.get_default_dtype() is torch.float32
    assert capsys.readouterr().err.count("your code (mine.py) changed torch's default dtype") == 1


def test_a_folder_that_users_code_removed_is_left(tmp_path: Path) -> None:
    kept, gone = Surroundings(), tmp_path / "gone"
    before = Path.cwd()
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()
    kept.restore("your code")
    assert Path.cwd() == before


_SAYS = """
import sys, time
from r3.runtime.terminal import own_streams, say
own_streams()
time.sleep(float(sys.argv[1]))  # until the reader has left
print("of users' code")
say("to stdout")
say("\\ud800 \\N{SNOWMAN}", error=True)
sys.exit(7)
"""


@pytest.mark.parametrize(
    "console", ["a reader that leaves", "a full disk", "closed", "one that shows ASCII only"]
)
def test_a_console_that_takes_no_line_ends_no_program(console: str, tmp_path: Path) -> None:
    """The exit code is the program's own, and no traceback is shown."""
    (tmp_path / "says.py").write_text(_SAYS)
    says = f"{sys.executable} says.py"
    command = {
        "a reader that leaves": f"({says} 1; echo $? >code) 2>errors | true",
        "a full disk": f"({says} 0; echo $? >code) >/dev/full 2>/dev/full",
        "closed": f"({says} 0; echo $? >code) <&- >&- 2>&-",
        "one that shows ASCII only": f"(PYTHONIOENCODING=ascii {says} 0; echo $? >code) 2>errors",
    }[console]
    subprocess.run(["bash", "-c", command], cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, timeout=60)
    assert (tmp_path / "code").read_text() == "7\n"
    errors = tmp_path / "errors"
    assert "Traceback" not in (errors.read_text() if errors.exists() else "")


def test_streams_that_were_closed_are_no_file_of_the_run(tmp_path: Path) -> None:
    """Without, the lock of the folder would be the console."""
    text = "import os, sys; from r3.runtime.terminal import own_streams, say; own_streams(); "
    text += "file = open(sys.argv[1], 'w'); say('a'); os.write(2, b'b'); file.write('its own')"
    command = f'{sys.executable} -c "$0" "$1" <&- >&- 2>&-'
    file = tmp_path / "file"
    subprocess.run(["bash", "-c", command, text, file], cwd=ROOT, timeout=60, check=True)
    assert file.read_text() == "its own"
    open_missing()  # with all open, it changes nothing


_REDIRECTS = """
import contextlib, io, sys, threading
from r3.runtime.terminal import own_streams, say
own_streams()
first, second = threading.Barrier(2), threading.Barrier(2)
def grader(is_last):
    with contextlib.redirect_stdout(io.StringIO()):
        first.wait()
        if is_last:
            second.wait()
    if not is_last:
        second.wait()
threads = [threading.Thread(target=grader, args=(each,)) for each in (False, True)]
threads[0].start()
while not isinstance(sys.stdout, io.StringIO):
    pass
threads[1].start()
for each in threads:
    each.join()
assert isinstance(sys.stdout, io.StringIO), "left by the threads"
say("done")
"""


def test_functions_that_catch_stdout_in_threads_lose_nothing_of_ours() -> None:
    done = program(sys.executable, "-c", _REDIRECTS)
    assert (done.stdout, done.stderr) == ("done\n", "")


@pytest.mark.parametrize(("command", "expected"), [("ulimit -Sn 64", None), ("ulimit -n 64", 64)])
def test_the_limit_of_open_files_is_raised_as_far_as_it_may(
    command: str, expected: int | None
) -> None:
    text = "from r3.tools.beside.machine import raise_file_limit; print(raise_file_limit())"
    done = program("bash", "-c", f'{command}; exec "$0" -c "$1"', sys.executable, text)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert int(done.stdout) == (expected or min(hard, 1 << 16)), done.stderr
