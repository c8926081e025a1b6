"""Tests of reports in a real browser: no request to other hosts, no logged error, fitting layout, keyboard use."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from async_flowrl.cli.report import main as report
from tests.integration.runs import Run, train

NAMES = ("chromium", "chromium-browser", "google-chrome")
NONE = "no Chromium that starts on this machine: apt-get install chromium"


@cache
def chromium() -> str | None:
    """Returns the path of a Chromium that starts; None without one, also if Ubuntu's placeholder asks for snap."""
    return next((path for path in map(shutil.which, NAMES) if path is not None and starts(path)), None)


def starts(path: str) -> bool:
    try:
        return subprocess.run([path, "--version"], capture_output=True, timeout=120, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
CHROMIUM = chromium()
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=NONE)

NASTY = (
    "red square",
    'red </script><script>window.hacked = 1</script><img src=x onerror="window.hacked = 2">',
    "green \u202eمربع أحمر \"'&amp; ${alert(1)} {{document}}",
    "blue " * 2000,
)
EVALUATED = ("evaluate.every=2", "evaluate.before_training=true", "evaluate.images_per_prompt=2")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Four steps on prompts that try to get out of where they stand; a fault is added to its events."""
    folder = tmp_path_factory.mktemp("report")
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in NASTY))
    data = (f"data.train={prompts}", "evaluate.max_prompts=4", "group_size=2", "trainer.micro_batch_size=2")
    ran = train(folder / "run", "one_step_off", *EVALUATED, *data, "total_steps=4", "monitor.report=true")
    steps = [event for event in ran.events if event["event"] == "step"]
    fault = {"time": steps[1]["ended"], "event": "fault", "worker": "rollout-0", "kind": "WorkerDied"}
    with (ran.root / "events.jsonl").open("a") as file:
        file.write(json.dumps({**fault, "message": "</script><b>killed</b>"}) + "\n")
    return Run(ran.root.rename(folder / "a <b> & c"))


@pytest.fixture(scope="module")
def browser(run: Run) -> Iterator[Any]:
    """After the run: playwright occupies this thread's event loop."""
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


class Opened:
    """A page with what it logged and asked for."""

    def __init__(self, browser: Any, url: str, *, width: int = 1280, scheme: str = "light") -> None:
        context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
        self.page = context.new_page()
        self.page.set_default_timeout(60_000)
        self.errors: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda each: self.errors.append(each.text) if each.type != "log" else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda each: self.asked.append(each.url))
        self.page.goto(url)
        self.page.wait_for_selector("#result")

    def text(self, selector: str) -> str:
        return str(self.page.inner_text(selector))

    def press(self, selector: str, *keys: str) -> None:
        self.page.focus(selector)
        for key in keys:
            self.page.keyboard.press(key)


@pytest.fixture(scope="module")
def url(run: Run) -> str:
    assert report([str(run.root)]) == 0
    return (run.root / "report.html").as_uri()


@pytest.mark.extended
def test_it_is_whole_and_fits(browser: Any, url: str) -> None:
    """A small window, in CSS pixels, of a user who prefers dark colours. Prompts are shown as they are."""
    width = 390
    opened = Opened(browser, url, width=width, scheme="dark")
    page = opened.page
    for summary in page.query_selector_all("details > summary"):
        summary.click()
    assert opened.errors == []
    assert [each for each in opened.asked if not each.startswith("data:")] == [url]
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.evaluate("(nav => nav.scrollWidth - nav.clientWidth)(document.querySelector('.top nav'))") <= 0
    assert page.evaluate("window.hacked") is None
    assert page.evaluate("getComputedStyle(document.body).backgroundColor.match(/[0-9]+/)[0] <= 128"), "it is light"
    assert page.evaluate("[...document.images].every((each) => each.complete && each.naturalWidth > 0)")
    assert page.evaluate("[...document.querySelectorAll('.uplot canvas')].every((each) => each.clientWidth > 150)")
    options = page.eval_on_selector_all("#prompt option", "(all) => all.map((each) => each.textContent)")
    assert options[2] == f"2: {NASTY[1][:70]}"
    page.select_option("#prompt", "1")
    assert page.inner_text("#images .prompt") == NASTY[1]
    page.select_option("#prompt", "3")
    assert "9,999 characters" in page.inner_text("#images .prompt")


@pytest.mark.extended
def test_slider_views_charts_and_images_work_by_keyboard(browser: Any, url: str) -> None:
    opened = Opened(browser, url)
    page = opened.page
    assert "version 4" in opened.text("#images output")
    last = page.get_attribute("#images img", "src")
    opened.press("#slider", "Home")
    assert "version 0" in opened.text("#images output") and page.get_attribute("#images img", "src") != last
    opened.press("#view-0", "ArrowRight")
    assert page.is_checked("#view-1")
    assert page.evaluate("document.activeElement.id") == "view-1"
    opened.press("#chart-reward-plot", "ArrowRight", "ArrowRight")
    assert opened.text("#chart-reward .readout").startswith("step 1: reward ")
    opened.press("#chart-reward-plot", "+")
    assert page.evaluate("ui.zoom.reward[1] - ui.zoom.reward[0]") == pytest.approx(1.5)
    opened.press("#chart-reward-plot", "0")
    assert page.evaluate("ui.zoom.reward") is None
    bars = page.locator("#timeline rect[data-state]")
    all_bars = bars.count()
    opened.press("#timeline-plot", "+", "+")
    assert 0 < bars.count() < all_bars
    opened.press("#timeline-plot", "0")
    assert bars.count() == all_bars
    opened.press("#images .shot button", "Enter", "ArrowLeft")
    assert page.evaluate("document.querySelector('dialog').open")
    page.keyboard.press("Escape")
    sync_api.expect(page.locator("dialog")).to_have_count(0)
    opened.press("#chart-reward summary", "Enter")
    sync_api.expect(page.locator("#chart-reward tbody tr")).to_have_count(4)
    page.select_option("#axis", "seconds")
    assert page.inner_text("#chart-reward thead").lower().startswith("wall clock")
    assert opened.errors == []
