"""Planted faults in weights that lie in shares on several trainer ranks (tune=full with trainer.shard=full)."""

from contextlib import nullcontext
from typing import Any

from tests.mutants.mutation import Mutant, after, nothing
from tests.unit.checkpoint_engine.test_engine_gather import rows_swapped

GATHER, GATHERS = "checkpoint_engine.gather:Gather", "tests.unit.checkpoint_engine.test_engine_gather"
MANIFEST, SAVING = "async_flowrl.training.checkpoint", "async_flowrl.training.sharded"
CHECKPOINT, RECOVERY = "tests.unit.training.test_shard_checkpoint", "tests.unit.test_share_recovery"


def only_sizes(check: Any) -> Any:
    return lambda path, name, expected, *, hashed: check(path, name, expected, hashed=False)


def trains_beside(weights: Any, pool: Any) -> None:
    weights.training = nullcontext()


SHARE_FAULTS = (
    Mutant(
        "the gather puts two tensors of one shape into each other's place",
        {f"{GATHER}.place": rows_swapped, "checkpoint_engine.gather:check_sample": nothing},
        f"{GATHERS}:test_every_tensor_gets_its_own_rows",
        raises=("WeightsMismatch",),
    ),
    Mutant(
        "the rows that were gathered are not compared with the ranks' samples",
        {"checkpoint_engine.gather:check_sample": nothing},
        f"{GATHERS}:test_rows_that_change_after_the_version_was_made_are_named",
        arguments={"rank": 1},
        raises=("Failed",),
    ),
    Mutant(
        "an older version is gathered once more while the ranks train",
        {"async_flowrl.controller.rank_weights:ShardedWeights.__init__": after(trains_beside)},
        "tests.unit.test_late_receivers:test_a_receiver_killed_while_step_n_plus_2_trains_gets_version_n",
        arguments={"k": 1, "hand_over": "batch"},
    ),
    Mutant(
        "the digest of a share is not compared",
        {f"{MANIFEST}:_check": only_sizes},
        f"{CHECKPOINT}:test_a_damaged_share_is_found_by_its_rank_and_a_short_one_by_all",
        raises=("Failed",),
    ),
    Mutant(
        "a share that is shorter than its writer says makes a checkpoint",
        {f"{MANIFEST}:_check_sizes": nothing},
        f"{CHECKPOINT}:test_a_share_that_is_not_there_as_it_was_written_makes_no_checkpoint",
        raises=("Failed",),
    ),
    Mutant(
        "a run goes on from shares that nobody has verified",
        {f"{SAVING}:verify_share": nothing},
        f"{RECOVERY}:test_a_damaged_share_is_passed_over",
        arguments={"rank": 0, "how": "flip"},
        raises=("AssertionError", "WorkerFailed"),
    ),
    Mutant(
        "every rank verifies the share of the first one",
        {f"{SAVING}:verify_share": lambda verify: lambda path, rank: verify(path, 0)},
        f"{RECOVERY}:test_a_damaged_share_is_passed_over",
        arguments={"rank": 1, "how": "flip"},
        raises=("AssertionError", "WorkerFailed"),
    ),
)
