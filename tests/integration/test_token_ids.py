"""Test of a whole run on prompts that were tokenised beforehand."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.runs import train
from tests.support.tiny import token_ids

TEXTS = (("red red red red", "blue"), ("blue blue blue blue", " "))


def job(folder: Path, rows: list[dict[str, Any]]) -> tuple[str, list[Any]]:
    folder.mkdir()
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    short = ("total_steps=2", "rollout.true_cfg_scale=3.0", "evaluate.before_training=true")
    run = train(folder / "run", "one_step_off", f"data.train={folder / 'prompts.jsonl'}", *short)
    return run.digest, [run.metrics[0]["evaluation_before/reward/mean"], *run.column("reward/mean")]


@pytest.mark.extended
def test_token_ids_train_to_the_weights_of_their_text(tmp_path: Path) -> None:
    """Prompts and negative prompts, in rollouts, in the trainer's guidance and in evaluations, bit for bit."""
    texts = [{"prompt": text, "negative_prompt": negative} for text, negative in TEXTS]
    ids = [
        {"prompt": text, "prompt_token_ids": token_ids(text), "negative_token_ids": token_ids(negative)}
        for text, negative in TEXTS
    ]
    assert job(tmp_path / "ids", ids) == job(tmp_path / "text", texts)
