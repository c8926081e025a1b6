"""Tests of the seats of reward workers in plans: GPUs, memory where it is known, refusals, and shipped recipes."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from async_flowrl.config.check import ConfigError
from async_flowrl.config.compose import compose_config
from async_flowrl.config.schema import Config, RewardTerm
from async_flowrl.memory.devices import check_devices, describe_gpus, gpus_taken, reward_seats
from async_flowrl.memory.footprints import rollout_footprint
from async_flowrl.memory.model_sizes import Sizes
from async_flowrl.rewards.clip import VIT_H, PickScore
from tests.support.allocations import Allocations
from tests.support.fused_attention import fused_attention

GIB = 2**30


class Judge:
    """A reward that says what it takes."""

    @staticmethod
    def memory_gib(gib: float | None = 3.0, **options: Any) -> float | None:
        return gib

    def __init__(self, gib: float | None = 3.0) -> None:
        self.gib = gib

    def __call__(self, images: Any, prompt: Any) -> list[float]:
        return [0.0] * len(images)


def judge(gib: float | None = 3.0, **seat: Any) -> RewardTerm:
    return RewardTerm(name=f"{__name__}:Judge", options={"gib": gib}, **seat)


def seated(*overrides: str, **terms: RewardTerm) -> Config:
    config = compose_config("one_step_off", ["model.dtype=float32", *overrides])
    config.reward.terms = {"color": RewardTerm(), **terms}
    return config


def test_clip_takes_what_it_says() -> None:
    """ViT-H/14 on the meta device, a batch of 16: its weights, and what passes while it embeds images."""
    from transformers import CLIPConfig, CLIPModel

    size: dict[str, Any] = {"num_attention_heads": 16, "projection_dim": 1024}
    text = {**size, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24}
    vision = {**size, "hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "patch_size": 14}
    with torch.device("meta"):
        model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=1024)).eval()
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    with torch.no_grad(), fused_attention(), Allocations() as counted:
        model.vision_model(pixel_values=torch.zeros(16, 3, 224, 224, device="meta"))
    assert VIT_H[0] * GIB == pytest.approx(weights, rel=0.01)
    assert PickScore.memory_gib() == pytest.approx((weights + counted.peak) / GIB, rel=0.02)
    assert (PickScore.memory_gib(model="mine"), PickScore.memory_gib(device="cpu")) == (None, 0.0)


def test_seats_are_counted_among_the_devices() -> None:
    config = seated("reward.gpus_per_worker=0.25", "reward.num_workers=2", judge=judge(workers=2, gpus_per_worker=1))
    assert [(seat.pools, seat.share) for seat in reward_seats(config)] == [(("reward",), 0.25), (("reward/judge",), 1)]
    assert gpus_taken(config) == 1 + 1 + 2 + 1
    assert describe_gpus(config) == "the run takes 5 devices: trainer 1, rollout 1, reward 2 x 0.25, reward/judge 2"
    config.rollout.gpus_per_worker = 0.5
    assert gpus_taken(config) == 4
    config.evaluate.reward.terms = {"a": judge(5.0, gpus_per_worker=0.5), "b": judge(7.0)}
    assert [(*seat.pools, seat.footprint.parts) for seat in reward_seats(config)] == [
        ("reward", {"reward models: b": 7 * GIB}),
        ("reward/judge", {"reward models: judge": 3 * GIB}),
        ("held_out/a", {"reward models: a": 5 * GIB}),
    ]
    assert reward_seats(config)[-1].key == "evaluate.reward.terms.a.gpus_per_worker"
    assert describe_gpus(config).endswith("reward 2 x 0.25, reward/judge 2, held_out/a 2 x 0.5")
    assert gpus_taken(config) == 5
    assert gpus_taken(seated("placement=shared")) == 1


def test_a_seat_that_is_too_small_is_refused_before_models_are_loaded() -> None:
    config = seated(judge=judge(20.0, gpus_per_worker=0.25))
    with pytest.raises(ConfigError) as refused:
        check_devices(config, {"reward/judge": 79 * GIB})
    assert "a worker of the pool reward/judge needs 20 of its 19.8 GiB" in str(refused.value)
    assert "reward.terms.judge.gpus_per_worker=0.3 " in str(refused.value)
    for gib in (19, 22):  # Without margin and runtime it would fit the second.
        with pytest.raises(ConfigError, match=r"reward\.terms\.judge\.gpus_per_worker=1 and a device of 24 GiB"):
            check_devices(config, {"reward/judge": gib * GIB})
    whole = seated(judge=judge(20.0, gpus_per_worker=1.0))
    (tight,) = check_devices(whole, {"reward/judge": 24 * GIB})
    assert "needs 23.4 of its 24 GiB" in tight
    config.allow_oom = True
    assert any("needs 20 of its" in warning for warning in check_devices(config, {"reward/judge": 79 * GIB}))
    config.reward.terms["judge"].options = {"gib": 16.0}
    (tight,) = check_devices(config, {"reward/judge": 79 * GIB})
    assert "a worker of the pool reward/judge needs" in tight
    config.reward.terms["judge"].options = {"gib": None}
    assert check_devices(config, {"reward/judge": 79 * GIB}) == []


def large_model() -> Sizes:
    """Qwen-Image's sizes."""
    base, text = 40_600_000_000, 2 * 8_292_166_656
    return Sizes(base // 2, base, 60, int(0.63 * GIB), 0, 421_900_000, text, 126_900_000, 0, 2, full=False)


def test_tensor_parallel_changes_what_a_gpu_holds_and_how_many_there_are() -> None:
    config = compose_config("one_step_off", ["rollout.engine=vllm_omni"])
    spread = replace(config, rollout=replace(config.rollout, gpus_per_worker=4))
    one, four = (rollout_footprint(each, large_model()).parts["base weights"] for each in (config, spread))
    assert four == -(-one // 4)
    assert (gpus_taken(config), gpus_taken(spread)) == (2, 5)
