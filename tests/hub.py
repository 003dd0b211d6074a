"""A server in the protocol of the Hugging Face hub, with folders of this machine as models.

It counts what is asked for, and can stop in the middle of a file once.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from urllib.parse import unquote, urlsplit

_API = re.compile(r"/api/models/([^/]+/[^/]+)/(revision|tree)/([^/?]+)")
_FILE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


def sha_of(folder: Path) -> str:
    """The commit of a folder: another one if a file changes."""
    files = (f"{file.relative_to(folder)}:{_oid(file)}" for file in _files(folder))
    return hashlib.sha1("\n".join(files).encode()).hexdigest()


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file())


def _oid(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


@dataclass
class Hub:
    """Models by name, and what clients have asked for.

    Attributes:
        models: folder by name and branch.
        gated: names that nobody may read.
        stalls: bytes after which the next transfer of a file stops for good, by its name.
        stalled: set when one has.
        claimed: sizes that the listing names in place of the true ones, by file.
        asked: number of requests by method and path.
        sent: bytes of files by name.
    """

    models: dict[str, dict[str, Path]]
    gated: set[str] = field(default_factory=set)
    stalls: dict[str, int] = field(default_factory=dict)
    stalled: Event = field(default_factory=Event)
    claimed: dict[str, int] = field(default_factory=dict)
    asked: Counter[str] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)
    url: str = ""

    def folder(self, name: str, revision: str) -> Path | None:
        """The folder of a branch or a commit."""
        branches = self.models[name]
        commits = {sha_of(folder): folder for folder in branches.values()}
        return branches.get(revision) or commits.get(revision)


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Serve the models on a port of this machine; `hub.url` is the address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            self.answer()

        do_HEAD = do_GET

        def answer(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.asked[f"{self.command} {path}"] += 1
            api, file = _API.match(path), _FILE.match(path)
            found = api or file
            if found is None or found[1] not in hub.models:
                return self.fail(404, "RepoNotFound")
            if found[1] in hub.gated:
                return self.fail(403, "GatedRepo")
            revision = api[3] if api else file[2] if file else ""
            if (folder := hub.folder(found[1], revision)) is None:
                return self.fail(404, "RevisionNotFound")
            if api:
                return self.listing(api, folder)
            assert file is not None
            if not (folder / file[3]).is_file():
                return self.fail(404, "EntryNotFound")
            return self.file(folder, file[3])

        def listing(self, api: re.Match[str], folder: Path) -> None:
            names = [(str(file.relative_to(folder)), file) for file in _files(folder)]
            sizes = [(n, hub.claimed.get(n, file.stat().st_size), _oid(file)) for n, file in names]
            content: object = [
                {"type": "file", "path": n, "size": size, "oid": oid} for n, size, oid in sizes
            ]
            if api[2] == "revision":
                files = [{"rfilename": n, "size": size, "blobId": oid} for n, size, oid in sizes]
                content = {"id": api[1], "sha": sha_of(folder), "siblings": files}
            body = json.dumps(content).encode()
            self.begin(200, len(body), {"Content-Type": "application/json"})
            self.wfile.write(body)

        def file(self, folder: Path, name: str) -> None:
            content = (folder / name).read_bytes()
            wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
            start = int(wanted[1]) if wanted else 0
            more = {"ETag": f'"{_oid(folder / name)}"', "X-Repo-Commit": sha_of(folder)}
            if start:
                more["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            more["Accept-Ranges"] = "bytes"
            self.begin(206 if start else 200, len(content) - start, more)
            if self.command == "HEAD":
                return
            limit = hub.stalls.pop(name, 0)
            part = content[start : limit or None]
            hub.sent[name] += len(part)
            self.wfile.write(part)
            if limit:
                hub.stalled.set()
                with suppress(OSError):
                    self.connection.recv(1)  # until the client ends
                self.close_connection = True

        def fail(self, status: int, code: str) -> None:
            self.begin(status, 0, {"X-Error-Code": code, "X-Error-Message": code})

        def begin(self, status: int, length: int, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(length)}.items():
                self.send_header(name, value)
            self.end_headers()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
