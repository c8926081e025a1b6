"""Tests of docs/extending/reward.md: its rewards, as printed, score images in a real worker."""

import re
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from async_flowrl.config.schema import RewardConfig, RewardTerm
from async_flowrl.rewards.reward_worker import RewardWorker
from async_flowrl.types import Prompt, Scores

PAGE = Path(__file__).parents[3] / "docs" / "extending" / "reward.md"
BLOCKS = dict(re.findall(r"^<!-- reward: (\w+) -->\n```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE))
PROMPT = Prompt(0, "a red wall")
IMAGES = np.random.RandomState(0).randint(0, 256, (4, 8, 8, 3)).astype(np.uint8)


def score(name: str, **options: Any) -> Scores:
    """Scores by the block's reward, which is imported by its path as a user's is."""
    module = ModuleType(f"page_{name}")
    exec(BLOCKS[name], vars(module))
    sys.modules[module.__name__] = module
    config = RewardConfig(terms={"mine": RewardTerm(name=f"{module.__name__}:{name}", options=options)}, backoff=0.0)
    worker = RewardWorker(config, index=0, name="reward-0")
    try:
        scores = worker.score(worker.reward.weights, PROMPT, IMAGES)
        assert not scores.failed, scores.failed["mine"].traceback
        return scores
    finally:
        worker.close()
        del sys.modules[module.__name__]


def test_groupwise() -> None:
    means = IMAGES.mean(axis=(1, 2)) / 255
    assert score("redness").total == pytest.approx(means[:, 0] - means[:, 1:].mean(axis=1))


def test_pointwise_with_extras() -> None:
    scores = score("Exposure", target=0.4)
    light = scores.extras["mine"]["mean_light"]
    assert light == pytest.approx(IMAGES.mean(axis=(1, 2, 3)) / 255)
    assert scores.total == pytest.approx([-abs(float(x) - 0.4) for x in light])
    assert set(scores.extras["mine"]["verdict"]) == {"bright"}


def test_async() -> None:
    assert score("Patient").total == pytest.approx(10 / (1 + IMAGES.reshape(4, -1).std(axis=1)))


@pytest.fixture
def server() -> Iterator[str]:
    """A judge that is busy the first time: it answers the first byte of the image."""
    requests = count()

    class Judge(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            number = next(requests)
            body = self.rfile.read(int(self.headers["content-length"]))
            self.send_response(503 if number == 0 else 200)
            self.end_headers()
            self.wfile.write(b'{"score": %d}' % body[0])

        def log_message(self, *arguments: object) -> None:
            pass

    served = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    thread = threading.Thread(target=served.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{served.server_port}/judge"
    served.shutdown()
    thread.join()
    served.server_close()


def test_remote(server: str) -> None:
    pytest.importorskip("httpx")
    scores = score("Remote", url=server)
    assert scores.total == tuple(float(image[0, 0, 0]) for image in IMAGES)
    assert scores.retries == {"mine": 1}
