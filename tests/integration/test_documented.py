"""Tests that every key, file and event of a real run is documented, and that every documented key is written."""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pytest

from async_flowrl.observability.ledger import STATES
from tests.integration.runs import ROOT, Run, train

METRICS = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
DIRECTORY = (ROOT / "docs" / "run_directory.md").read_text(encoding="utf-8")
OPEN = ("name", "pool", "age", "start", "step", "kind", "stat")
"""Placeholders on the pages, written <name> and so on."""
OTHER_ALGORITHMS = {
    "positive_loss",
    "negative_loss",
    "old_deviation",
    "preference_accuracy",
    "average_kl",
    "implicit_reward",
    "preference_weight",
    "teacher_kl",
}
OF_SHARED_RUNS = {"timing/wait_ticket"}
"""Those of placement=shared: tests/unit/shared/test_shared_runs.py sees them."""
ON_EVENT = {"reward/<name>/missing", "reward/<name>/failures", "reward/<name>/retries", "reward/<name>/<extra>"} | {
    "tickets_skipped",
    "evaluation/held_out/<name>/extra/<extra>",
    "adapter/changed_share",
    "memory/<pool>",  # on GPUs: tests/pretend_gpu/test_whole_program.py
    "memory.<pool>",
    "grad_norm/<name>",
    "faults.<kind>",
}


def named(page: str, heading: str) -> set[str]:
    """First-column code of the tables under a second-level heading."""
    section = re.split(r"^## ", page, flags=re.MULTILINE)
    text = next(part for part in section if part.startswith(heading))
    first = [row.split(" | ", 1)[0] for row in text.splitlines() if row.startswith("| `")]
    return {key for cell in first for key in re.findall(r"`([^`]+)`", cell)}


def matches(key: str, patterns: Iterable[str]) -> bool:
    for pattern in patterns:
        regular = re.escape(pattern)
        for name in OPEN:
            regular = regular.replace(f"<{name}>", r"[\w-]+")
        if re.fullmatch(regular, key):
            return True
    return False


def leaves(summary: Mapping[str, Any]) -> set[str]:
    """Keys of summary.json as the page writes them: sections are opened, pools and workers stand as one."""
    found = set()
    for key, value in summary.items():
        if isinstance(value, dict) and key not in ("workers", "pools"):
            found |= {f"{key}.{inner}" for inner in value}
        elif key == "pools":
            found |= {f"pools.{pool}" for pool in value}
        else:
            found.add(key)
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    """Two runs whose keys differ: correction, KL, other windows, batches of tickets, evaluation before training."""
    folder = tmp_path_factory.mktemp("documented")
    evaluated = (
        "evaluate.before_training=true",
        "evaluate.baseline=true",
        "+evaluate.reward.terms={size: {name: jpeg_compressibility}}",
    )
    plain = train(folder / "plain", "one_step_off", *evaluated, "total_steps=4", "monitor.report=true")
    windows = ("algorithm.window=random", "algorithm.sde_window_size=2")
    extras = (
        "algorithm.correction=mask",
        "algorithm.kl_coef=0.01",
        "algorithm.max_kl_per_update=1",
        "data.curriculum.after=2",
        "rollout.tickets_per_batch=2",
        *windows,
    )
    corrected = train(folder / "corrected", "fully_async", "total_steps=4", *extras)
    return [plain, corrected]


@pytest.mark.parametrize("file", ["metrics.jsonl", "summary.json"])
def test_every_key_is_explained_and_every_explained_key_is_written(runs: list[Run], file: str) -> None:
    explained = named(METRICS, file)
    by_run = [run.metrics if file == "metrics.jsonl" else [leaves(run.summary)] for run in runs]
    written = {key for lines in by_run for line in lines for key in line}
    assert {key for key in written if not matches(key, explained)} == set()
    unseen = {pattern for pattern in explained if not any(matches(key, [pattern]) for key in written)}
    assert unseen - OTHER_ALGORITHMS - OF_SHARED_RUNS - ON_EVENT == set()


def test_every_file_is_explained(runs: list[Run]) -> None:
    for run in runs:
        for entry in run.root.iterdir():
            assert f"`{entry.name}" in DIRECTORY or f"`{entry.name}/" in DIRECTORY, entry.name


def event_calls() -> Iterator[tuple[str, list[str]]]:
    """(event, its fields) of every `.event("...", field=value)` in the package."""
    for path in (ROOT / "async_flowrl").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "event":
                assert isinstance(node.args[0], ast.Constant), f"{path}:{node.lineno}: which event is that?"
                yield node.args[0].value, [keyword.arg for keyword in node.keywords if keyword.arg]


@pytest.mark.extended
def test_every_event_is_explained_with_its_fields_and_every_explained_one_is_recorded(runs: list[Run]) -> None:
    rows = re.findall(r"^\| `(\w+)` \| (`\w+`.*) \| .* \|$", DIRECTORY, flags=re.MULTILINE)
    explained = {event: set(re.findall(r"`(\w+)`", fields)) for event, fields in rows}
    # The ticket table's, which calls what it is given, and what only a GPU has.
    recorded: dict[str, set[str]] = {"ticket": set(), "span": {"memory"}}
    for event, fields in event_calls():
        recorded.setdefault(event, set()).update(fields)
    for run in runs:
        for record in run.events:
            recorded[record["event"]] |= set(record) - {"time", "event"}
    assert recorded == explained
    states = dict(re.findall(r"^\| `(\w+)` .*`state` \(([\w, ]+)\)", DIRECTORY, flags=re.MULTILINE))
    written = {record["state"] for run in runs for record in run.events if record["event"] == "version"}
    assert set(states["version"].split(", ")) == written
    assert tuple(states["state"].split(", ")) == STATES
