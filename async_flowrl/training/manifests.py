"""Exactly once: what the ranks say is in their sums, against what an optimizer step is to train."""

from collections.abc import Iterable, Mapping

from async_flowrl.training.messages import Manifest

Parts = Mapping[int, int]
"""Group → how many parts it has."""


class NotThePlan(RuntimeError):
    """The sums of the ranks are not the optimizer step that was planned. Nothing was added up; the message says why."""


def missing(planned: Parts, manifests: Iterable[Manifest]) -> dict[int, set[int]]:
    """Group → its parts that are in nobody's sum."""
    there = {part for manifest in manifests for part in manifest.parts}
    lacking = {group: {p for p in range(count) if (group, p) not in there} for group, count in planned.items()}
    return {group: parts for group, parts in lacking.items() if parts}


def check_plan(step: int, update: int, attempt: int, planned: Parts, manifests: Mapping[str, Manifest]) -> None:
    """Raises NotThePlan unless every planned part is in one sum, and all sums are of this attempt.

    `manifests` by the names of the ranks; one that has nothing to add needs none.
    """
    where = f"step {step}, optimizer step {update}"
    owners: dict[tuple[int, int], str] = {}
    for name, manifest in manifests.items():
        if (manifest.step, manifest.update, manifest.attempt) != (step, update, attempt):
            raise NotThePlan(
                f"{where}, attempt {attempt}: {name} has a sum of step {manifest.step}, optimizer step "
                f"{manifest.update}, attempt {manifest.attempt}"
            )
        for group, part in manifest.parts:
            if (other := owners.get((group, part))) is not None:
                raise NotThePlan(f"{where}: part {part} of group {group} is in the sums of {other} and of {name}")
            if part >= planned.get(group, 0):
                raise NotThePlan(f"{where}: {name} has added part {part} of group {group}, which was not planned")
            owners[group, part] = name
    if lacking := missing(planned, manifests.values()):
        group, parts = next(iter(lacking.items()))
        raise NotThePlan(f"{where}: part {min(parts)} of group {group} is in no rank's sum")
