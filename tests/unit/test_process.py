"""The limit of open files."""

import resource
import sys

import pytest

from tests.runs import program


@pytest.mark.parametrize(("command", "expected"), [("ulimit -Sn 64", None), ("ulimit -n 64", 64)])
def test_the_limit_of_open_files_is_raised_as_far_as_it_may(
    command: str, expected: int | None
) -> None:
    text = "from r3.tools.beside.machine import raise_file_limit; print(raise_file_limit())"
    done = program("bash", "-c", f'{command}; exec "$0" -c "$1"', sys.executable, text)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert int(done.stdout) == (expected or min(hard, 1 << 16)), done.stderr
