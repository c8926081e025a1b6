"""Tests of the places of the text encoder: none of them, nor a kill, changes the weights of a run."""

import json
from pathlib import Path

import pytest

from async_flowrl.config.schema import TinyConfig
from async_flowrl.policies.tiny import build_tiny
from tests.integration.runs import Run, train

ROWS = (
    {"prompt": "red square"},
    {"prompt": "green field, very green, under a wide sky, with nothing else in it", "negative_prompt": "dull"},
    {"prompt": "blue"},
    {"prompt": "red flag over a red house"},
)
EVALUATED = ({"prompt": "red evening, with one long cloud"}, {"prompt": "green"})
ASKED = 4 + 2 + 2
"""Different embeddings of a run: its prompts, those it evaluates, both negative prompts."""


CACHED = ("rollout.text_encoder=cached", "rollout.encode_ahead=3")


def visits(run: Run) -> list[str]:
    """What each loading of text encoders was for, and what was found damaged before it."""
    said = (run.root / "logs" / "controller.log").read_text().splitlines()
    return [line.split(": ", 1)[1] for line in said if "rollout.text_encoder:" in line]


def embeddings(folder: Path) -> list[Path]:
    return sorted((folder / "cache" / "embeddings").rglob("*.safetensors"))


@pytest.mark.extended
def test_resident_offload_and_cached_make_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One run changes from the one to the other at each resume, over embeddings that were damaged.

    Prompts of mixed lengths, guidance, and evaluations after the third step and the last.
    """
    files = {"data.train": ROWS, "data.evaluation": EVALUATED}
    for key, rows in files.items():
        (tmp_path / f"{key}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = [f"{key}={tmp_path / key}.jsonl" for key in files]
    settings = ("one_step_off", *given, "rollout.true_cfg_scale=3", "rollout.num_inference_steps=2", "save.every=1")
    whole = train(tmp_path / "resident", *settings, "total_steps=4", "evaluate.every=3")

    tiny = build_tiny(TinyConfig(layers=1))
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / tiny.name).symlink_to(tiny)
    monkeypatch.setenv("ASYNC_FLOWRL_CACHE", str(tmp_path / "cache"))
    run = train(tmp_path / "mixed", *settings, *CACHED, "total_steps=2")
    assert len(embeddings(tmp_path)) == ASKED
    # Evaluations and the negative prompt come first; what is lacking then is encoded together with what follows.
    loaded = [line for line in visits(run) if "were loaded" in line]
    assert loaded[0] == "text encoders were loaded for 3 prompts that were needed, and for 0 more" and len(loaded) <= 3
    train(tmp_path / "mixed", *settings, "rollout.text_encoder=offload", "total_steps=3", "resume=auto")
    for file in embeddings(tmp_path):  # The last step needs only some of them.
        file.write_bytes(file.read_bytes()[:-1] + b"x")
    again = train(tmp_path / "mixed", *settings, *CACHED, "total_steps=4", "resume=auto")
    assert sum("is damaged" in line for line in visits(again)) >= 3
    assert again.digest == whole.digest
    assert again.column("reward/mean") == whole.column("reward/mean")
    assert again.metrics[-1]["evaluation/reward/mean"] == whole.metrics[-1]["evaluation/reward/mean"]
    for file in embeddings(tmp_path):  # With one process, too, which encodes some prompts in the middle of the run.
        file.unlink()
    shared = ("rollout.text_encoder=cached", "rollout.encode_ahead=1", "placement=shared", "total_steps=3")
    assert train(tmp_path / "shared", *settings, *shared).digests == whole.digests[:4]
