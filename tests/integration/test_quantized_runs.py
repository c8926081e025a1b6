"""Tests of runs on a quantised base: what samples and what trains have its bits, in every placement, and its export."""

import itertools
from pathlib import Path

import pytest
import torch

from async_flowrl.cli import export
from async_flowrl.config.compose import read_config
from async_flowrl.policies.registry import resolve_model
from async_flowrl.policies.stored import StoredWeights
from tests.integration.runs import Run, train
from tests.support.families import NAMES

NF4 = ("model.quantize=nf4", "model.quantize_text_encoder=int8", "total_steps=3")


@pytest.fixture(scope="module")
def separate(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(tmp_path_factory.mktemp("separate"), "one_step_off", *NF4)


def test_placements_workers_and_a_resume_make_the_same_weights(separate: Run, tmp_path: Path) -> None:
    shared = train(tmp_path / "shared", "one_step_off", *NF4, "placement=shared", "total_steps=2")
    assert shared.summary["placement"] == "shared"
    gaps = shared.column("log_prob_gap")
    resumed = train(
        tmp_path / "shared", "one_step_off", *NF4, "rollout.num_workers=2", "rollout.text_encoder=cached", "resume=auto"
    )
    assert resumed.digest == separate.digest and len(set(separate.digests)) == 4
    assert gaps == separate.column("log_prob_gap")[:2] and gaps[0] < 1e-6
    plain = train(tmp_path / "plain", "one_step_off", "total_steps=2")
    assert plain.digests[1] != separate.digests[1]


def test_what_is_exported_is_for_the_model_in_its_files(separate: Run, tmp_path: Path) -> None:
    assert export.main([str(separate.root), str(tmp_path / "out"), "--merged"]) == 0
    assert "quantised to nf4" in (tmp_path / "out" / "README.md").read_text()
    base, merged = (
        StoredWeights(path, dtype=torch.float32) for path in (plain_folder(separate), str(tmp_path / "out" / "merged"))
    )
    changed = {name for name in base if not torch.equal(base[name], merged[name])}
    assert base.keys() == merged.keys() and changed
    assert all(".weight" in name and "transformer_blocks" in name for name in changed)
    assert max(float((base[name] - merged[name]).abs().max()) for name in changed) < 0.1


def plain_folder(run: Run) -> str:
    return resolve_model(read_config(run.root / "config.yaml").model).path


@pytest.mark.slow
@pytest.mark.parametrize(("family", "stored"), zip(NAMES, itertools.cycle(("int8", "fp8", "int4"))))
def test_every_family_and_format(family: str, stored: str, tmp_path: Path) -> None:
    guidance = ["rollout.guidance_scale=3.5"] if family == "flux" else []
    model = (f"model.tiny.family={family}", "model.tiny.layers=2", f"model.quantize={stored}")
    settings = [*model, "total_steps=2", *guidance]
    separate = train(tmp_path / "separate", "one_step_off", *settings)
    shared = train(tmp_path / "shared", "one_step_off", *settings, "placement=shared")
    assert separate.digests == shared.digests and len(set(separate.digests)) == 3
    assert separate.column("log_prob_gap")[0] < 1e-6
