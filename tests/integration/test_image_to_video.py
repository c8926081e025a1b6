"""Tests of whole runs of Wan on prompts whose image is the first frame of a video."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.integration.runs import train
from tests.unit.data.prompt_files import rows


@pytest.fixture
def settings(tmp_path: Path) -> list[str]:
    """Of a tiny model, with two prompts, of which one has a size of its own, and guidance."""
    for seed, name in enumerate(("a.png", "b.png")):
        noise = np.random.default_rng(seed).integers(0, 255, (48, 32, 3), dtype=np.uint8)
        Image.fromarray(noise).save(tmp_path / name)
    sized = {"prompt": "it falls", "image": "b.png", "height": 48, "width": 32}
    file = rows(tmp_path / "starts.jsonl", {"prompt": "it rises", "image": "a.png"}, sized)
    return [
        "model=tiny_wan_image",
        "model.tiny.layers=1",
        "rollout.resolution=32",
        "rollout.frames=5",
        "rollout.num_inference_steps=3",
        "rollout.true_cfg_scale=2.0",
        f"data.train={file}",
        "reward=jpeg_compressibility",
        "prompts_per_step=2",
        "group_size=2",
        "trainer.micro_batch_size=2",
        "evaluate.images_per_prompt=2",
        "save.every=1",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "tune"), [("sync", "full"), ("stream", "lora"), ("one_step_off", "full"), ("fully_async", "lora")]
)
def test_the_digest_is_one_in_every_mode(mode: str, tune: str, settings: list[str], tmp_path: Path) -> None:
    """Two pools, one that does both with its text encoder's embeddings cached, and a run in two parts."""
    settings = [*settings, f"tune={tune}"]
    whole = train(tmp_path / "whole", mode, *settings, "total_steps=3")
    shared = train(
        tmp_path / "shared", mode, *settings, "total_steps=3", "placement=shared", "rollout.text_encoder=cached"
    )
    train(tmp_path / "parts", mode, *settings, "total_steps=1")
    resumed = train(tmp_path / "parts", mode, *settings, "total_steps=3", "resume=auto")
    assert whole.digest == shared.digest == resumed.digest and whole.digests == shared.digests
    assert len(set(whole.digests)) == 4
    assert whole.column("log_prob_gap")[0] < 1e-6 and whole.column("ratio/mean")[0] == 1.0
