"""A Hugging Face hub on this machine: its answers about a model, and its files, with resumption.

As much of its protocol as `huggingface_hub` asks for to download from it. `HF_ENDPOINT` set to its
address, nobody asks the real one.
"""

import base64
import contextlib
import hashlib
import json
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest.mock import patch
from urllib.parse import unquote, urlsplit

from xtts_texts import write_readers_release

from kit.base.run import RELEASES_FOLDER
from kit.extras.xtts_v2.base import XTTS_V2

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ABOUT = r"/api/models/(.+/.+)/revision/(.+)"
FILE = r"/(.+/.+)/resolve/([^/]+)/(.+)"
# A repository that is made and filled in this way needs no other protocol (LFS, Xet).
PREUPLOAD = r"/api/(?:models|spaces)/(.+/.+)/preupload/main"
UPLOAD = r"/api/(?:models|spaces)/(.+/.+)/commit/main"


class Hub(ThreadingHTTPServer):
    """Serves the files of `folder` as the one model `repository`, at the revisions `revisions`.

    `asked` are the requests so far, (path, Range). `cut` bytes into a file the connection breaks,
    once; of the files in `spoilt` other bytes come than it tells. With a `token` it is private;
    what is uploaded goes to `folder`, a Space's files to `folder`-space. `elsewhere` is an address
    that files are redirected to.
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
        self.token = ""
        self.created: list[dict] = []
        self.elsewhere = ""
        self.authorised: list[str | None] = []  # the header of each request

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request, client_address) -> None:
        """A client that has gone is no matter."""


class Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.asked.append((path, self.headers["Range"]))
        self.server.authorised.append(self.headers["Authorization"])
        file = re.fullmatch(FILE, path)
        asked = re.fullmatch(ABOUT, path) or file
        if self.server.token and self.headers["Authorization"] != f"Bearer {self.server.token}":
            self.refuse("RepoNotFound", 401)
        elif file and self.server.elsewhere:
            self.head(302, Location=self.server.elsewhere + path)
        elif not asked:
            self.refuse("EntryNotFound")
        elif asked[1] != self.server.repository:
            self.refuse("RepoNotFound")
        elif asked[2] not in (*self.server.revisions, COMMIT):
            self.refuse("RevisionNotFound")
        elif asked is file:
            self.send(self.server.folder / file[3])
        else:
            self.describe()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        path = unquote(urlsplit(self.path).path)
        address = f"{self.server.address}/{self.server.repository}"
        if self.headers["Authorization"] != f"Bearer {self.server.token}":
            self.refuse("RepoNotFound", 401)
        elif path == "/api/repos/create":
            self.server.created.append(json.loads(body))
            self.answer({"url": address})
        elif re.fullmatch(PREUPLOAD, path):
            wanted = {"uploadMode": "regular", "shouldIgnore": False}
            files = json.loads(body)["files"]
            self.answer({"files": [{"path": file["path"], **wanted} for file in files]})
        elif re.fullmatch(UPLOAD, path):
            folder = self.server.folder
            space = folder.with_name(f"{folder.name}-space")
            self.keep(body, space if "/spaces/" in path else folder)
            url = f"{address}/commit/{COMMIT}"
            self.answer({"success": True, "commitOid": COMMIT, "commitUrl": url, "hookOutput": ""})
        else:
            self.answer({"errors": [], "warnings": []})

    def keep(self, commit: bytes, folder: Path) -> None:
        """Write the files of a commit, which are lines of JSON."""
        for line in commit.splitlines():
            entry = json.loads(line)
            if entry["key"] == "file":
                path = folder / entry["value"]["path"]
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(base64.b64decode(entry["value"]["content"]))

    def head(self, status: int, length: int = 0, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(length), **headers}.items():
            self.send_header(name, value)
        self.end_headers()

    def answer(self, content: dict) -> None:
        body = json.dumps(content).encode()
        self.head(200, len(body), **{"Content-Type": "application/json"})
        self.wfile.write(body)

    def refuse(self, code: str, status: int = 404) -> None:
        self.head(status, **{"X-Error-Code": code})

    def describe(self) -> None:
        siblings = []
        for path in sorted(p for p in self.server.folder.iterdir() if p.is_file()):
            data = path.read_bytes()
            file = {"rfilename": path.name, "size": len(data), "blobId": "0" * 40}
            if path.suffix in (".pth", ".safetensors"):
                sha256 = hashlib.sha256(data).hexdigest()
                file["lfs"] = {"sha256": sha256, "size": len(data), "pointerSize": 130}
            siblings.append(file)
        about = {"id": self.server.repository, "sha": COMMIT, "siblings": siblings}
        about |= {"private": False, "downloads": 0, "likes": 0, "tags": []}
        self.answer(about)

    def send(self, path: Path) -> None:
        if not path.is_file():
            self.refuse("EntryNotFound")
            return
        data = path.read_bytes()
        if path.name in self.server.spoilt:
            data = bytes(byte ^ 1 for byte in data)
        first, last = 0, len(data) - 1
        if asked := re.fullmatch(r"bytes=(\d+)-", self.headers["Range"] or ""):
            first = int(asked[1])
        self.head(206 if asked else 200, last + 1 - first)
        if self.server.cut is not None and first < self.server.cut <= last:
            last, self.server.cut = self.server.cut - 1, None
        self.wfile.write(data[first : last + 1])

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
    if runs := os.environ.get("KIT_RUNS"):
        shutil.rmtree(Path(runs) / RELEASES_FOLDER, ignore_errors=True)


@contextlib.contextmanager
def hub_with_a_release() -> Iterator[dict[str, str]]:
    """What a process's environment says of it while the block lasts, as this one's does."""
    with tempfile.TemporaryDirectory(prefix="kit-hub-") as folder:
        release = write_readers_release(Path(folder) / "XTTS-v2")
        with serving(release, XTTS_V2.repository, XTTS_V2.revision) as hub:
            reported = {"HF_ENDPOINT": hub.address, "KIT_ACCEPT_LICENSE": "CPML"}
            with patch.dict(os.environ, reported):
                yield reported
