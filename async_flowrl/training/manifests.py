"""Checks before the gradient sums of several ranks are added: each planned part must be in exactly one of them."""

from collections.abc import Iterable, Mapping

from async_flowrl.training.messages import Manifest

Parts = Mapping[int, int]
"""Number of a group → number of its parts."""


class NotThePlan(RuntimeError):
    """Raised if the ranks' sums are not exactly the planned optimizer step; nothing was added up yet."""


def missing(planned: Parts, manifests: Iterable[Manifest]) -> dict[int, set[int]]:
    """Returns the planned parts that are in no sum: number of the group → numbers of the parts."""
    there = {part for manifest in manifests for part in manifest.parts}
    lacking = {group: {p for p in range(count) if (group, p) not in there} for group, count in planned.items()}
    return {group: parts for group, parts in lacking.items() if parts}


def check_plan(step: int, update: int, attempt: int, planned: Parts, manifests: Mapping[str, Manifest]) -> None:
    """Raises NotThePlan unless each planned part is in exactly one sum, and all sums are of this step and attempt.

    `manifests` maps the name of a rank to the contents of its sum; a rank with an empty sum may be missing.
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
