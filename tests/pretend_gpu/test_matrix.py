"""Tests of short whole runs on Ray with pretended GPUs, over all settings that matter there (slow tier)."""

from pathlib import Path

import pytest

from tests.pretend_gpu.rehearse import rehearse
from tests.support.families import tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
TWO_ROLLOUTS = ("rollout.num_workers=2",)
TWO_TRAINERS = ("trainer.num_workers=2", "trainer.micro_batch_size=2")
TWO_REPLICAS = ("trainer.num_workers=4", "trainer.micro_batch_size=2", "trainer.shard=hybrid", "trainer.shard_size=2")
ON_HOST = ("trainer.sum_on=host", "trainer.versions_on=host", "rollout.versions_on=host")
NCCL = "checkpoint_engine.transport=nccl"
FEW_STEPS = "rollout.num_inference_steps=4"

MODES = {mode: (mode, (*TWO_ROLLOUTS, NCCL)) for mode in ("sync", "stream", "one_step_off", "fully_async")}
TRANSPORTS = {
    name: ("one_step_off", (*TWO_ROLLOUTS, f"checkpoint_engine.transport={name}"))
    for name in ("pynccl", "auto", "gloo", "object_store")
}
FAMILIES = {
    family: ("one_step_off", (f"model={tiny_model(family)}", "model.tiny.heads=4", FEW_STEPS, NCCL, *own))
    for family, own in {
        "flux": ("rollout.guidance_scale=3.5",),
        "wan": ("rollout.frames=5",),
        **dict.fromkeys(("qwen_image_21", "sana", "sd3", "z_image"), ()),
    }.items()
}
TRAINERS = {
    "sharded": ("one_step_off", (*TWO_TRAINERS, "trainer.shard=full", NCCL)),
    "whole": ("one_step_off", (*TWO_TRAINERS, "trainer.shard=none", NCCL)),
    "hybrid": ("one_step_off", (*TWO_REPLICAS, "rollout.gpus_per_worker=0")),
    "cpu_offload": ("one_step_off", (*TWO_TRAINERS, "trainer.cpu_offload=true", NCCL)),
    "checkpointing": ("one_step_off", ("trainer.gradient_checkpointing=full", NCCL)),
    "ema": ("one_step_off", ("trainer.ema_decay=0.9", "evaluate.every=1", NCCL)),
    "guidance": ("one_step_off", ("rollout.true_cfg_scale=3", NCCL)),
    "text_encoder_offload": ("one_step_off", ("rollout.text_encoder=offload", NCCL)),
    "diffusion_nft": ("one_step_off", ("algorithm=diffusion_nft", NCCL)),
    "quantized": ("one_step_off", (*TWO_TRAINERS, "trainer.shard=none", "model.quantize=nf4", NCCL)),
    "two_updates": ("one_step_off", ("trainer.updates_per_batch=2", "hand_over=batch", NCCL)),
}
WHOLE_WEIGHTS = {
    "whole_weights": ("one_step_off", (*TWO_ROLLOUTS, "tune=full", "checkpoint_engine.transport=auto")),
    "whole_weights_gloo": ("one_step_off", ("tune=full", "checkpoint_engine.transport=gloo")),
    "whole_weights_on_the_device": ("one_step_off", (NCCL, "tune=full", "rollout.versions_on=device")),
    "whole_weights_in_shares": ("one_step_off", (*TWO_TRAINERS, "tune=full", "trainer.shard=full", *ON_HOST)),
}
CASES = {**WHOLE_WEIGHTS, **MODES, **TRANSPORTS, **FAMILIES, **TRAINERS}
EXPECTED = {"auto": "nccl", **{name: name for name in ("pynccl", "gloo", "object_store")}} | {
    "hybrid": "object_store",
    "whole_weights": "object_store",
    "whole_weights_gloo": "gloo",
    "whole_weights_in_shares": "object_store",
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_is_flawless(case: str, tmp_path: Path) -> None:
    mode, overrides = CASES[case]
    if case == "pynccl":
        pytest.importorskip("cupy")
    run = rehearse(tmp_path / "run", mode, *overrides)
    run.flawless()
    run.delivered(EXPECTED.get(case, "nccl"))
    assert run.summary["steps"] == 3
    assert len(set(run.digests)) == len(run.digests) >= 4
    assert [event for event in run.events if event["event"] == "fault"] == []


@pytest.mark.parametrize("placement", ["separate", "shared"])
def test_the_memory_of_sum_and_versions_changes_no_bit(placement: str, tmp_path: Path) -> None:
    settings = (*TWO_TRAINERS, *TWO_ROLLOUTS, "trainer.shard=none", "model.quantize=nf4", f"placement={placement}")
    runs = [rehearse(tmp_path / str(i), "one_step_off", *settings, *more) for i, more in enumerate(((), ON_HOST))]
    for run in runs:
        run.flawless()
    assert runs[0].digests == runs[1].digests and len(set(runs[0].digests)) >= 4
