"""Tests of counts that are refused before anything starts, and of the learning rate."""

from typing import Any

import pytest
from omegaconf import OmegaConf

from async_flowrl.config.paths import config_dir
from async_flowrl.config.schema import TrainerConfig
from async_flowrl.tickets.arithmetic import check_batching, trained_steps
from async_flowrl.training.optimizer import learning_rate
from tests.support import trainer_rig as rig


def test_the_small_configuration_is_sound() -> None:
    config = rig.tiny_config()
    check_batching(config)
    assert trained_steps(config) == 3


@pytest.mark.parametrize(
    ("trainer", "sentence"),
    [
        ({"shard": "hybrid", "num_workers": 4}, "trainer.shard=hybrid needs trainer.shard_size"),
        (
            {"shard": "hybrid", "num_workers": 4, "shard_size": 3},
            "trainer.shard_size=3 must divide trainer.num_workers=4; nearest: 2 or 4",
        ),
        ({"micro_batch_size": 3}, "trainer.micro_batch_size=3 must divide .*=4; nearest: 2 or 4"),
        ({"timesteps_per_forward": 2}, "trainer.timesteps_per_forward=2 must divide the number of trained steps=3"),
        ({"updates_per_batch": 3}, "trainer.updates_per_batch=3 must divide prompts_per_step=2; nearest: 1 or 2"),
    ],
)
def test_counts_that_do_not_divide_are_refused(trainer: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        check_batching(rig.tiny_config(**trainer))


def test_streaming_makes_one_optimizer_step_per_batch() -> None:
    config = rig.tiny_config(updates_per_batch=2)
    check_batching(config)
    config.hand_over = "stream"
    with pytest.raises(ValueError, match="hand_over=stream"):
        check_batching(config)


@pytest.mark.parametrize("algorithm", ["flow_grpo", "dpo"])
def test_any_number_of_ranks_trains_any_group(algorithm: str) -> None:
    for ranks in (2, 3, 5, 64):
        config = rig.tiny_config(num_workers=ranks)
        config.algorithm.name = algorithm
        check_batching(config)


def test_a_pair_stays_in_one_micro_batch() -> None:
    config = rig.tiny_config(micro_batch_size=1)
    config.algorithm.name = "dpo"
    with pytest.raises(ValueError, match=r"trainer\.micro_batch_size must be at least 2, got 1"):
        check_batching(config)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, 1.0, 1.0, 0.8535533905932737, 0.5, 0.14644660940672627]),
    ],
)
def test_learning_rate(schedule: str, expected: list[float]) -> None:
    config = rig.tiny_config(lr_schedule=schedule, warmup_steps=2, learning_rate=1.0).trainer
    assert [learning_rate(config, step, 6) for step in range(6)] == pytest.approx(expected)
    if schedule != "constant":
        assert learning_rate(config, 6, 6) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("name", sorted(path.stem for path in (config_dir() / "trainer").glob("*.yaml")))
def test_the_shipped_trainer_settings_fit_the_schema(name: str) -> None:
    values = OmegaConf.load(config_dir() / "trainer" / f"{name}.yaml")
    merged = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(TrainerConfig), values))
    assert isinstance(merged, TrainerConfig) and merged != TrainerConfig()
