"""Tests of counts that are refused before anything starts, and of the learning rate."""

import pytest

from async_flowrl.tickets.arithmetic import check_batching
from async_flowrl.training.optimizer import learning_rate
from tests.support import trainer_rig as rig


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


def test_the_last_part_may_be_smaller_where_not_all_images_of_a_group_train() -> None:
    config = rig.tiny_config(micro_batch_size=3)
    assert config.group_size == 4
    with pytest.raises(ValueError, match=r"trainer\.micro_batch_size"):
        check_batching(config)
    config.algorithm.train_images_per_group = 4
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
