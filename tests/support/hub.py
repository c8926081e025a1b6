"""A stand-in for the Hugging Face hub on this machine: it serves folders as repositories and records the requests.

A process uses it if it is started with the variables of `Hub.environment`, which huggingface_hub reads when it is
imported; `used_here` sets in the test's own process what huggingface_hub has read from them.
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

import pytest

COMMIT = hashlib.sha1(b"the only commit", usedforsecurity=False).hexdigest()
_FILE = re.compile(r"/(?P<name>[\w.-]+/[\w.-]+)/resolve/(?:main|" + COMMIT + r")/(?P<file>[^?]+)")
_LIST = re.compile(r"/api/models/(?P<name>[\w.-]+/[\w.-]+)/(?P<what>tree|revision)/(?:main|" + COMMIT + ")")


@dataclass
class Hub:
    """The hub. `repositories` is name (`owner/model`) → folder; every repository has one commit, COMMIT."""

    repositories: Mapping[str, Path]
    asked: list[str] = field(default_factory=list)
    """Method and path of every request, in order, with the `Range` header of requests for a part of a file."""
    address: str = ""

    def environment(self, cache: Path) -> dict[str, str]:
        """Returns the variables for a process that shall use this hub, with the folder `cache` as its cache."""
        return {"HF_ENDPOINT": self.address, "HF_HUB_OFFLINE": "0", "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1"}

    def fetched(self) -> Counter[str]:
        """Returns path in the repository → how often the whole file was requested."""
        whole = [line.removeprefix("GET ") for line in self.asked if line.startswith("GET ") and "bytes" not in line]
        return Counter(match["file"] for line in whole if (match := _FILE.match(line)))

    def answer(self, path: str) -> tuple[bytes, dict[str, str]] | None:
        """Returns body and headers of the answer; None if the path does not exist."""
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


def used_here(monkeypatch: pytest.MonkeyPatch, cache: Path, address: str | None = None) -> None:
    """Gives this process a hub cache, and the hub at `address`; without an address huggingface_hub asks nobody.

    Other tests of the process have imported huggingface_hub already, which reads its variables only then. Its own
    client has a copy of the address.
    """
    from huggingface_hub import constants, hf_api

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", address is None)
    if address is not None:
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, address)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(hf_api.api, "endpoint", address)


def _digest(file: Path) -> str:
    return hashlib.sha1(file.read_bytes(), usedforsecurity=False).hexdigest()


@contextmanager
def serving(repositories: Mapping[str, Path]) -> Iterator[Hub]:
    """Yields a hub with these repositories, which runs in a thread on a free port until the block ends."""
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
            """Prints nothing, because `asked` records the requests."""

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
