"""`make setup` looks for packages where pip would, though uv reads no settings of pip."""

import os
import subprocess
import sys
from pathlib import Path

from tests.runs import program
from tests.sources import ROOT
from tools.uv_settings import variables

FILE = """
[global]
index-url = https://mirror.example/simple
extra-index-url =
    https://one.example/simple
    file:///two/simple
find-links = /wheels
timeout = 60
[install]
find-links =
    /more
    /and more
[list]
cert = /no.pem
"""


def test_settings_of_pip_become_those_of_uv(tmp_path: Path) -> None:
    (tmp_path / "pip.conf").write_text(FILE)
    environment = {name: value for name, value in os.environ.items() if "PIP" not in name}
    environment |= {"PIP_CONFIG_FILE": str(tmp_path / "pip.conf"), "PIP_CERT": "/own.pem"}
    environment |= {"PIP_TRUSTED_HOST": "mirror.example", "HOME": str(tmp_path)}
    environment |= {"XDG_CONFIG_DIRS": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    words = [sys.executable, "-m", "pip", "config", "list"]
    said = subprocess.run(words, env=environment, capture_output=True, text=True, check=True).stdout
    assert variables(said.splitlines()) == [
        "UV_DEFAULT_INDEX=https://mirror.example/simple",
        "UV_INDEX=https://one.example/simple file:///two/simple",
        "UV_FIND_LINKS=/more,/and,more",  # pip divides at spaces, too
        "SSL_CERT_FILE=/own.pem",
        "UV_INSECURE_HOST=mirror.example",
    ]


def test_no_settings_are_no_variables() -> None:
    assert variables([]) == []
    assert variables(["global.timeout='60'", "list.cert='/no.pem'"]) == []


def test_setup_does_not_change_the_python_of_an_environment(tmp_path: Path) -> None:
    for name in ("tools/setup_env.sh", "tools/uv_settings.py", "pyproject.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    (tmp_path / "requirements").mkdir()
    # Interpreters that answer both questions of the script: new enough, and which version.
    for name, version in ((".venv/bin/python", "3.11"), ("python3.12", "3.12")):
        interpreter = tmp_path / name
        interpreter.parent.mkdir(parents=True, exist_ok=True)
        interpreter.write_text(f"#!/bin/sh\necho {version}\n")
        interpreter.chmod(0o755)
        (tmp_path / f"requirements/{'cpu' if version == '3.11' else 'cpu-py312'}.txt").touch()
    setup = ["bash", str(tmp_path / "tools/setup_env.sh")]
    for given, said in (
        ("python3.12", "is Python 3.12, and .venv has Python 3.11. Move .venv away, or leave"),
        ("nowhere/python", "does not run, or is older than 3.11. .venv has Python 3.11: leave"),
    ):
        done = program(*setup, env={"PYTHON": str(tmp_path / given)})
        assert done.returncode == 1
        assert f"setup: PYTHON={tmp_path / given} {said} PYTHON out" in done.stderr.splitlines()[-1]
