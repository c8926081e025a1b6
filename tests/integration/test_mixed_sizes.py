"""Tests of a run whose groups have different image sizes: resume, pixels, and FLOPs by size."""

import json
from pathlib import Path

import pytest
from PIL import Image

from async_flowrl.cli.verify import verify
from tests.integration.runs import LOCAL, in_every_way

ROWS = (
    {"prompt": "red square", "height": 32, "width": 48},
    {"prompt": "green field", "resolution": [64, 32]},
    {"prompt": "red flag"},
)


@pytest.mark.slow
def test_groups_of_different_sizes_train_and_resume_to_the_same_weights(tmp_path: Path) -> None:
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    settings = (*LOCAL, f"data.train={data}", "prompts_per_step=3", "ticket_size=2", "rollout.resolutions=[32,[48,32]]")
    whole = in_every_way(tmp_path, "one_step_off", *settings, "save.every=1", steps=4, first=2)
    assert all(ok for _, ok, _ in verify(whole.root))
    flops = {e["flops"] for e in whole.events if e["event"] == "span" and "flops" in e and e["name"] == "generate"}
    assert len(flops) >= 3
    pictures = whole.root / "images" / "step_000004"
    shown = [Image.open(pictures / f"{place:03d}_0.png").size for place in (0, 1)]
    assert shown == [(48, 32), (32, 64)]
