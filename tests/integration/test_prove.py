"""Test of the rows of whole weights that `make prove` writes: real runs, whose processes are delayed and killed."""

from pathlib import Path

import pytest

from benchmarks import prove

pytestmark = [pytest.mark.slow, pytest.mark.chaos, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("place", [0, 1], ids=["on one rank", "in shares of two ranks"])
def test_the_rows_of_whole_weights_have_one_digest(tmp_path: Path, place: int) -> None:
    """A case raises NotProven if its disturbance does not happen. Every step changes the weights, so they differ."""
    family = prove.whole_weights([])[place]
    assert "tune=full" in family.overrides and ("trainer.shard=full" in family.overrides) == bool(place)
    digests = prove.run_cases(family, tmp_path)
    assert len(digests) == len(family.cases) >= 2 and len(set(digests.values())) == 1
    for number in range(len(family.cases)):
        versions = prove.events(tmp_path / f"{family.folder}_{number}", "version")
        sent = {event["digest"] for event in versions if event["state"] == "sent" and event["stream"] == "policy"}
        assert len(sent) == 7, "versions 0 to 6, each of which is another, also when it is sent again"
