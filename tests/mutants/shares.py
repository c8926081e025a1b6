"""Planted faults in weights that lie in shares on several trainer ranks (tune=full with trainer.shard=full)."""

from tests.mutants.mutation import Mutant, nothing
from tests.unit.checkpoint_engine.test_engine_share_binding import rows_swapped

BINDING = "tests.unit.checkpoint_engine.test_engine_share_binding"
SHARDS = "checkpoint_engine.shards"


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
)
