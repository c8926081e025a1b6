"""A stand-in for the model hub on this machine: serves folders as repositories and remembers what it was asked.

A process uses it with `environment()`: the hub's own address, and a cache of its own, count from when huggingface_hub
is imported.
"""

import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = hashlib.sha1(b"the only commit", usedforsecurity=False).hexdigest()
_FILE = re.compile(r"/(?P<name>[\w.-]+/[\w.-]+)/resolve/(?:main|" + COMMIT + r")/(?P<file>[^?]+)")
_LIST = re.compile(r"/api/models/(?P<name>[\w.-]+/[\w.-]+)/(?P<what>tree|revision)/(?:main|" + COMMIT + ")")


@dataclass
class Hub:
    """`repositories`: name → folder."""

    repositories: Mapping[str, Path]
    asked: list[str] = field(default_factory=list)
    """Method and path of every request, in order; parts of files are marked."""
    address: str = ""

    def environment(self, cache: Path) -> dict[str, str]:
        """For a process whose hub this is."""
        return {"HF_ENDPOINT": self.address, "HF_HUB_OFFLINE": "0", "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1"}

    def fetched(self) -> Counter[str]:
        """How often each file was sent whole, by its path in the repository."""
        whole = [line.removeprefix("GET ") for line in self.asked if line.startswith("GET ") and "bytes" not in line]
        return Counter(match["file"] for line in whole if (match := _FILE.match(line)))

    def answer(self, path: str) -> tuple[bytes, dict[str, str]] | None:
        """Body and headers; None for what is not there."""
        if match := _FILE.match(path):
            file = self.repositories.get(match["name"], Path("/nowhere")) / match["file"]
            return (file.read_bytes(), self._headers(file)) if file.is_file() else None
        if not (match := _LIST.match(path)) or match["name"] not in self.repositories:
            return None
        root = self.repositories[match["name"]]
        files = [file for file in sorted(root.rglob("*")) if file.is_file()]
        tree = [
            {"type": "file", "path": str(f.relative_to(root)), "size": f.stat().st_size, "oid": _digest(f)}
            for f in files
        ]
        described = {"id": match["name"], "sha": COMMIT, "siblings": [{"rfilename": f["path"]} for f in tree]}
        return json.dumps(tree if match["what"] == "tree" else described).encode(), {"Content-Type": "application/json"}

    def _headers(self, file: Path) -> dict[str, str]:
        return {"ETag": f'"{_digest(file)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}


def _digest(file: Path) -> str:
    return hashlib.sha1(file.read_bytes(), usedforsecurity=False).hexdigest()


@contextmanager
def serving(repositories: Mapping[str, Path]) -> Iterator[Hub]:
    """A hub with these repositories, on a port that the system picks."""
    hub = Hub(repositories)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._reply(body=True)

        def do_HEAD(self) -> None:
            self._reply(body=False)

        def _reply(self, *, body: bool) -> None:
            part = self.headers.get("Range", "")
            hub.asked.append(f"{self.command} {self.path}{' ' + part if part else ''}")
            answer = hub.answer(self.path)
            content, headers = answer or (b"", {"X-Error-Code": "EntryNotFound"})
            status = 200 if answer else 404
            if answer and (match := re.fullmatch(r"bytes=(\d+)-(\d+)", part)):
                first, last = int(match[1]), min(int(match[2]), len(content) - 1)
                headers = {**headers, "Content-Range": f"bytes {first}-{last}/{len(content)}"}
                content, status = content[first : last + 1], 206
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if body:
                self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: `asked` has it."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
