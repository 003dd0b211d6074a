"""An environment of Harbor without containers: namespaces of Linux around a folder.

Commands see the programs of this machine read-only, and /app, /logs, /tests, /solution and /tmp of
their trial. They have no network, and what they start ends with them. The Dockerfile of a task is
not built: its other files are in /app, the working directory.
"""

import asyncio
import shutil
import tempfile
from pathlib import Path
from typing import Any, override

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities

NAMESPACES = ["--map-root-user", "--mount", "--net", "--pid", "--fork", "--kill-child"]
OWN = ("app", "logs/agent", "logs/verifier", "logs/artifacts", "tests", "solution", "tmp")
PATH = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
# Makes the folder $1 the root, with the system's folders in it.
ENTER = """
set -e
for each in bin sbin lib lib32 lib64 usr etc dev; do
    [ -e "/$each" ] || continue
    if [ -L "/$each" ]; then [ -L "$1/$each" ] || ln -s "$(readlink "/$each")" "$1/$each"
    else
        mkdir -p "$1/$each"; mount --rbind "/$each" "$1/$each"
        [ "$each" = dev ] || mount -o remount,bind,ro "$1/$each"
    fi
done
mkdir -p "$1/proc"; mount -t proc proc "$1/proc"
exec chroot "$1" bash -c 'cd "$0" && eval "$1"' "$2" "$3"
"""


class Local(BaseEnvironment):
    """One folder per trial."""

    @staticmethod
    @override
    def type() -> str:
        return "local"

    @property
    @override
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True)

    @override
    def _validate_definition(self) -> None:
        pass

    @override
    async def start(self, force_build: bool) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="harbor-local-"))
        for each in OWN:
            (self.root / each).mkdir(parents=True)
        not_built = shutil.ignore_patterns("Dockerfile", "docker-compose*")
        shutil.copytree(
            self.environment_dir, self.root / "app", dirs_exist_ok=True, ignore=not_built
        )

    @override
    async def stop(self, delete: bool) -> None:
        shutil.rmtree(self.root, ignore_errors=True)

    def inside(self, path: Any) -> Path:
        """The place of an absolute path of the environment; no link leads out of it."""
        found = (self.root / str(path).lstrip("/")).resolve()
        if not found.is_relative_to(self.root.resolve()):
            raise ValueError(f"{path} is a link out of the environment")
        return found

    @override
    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        self.inside(target_path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source_path, self.inside(target_path))

    @override
    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        shutil.copytree(source_dir, self.inside(target_dir), dirs_exist_ok=True)

    @override
    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        shutil.copy(self.inside(source_path), target_path)

    @override
    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        shutil.copytree(self.inside(source_dir), target_dir, dirs_exist_ok=True, symlinks=True)

    @override
    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        words = ["bash", "-c", ENTER, "bash", str(self.root), cwd or "/app", command]
        process = await asyncio.create_subprocess_exec(
            *("unshare", *NAMESPACES, *words),
            env={"PATH": PATH, "HOME": "/tmp", "LANG": "C.UTF-8", **(env or {})},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            out, err = await asyncio.wait_for(process.communicate(), timeout_sec)
        finally:
            if process.returncode is None:
                process.kill()  # and with it everything in its process namespace
                await process.wait()
        code = process.returncode or 0
        return ExecResult(stdout=out.decode(), stderr=err.decode(), return_code=code)
