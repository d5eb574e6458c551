"""A Hugging Face hub on this machine: its answers about a model, and its files, with resumption.

As much of its protocol as `huggingface_hub` asks for to download from it. `HF_ENDPOINT` set to its
address, nobody asks the real one.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

from kit.base.run import RELEASES_FOLDER

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ADDRESSES = {
    "about": re.compile(r"/api/models/(.+/.+)/revision/(.+)"),
    "file": re.compile(r"/(.+/.+)/resolve/([^/]+)/(.+)"),
}


class Hub(ThreadingHTTPServer):
    """Serves the files of `folder` as the one model `repository`, at the revisions `revisions`.

    `asked` are the requests so far, (path, Range). `cut` bytes into a file the connection breaks,
    once; of the files in `spoilt` other bytes come than it tells.
    """

    daemon_threads = True

    def __init__(self, folder: Path, repository: str, revisions: tuple[str, ...]):
        super().__init__(("127.0.0.1", 0), Answer)
        self.folder = folder
        self.repository = repository
        self.revisions = revisions
        self.asked: list[tuple[str, str | None]] = []
        self.cut: int | None = None
        self.spoilt: set[str] = set()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request, client_address) -> None:
        """A client that has gone is no matter."""


class Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.asked.append((path, self.headers["Range"]))
        for kind, address in ADDRESSES.items():
            found = address.fullmatch(path)
            if found:
                repository, revision = found[1], found[2]
                if repository != self.server.repository:
                    self.refuse("RepoNotFound")
                elif revision not in (*self.server.revisions, COMMIT):
                    self.refuse("RevisionNotFound")
                elif kind == "about":
                    self.describe()
                else:
                    self.send(self.server.folder / found[3])
                return
        self.refuse("EntryNotFound")

    def refuse(self, code: str) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def describe(self) -> None:
        siblings = []
        for path in sorted(self.server.folder.iterdir()):
            data = path.read_bytes()
            file = {"rfilename": path.name, "size": len(data), "blobId": "0" * 40}
            if path.suffix in (".pth", ".safetensors"):
                sha256 = hashlib.sha256(data).hexdigest()
                file["lfs"] = {"sha256": sha256, "size": len(data), "pointerSize": 130}
            siblings.append(file)
        told = {"id": self.server.repository, "sha": COMMIT, "siblings": siblings}
        told |= {"private": False, "downloads": 0, "likes": 0, "tags": []}
        body = json.dumps(told).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def send(self, path: Path) -> None:
        if not path.is_file():
            self.refuse("EntryNotFound")
            return
        data = path.read_bytes()
        if path.name in self.server.spoilt:
            data = bytes(byte ^ 1 for byte in data)
        first = 0
        if self.headers["Range"]:
            first = int(re.fullmatch(r"bytes=(\d+)-", self.headers["Range"])[1])
        self.send_response(206 if first else 200)
        self.send_header("Content-Length", str(len(data) - first))
        self.end_headers()
        if self.server.cut is not None and first < self.server.cut < len(data):
            self.wfile.write(data[first : self.server.cut])
            self.server.cut = None
            return
        self.wfile.write(data[first:])

    def log_message(self, *_) -> None:
        """Quiet."""


@contextlib.contextmanager
def serving(folder: Path, repository: str, *revisions: str) -> Iterator[Hub]:
    """A hub with the files of `folder`, while the block lasts; what it gave goes with it."""
    forget_releases()
    hub = Hub(folder, repository, revisions)
    thread = threading.Thread(target=hub.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()
        forget_releases()


def forget_releases() -> None:
    """Another test's hub may have another release by the same name."""
    runs = os.environ.get("KIT_RUNS")
    if runs:
        shutil.rmtree(Path(runs) / RELEASES_FOLDER, ignore_errors=True)
