"""Checks that must hold for every toy run (toy.py) of STEPS steps, whatever faults happened in it."""

from tests.support.toy import ToyRun

STEPS = 6


def check_bound(found: ToyRun, k: int) -> None:
    """Checks that every group of step s was made by version max(0, s - k), where k is `max_staleness`."""
    ages = [step - version for step, _, version in found.trained]
    assert ages == [min(step, k) for step, _, _ in found.trained]
    assert found.staleness() == [min(step, k) for step in range(STEPS)]


def check_once(found: ToyRun) -> None:
    """Checks that every group was trained exactly once, in its own step, and that no ticket is left in the table."""
    trained = [(step, group) for step, group, _ in found.trained]
    assert sorted(trained) == [(s, g) for s in range(STEPS) for g in range(4)]
    assert [step for step, _ in trained] == sorted(step for step, _ in trained)
    finished = [event["ordinal"] for event in found.tickets("TRAINED")]
    assert finished == list(range(found.table.issued))
    assert list(found.table.live()) == []


def check_watermarks(found: ToyRun) -> None:
    """Checks every ticket's weights: the digest that it reported, that of the live bytes at its end, the published one.

    All three must be equal.
    """
    published = found.published()
    seen = [mark for worker in found.groups["rollout"].everybody for mark in worker.target.watermarks]
    assert len(seen) >= found.table.issued
    for version, reported, live in seen:
        assert reported == live == published[version]


def check_evaluation(found: ToyRun, versions: list[int]) -> None:
    """Checks that exactly these versions were evaluated, each with images that were made by its own weights."""
    assert [result.version for result in found.evaluated] == versions
    published = found.published()
    made = found.tickets("SCORING", kind="evaluation")
    assert sorted({event["version"] for event in made}) == versions
    assert all(event["digest"] == published[event["version"]] for event in made)
