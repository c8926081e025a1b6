"""Test of the rows of whole weights that `make prove` writes: real runs, whose processes are delayed and killed."""

from pathlib import Path

import pytest

from async_flowrl import prove

pytestmark = [pytest.mark.slow, pytest.mark.chaos, pytest.mark.timeout(900)]


@pytest.mark.parametrize("place", [0, 1], ids=["on one rank", "in shares of two ranks"])
def test_the_rows_of_whole_weights_have_one_digest(tmp_path: Path, place: int) -> None:
    """A case raises NotProven if its disturbance does not happen. Without training the digest would be another."""
    family = prove.whole_weights([])[place]
    assert "tune=full" in family.overrides and ("trainer.shard=full" in family.overrides) == bool(place)
    digests = prove.run_cases(family, tmp_path)
    assert len(digests) == len(family.cases) >= 2 and len(set(digests.values())) == 1
    untrained = prove.undisturbed(tmp_path / "untrained", [*family.overrides, "trainer.learning_rate=1e-9"])
    assert untrained not in digests.values()
