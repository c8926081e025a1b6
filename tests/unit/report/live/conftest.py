"""Fixtures of the live report: a run, and servers that show it."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from async_flowrl.report.live import Access, Server, listening
from async_flowrl.report.live_document import LiveDocument
from tests.unit.report.live.served import Client, write_steps


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of three steps with one picture."""
    folder = tmp_path / "run"
    (folder / "images/step_000000").mkdir(parents=True)
    (folder / "config.yaml").write_text("name: run\ntotal_steps: 9\n")
    write_steps(folder, 3)
    Image.fromarray(np.full((4, 4, 3), 9, dtype=np.uint8)).save(folder / "images/step_000000/000_0.png")
    return folder


@pytest.fixture
def serving() -> Iterator[Callable[..., Client]]:
    servers: list[Server] = []

    def start(folder: Path, access: Access | None = None, **options: Any) -> Client:
        server = listening(("127.0.0.1", 0), LiveDocument([folder], **options), access or Access())
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        servers.append(server)
        return Client(server)

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()
