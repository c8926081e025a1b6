"""Test of the live report in a real browser: new points and images of the running run appear without a reload."""

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.runs import LOCAL, ROOT
from tests.support.chromium import NONE, chromium

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
CHROMIUM = chromium()
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason=NONE),
    pytest.mark.slow,
]
LIMIT = 240.0
PRESS_PLAY = """() => {
  const waiting = setInterval(() => {
    const play = document.getElementById("play");
    if (play) { play.click(); clearInterval(waiting); }
  }, 50);
}"""


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """Of the live report of a run directory in which nothing has begun."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").write_text("name: run\n")
    command = [sys.executable, "-m", "async_flowrl.report", str(tmp_path / "run"), "--live", "--port", "0"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    found = re.search(r"http://\S+", process.stdout.readline())
    assert found is not None
    yield found[0]
    process.kill()
    process.wait()


def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end, f"{what} never came"
        time.sleep(0.5)


def test_a_run_appears_and_grows_without_a_reload(tmp_path: Path, address: str) -> None:
    errors: list[str] = []
    asked: list[str] = []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.set_default_timeout(LIMIT * 1000)
        page.on("console", lambda each: errors.append(each.text) if each.type == "error" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("request", lambda each: asked.append(each.url))
        page.goto(address)
        assert "The run is starting" in page.inner_text("body")
        settings = ["total_steps=8", "evaluate.every=2", "evaluate.before_training=true", "disturb.update=1.0"]
        command = [sys.executable, "-m", "benchmarks.disturbed", *LOCAL, *settings, f"output_dir={tmp_path / 'run'}"]
        run = subprocess.Popen([*command, "console=quiet"], cwd=ROOT)
        page.wait_for_selector("text=Still running")
        page.evaluate("window.neverReloaded = true")
        page.evaluate(PRESS_PLAY)
        seen = sorted(seen_while_it_runs(page))
        assert len({steps for steps, _ in seen}) >= 3, f"the page did not follow the run: {seen}"
        assert len({images for _, images in seen}) >= 2, f"no image came while it ran: {seen}"
        assert run.wait() == 0
        assert page.evaluate("window.neverReloaded") is True
        assert "in 8 steps" in page.inner_text("body")
        assert page.get_attribute("#play", "aria-pressed") == "true", "a newer page stopped the images"
        browser.close()
    assert errors == []
    assert {url.split("/")[2] for url in asked} == {address.split("/")[2]}


def seen_while_it_runs(page: Any) -> set[tuple[int, int]]:
    """(steps that the page names, images that have loaded), until it says that the run is finished."""
    seen: set[tuple[int, int]] = set()

    def finished() -> bool:
        text = page.inner_text("body")
        steps = re.search(r"(?:Still running: |Finished: )(\d+)", text)
        loaded = "[...document.images].filter((image) => image.complete && image.naturalWidth).length"
        seen.add((int(steps[1]) if steps else 0, int(page.evaluate(loaded))))
        return "Finished: 8 steps" in text

    until(finished, "the end of the run")
    return seen
