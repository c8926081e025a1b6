"""Tests of the places of the text encoder: none of them, nor a kill, changes the weights of a run."""

import json
from pathlib import Path

import pytest

from async_flowrl.config.paths import cache_dir
from async_flowrl.config.schema import TinyConfig
from async_flowrl.policies.tiny import build_tiny
from tests.integration.runs import LOCAL, Run, train

ROWS = (
    {"prompt": "red square"},
    {"prompt": "green field, very green, under a wide sky, with nothing else in it", "negative_prompt": "dull"},
    {"prompt": "blue"},
    {"prompt": "red flag over a red house"},
)
EVALUATED = ({"prompt": "red evening, with one long cloud"}, {"prompt": "green"})
ASKED = 4 + 2 + 2
"""Different embeddings of a run: its prompts, those it evaluates, both negative prompts."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Prompts of mixed lengths, guidance, and evaluations."""
    folder = tmp_path_factory.mktemp("data")
    files = {"data.train": ROWS, "data.evaluation": EVALUATED}
    for key, rows in files.items():
        (folder / f"{key}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = [f"{key}={folder / key}.jsonl" for key in files]
    return (*LOCAL, *given, "rollout.true_cfg_scale=3", "rollout.num_inference_steps=2", "save.every=1")


@pytest.fixture(scope="module")
def whole(data: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Four steps with resident text encoders, evaluated after the third and the last."""
    return train(tmp_path_factory.mktemp("resident"), "one_step_off", *data, "total_steps=4", "evaluate.every=3")


@pytest.fixture
def settings(data: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """The same with a folder of embeddings of its own."""
    tiny = build_tiny(TinyConfig(layers=1))
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / tiny.name).symlink_to(tiny)
    monkeypatch.setenv("ASYNC_FLOWRL_CACHE", str(tmp_path / "cache"))
    assert cache_dir() == tmp_path / "cache"
    return data


CACHED = ("rollout.text_encoder=cached", "rollout.encode_ahead=3")


def visits(run: Run) -> list[str]:
    """What each loading of text encoders was for, and what was found damaged before it."""
    said = (run.root / "logs" / "controller.log").read_text().splitlines()
    return [line.split(": ", 1)[1] for line in said if "rollout.text_encoder:" in line]


def embeddings(folder: Path) -> list[Path]:
    return sorted((folder / "cache" / "embeddings").rglob("*.safetensors"))


@pytest.mark.extended
def test_resident_offload_and_cached_make_the_same_weights(
    tmp_path: Path, settings: tuple[str, ...], whole: Run
) -> None:
    """One run changes from the one to the other at each resume, over embeddings that were damaged."""
    mixed = (tmp_path / "mixed", "one_step_off", *settings)
    run = train(*mixed, *CACHED, "total_steps=2")
    assert len(embeddings(tmp_path)) == ASKED
    # Evaluations and the negative prompt come first; what is lacking then is encoded together with what follows.
    loaded = [line for line in visits(run) if "were loaded" in line]
    assert loaded[0] == "text encoders were loaded for 3 prompts that were needed, and for 0 more" and len(loaded) <= 3
    train(*mixed, "rollout.text_encoder=offload", "total_steps=3", "resume=auto")
    for file in embeddings(tmp_path):  # The last step needs only some of them.
        file.write_bytes(file.read_bytes()[:-1] + b"x")
    again = train(*mixed, *CACHED, "total_steps=4", "resume=auto")
    assert sum("is damaged" in line for line in visits(again)) >= 3
    assert again.digest == whole.digest
    assert again.column("reward/mean") == whole.column("reward/mean")
    assert again.metrics[-1]["evaluation/reward/mean"] == whole.metrics[-1]["evaluation/reward/mean"]


@pytest.mark.slow
def test_a_process_that_also_trains_makes_the_same_weights_with_prompts_that_are_encoded_in_mid_run(
    tmp_path: Path, settings: tuple[str, ...], whole: Run
) -> None:
    """At its start it encodes one prompt ahead; the others come while it samples and trains."""
    one = (*CACHED, "rollout.encode_ahead=1", "placement=shared")
    run = train(tmp_path / "shared", "one_step_off", *settings, *one, "total_steps=3")
    began = min(event["started"] for event in run.events if event["event"] == "step")
    written = [file.stat().st_mtime for file in embeddings(tmp_path)]
    assert len(written) == ASKED and max(written) > began, "a prompt needed the text encoders in mid-run"
    assert sum("were loaded" in line for line in visits(run)) >= 3
    assert run.digests == whole.digests[:4]
    assert run.column("reward/mean") == whole.column("reward/mean")[:3]
    assert run.metrics[-1]["evaluation/reward/mean"] == whole.metrics[2]["evaluation/reward/mean"]
