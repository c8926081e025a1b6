"""Planted faults in weights that lie in shares on several trainer ranks (tune=full with trainer.shard=full)."""

from typing import Any

from tests.mutants.mutation import Mutant, nothing
from tests.unit.checkpoint_engine.test_engine_share_binding import rows_swapped

BINDING = "tests.unit.checkpoint_engine.test_engine_share_binding"
SHARDS = "checkpoint_engine.shards"


def oldest_retained(piece: Any) -> Any:
    """A rank sends the rows of the oldest version that it has."""

    def fault(publisher: Any, version: int, start: int, size: int) -> Any:
        return piece(publisher, min(publisher.retained(), default=version), start, size)

    return fault


def one_row_fewer(rows: Any) -> Any:
    """The last row of each share but the last one is sent by nobody."""

    def fault(count: int, shards: int, index: int) -> range:
        own: range = rows(count, shards, index)
        return range(own.start, max(own.start, own.stop - (index < shards - 1)))

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
        "a rank sends its share of an older version",
        {"checkpoint_engine.publisher:Publisher.piece": oldest_retained},
        "tests.chaos.test_share_schedules:test_a_calm_delivery_is_whole",
    ),
    Mutant(
        "a row of each share is left out",
        {f"{SHARDS}:shard_rows": one_row_fewer},
        "tests.unit.checkpoint_engine.test_engine_shards:test_shares_are_cut_as_torch_cuts_them",
        arguments={"ranks": 2},
    ),
)
