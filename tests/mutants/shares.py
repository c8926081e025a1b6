"""Planted faults in weights that lie in shares on several trainer ranks (tune=full with trainer.shard=full)."""

from typing import Any

from tests.mutants.mutation import Mutant, nothing
from tests.unit.checkpoint_engine.test_engine_share_binding import rows_swapped

BINDING = "tests.unit.checkpoint_engine.test_engine_share_binding"
SHARDS = "checkpoint_engine.shards"
MANIFEST, SAVING = "async_flowrl.training.checkpoint_manifest", "async_flowrl.training.shard_saving"
CHECKPOINT, RECOVERY = "tests.unit.training.test_shard_checkpoint", "tests.unit.test_share_recovery"


def only_sizes(check: Any) -> Any:
    return lambda path, name, expected, *, hashed: check(path, name, expected, hashed=False)


def always_the_first_share(verify_share: Any) -> Any:
    return lambda path, rank: verify_share(path, 0)


def the_first_choice(with_sound_shares: Any) -> Any:
    async def fault(trainers: Any, resume: Any, another: Any) -> Any:
        await with_sound_shares(trainers, resume, lambda: resume)
        return resume

    return fault


SHARE_FAULTS = (
    Mutant(
        "two tensors of one shape take each other's rows",
        {f"{SHARDS}:_places": rows_swapped},
        f"{BINDING}:test_every_tensor_gets_its_own_rows",
        raises=("WeightsMismatch",),
    ),
    Mutant(
        "a version in shares is retained before it is verified",
        {f"{SHARDS}:_UnderWay.check": nothing},
        f"{BINDING}:test_a_version_that_is_damaged_or_torn_is_not_retained",
        raises=("Failed",),
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
        {f"{SAVING}:verify_share": always_the_first_share},
        f"{RECOVERY}:test_a_damaged_share_is_passed_over",
        arguments={"rank": 1, "how": "flip"},
        raises=("AssertionError", "WorkerFailed"),
    ),
    Mutant(
        "the checkpoint with a damaged share is tried again",
        {"async_flowrl.run.recovery:with_sound_shares": the_first_choice},
        f"{RECOVERY}:test_a_damaged_share_is_passed_over",
        arguments={"rank": 1, "how": "flip"},
        raises=("WorkerFailed",),
    ),
)
