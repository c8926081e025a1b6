"""Test of the number of calls by which the controller asks the trainer ranks of a step."""

import pytest

from async_flowrl.controller.replicas import MAX_GROUPS_PER_CALL
from tests.support.toy import toy_config, virtual
from tests.support.toy_pool import Timing


@pytest.mark.parametrize("hand_over", ["batch", "stream"])
@pytest.mark.parametrize("groups", [16, 64])
def test_calls_of_trainer_ranks_do_not_grow_with_groups_times_ranks(hand_over: str, groups: int) -> None:
    """A step ends with two calls of each rank. Of a batch a call has up to eight groups; of a stream, those that are
    ready, so there are never more calls than groups."""
    steps, ranks = 3, 4
    config = toy_config(1, hand_over=hand_over, steps=steps, prompts_per_step=groups, trainer__num_workers=ranks)
    found = virtual(config, Timing(generate=0.01, update=1.0))
    counts = [worker.calls for worker in found.groups["trainer"].workers]
    assert all(each["add_up"] == each["take_step"] == steps for each in counts)
    of_a_rank = -(-groups // (ranks * MAX_GROUPS_PER_CALL)) + 1
    most = steps * (ranks * of_a_rank if hand_over == "batch" else groups - 1)
    assert sum(each["train"] for each in counts) <= most
