"""Tests of the planned memory that recipes state: it is what `plan --memory` says today."""

import json
import re
from typing import Any

import pytest

from async_flowrl.cli import plan as planner
from async_flowrl.config.paths import config_dir
from async_flowrl.memory.devices import MEMORY_WARNING_SHARE
from async_flowrl.memory.processes import MARGIN_SHARE, RUNTIME_BYTES

GIB = 2**30
PROCESS, RANK, WORKER = "process_that_samples_and_trains", "trainer_rank", "rollout_worker"
STATED = {
    "qwen_image_1x80gb": {PROCESS: r"Planned memory: ([\d.]+) of 79 GiB"},
    "qwen_image_8x80gb_shared": {PROCESS: r"Planned memory: ([\d.]+) of 79 GiB on each"},
    "qwen_image_ocr_full": {RANK: r"a trainer rank ([\d.]+) GiB", WORKER: r"a rollout worker ([\d.]+) GiB"},
    "sd35_medium_full": {RANK: r"of a trainer rank: ([\d.]+) GiB"},
}
"""Recipe → kind of process → what its file says of it."""
MARGINS = re.compile(
    r"so ([\d.]+) GiB are left\. Of what is planned, ([\d.]+) GiB are a reserve for fragments and ([\d.]+) GiB for CUDA"
)
"""What the file of a recipe says that is left, and that the plan adds to the tensors."""


def planned(experiment: str, device: str, capture: pytest.CaptureFixture[str]) -> dict[str, Any]:
    given = ["--memory", "--json", "--config-name", "one_step_off", "--device", device, f"experiment={experiment}"]
    assert planner.main(given) == 0
    found: dict[str, Any] = json.loads(capture.readouterr().out)
    return found


def equal(stated: str, number: float) -> None:
    """Compares a number with one that was rounded to as many digits as it has."""
    digits = len(stated.partition(".")[2])
    assert float(stated) == pytest.approx(number, abs=0.51 * 10**-digits)


@pytest.mark.slow
@pytest.mark.parametrize("experiment", STATED)
def test_a_recipe_states_what_is_planned(experiment: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = (config_dir() / "experiment" / f"{experiment}.yaml").read_text().splitlines()
    said = " ".join(line.removeprefix("#").strip() for line in lines if line.startswith("#"))
    assert re.search("not run", said, re.IGNORECASE)
    found = planned(experiment, "141" if experiment.endswith("full") else "80", capsys)
    for process, pattern in STATED[experiment].items():
        stated = re.search(pattern, said)
        assert stated is not None, pattern
        equal(stated[1], found[process]["total"] / GIB)
    assert found["fits"]
    if PROCESS in STATED[experiment]:
        held = found[PROCESS]["total"]
        margins = MARGINS.search(said)
        assert margins is not None
        tensors = sum(size for part, size in found[PROCESS].items() if part != "total")
        for stated_margin, number in zip(
            margins.groups(), (79 * GIB - held, MARGIN_SHARE * tensors, RUNTIME_BYTES), strict=True
        ):
            equal(stated_margin, number / GIB)
        assert held <= MEMORY_WARNING_SHARE * 79 * GIB, "the run would warn at its own start"
