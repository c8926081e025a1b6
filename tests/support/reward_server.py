"""`served` runs this project's reward server (async_flowrl/cli/reward_server.py) in a thread of this process."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from async_flowrl.cli.reward_server import build_app
from async_flowrl.cli.scorer import Score
from async_flowrl.rewards.http_contract import Limits


@contextmanager
def served(score: Score, limits: Limits | None = None, token: str | None = None) -> Iterator[str]:
    """Yields the URL of a server on loopback that scores with `score`; it ends with the block."""
    app = build_app(score, limits or Limits(), token)
    config = uvicorn.Config(app, log_level="error", access_log=False)
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        server.should_exit = True
        thread.join(60)
