"""Findings on optional features on a cluster: a node fails if it lacks one that a worker placed there would need."""

from collections.abc import Iterator, Mapping, Sequence

from async_flowrl.config.schema import Config
from async_flowrl.doctor.findings import FAILED, OK, SKIPPED, Finding
from async_flowrl.doctor.machines import Machine, room_for
from async_flowrl.doctor.optional import FEATURES, needed
from separation.group import PoolSpec

Missing = Mapping[str, Mapping[str, str]]
"""Name of a node → what `optional.missing` found there. A node that gave no answer is left out."""


def node_feature_findings(
    config: Config, wanted: Sequence[PoolSpec], machines: Sequence[Machine], missing: Missing
) -> Iterator[Finding]:
    """Yields one finding per optional feature that the configuration needs.

    It is a failure if a node lacks the feature and has room for a worker that needs it, because Ray may choose that
    node. Other nodes need nothing: the head of a cluster of GPUs, for example, need not have cupy.
    """
    asked = [machine for machine in machines if machine.name in missing]
    specs = {spec.name: spec for spec in wanted}
    for feature, pools in needed(config).items():
        homes: dict[str, list[str]] = {}
        for pool in pools:
            for machine in room_for(specs[pool], asked):
                homes.setdefault(machine.name, []).append(pool)
        by_name = {machine.name: machine for machine in asked}
        lacks = {name: lack for name in homes if (lack := lacking(feature, by_name[name], missing[name])) is not None}
        yield finding_on(feature, homes, lacks)


def lacking(feature: str, machine: Machine, missing: Mapping[str, str]) -> str | None:
    """Returns what a node lacks of a feature; None if workers there can use it."""
    if feature in missing:
        return missing[feature]
    on_gpu = machine.facts["gpus"] or (machine.resources or {}).get("GPU", 0) > 0
    return "no GPU" if FEATURES[feature].on_device and not on_gpu else None


def finding_on(feature: str, homes: Mapping[str, Sequence[str]], lacks: Mapping[str, str]) -> Finding:
    """Returns the finding on a feature.

    `homes` maps a node to the pools that need the feature and have room there, `lacks` a node to what it lacks.
    """
    title, what = f"optional {feature} on the nodes", FEATURES[feature].what
    if not homes:
        return Finding(title, SKIPPED, "no node has room for a worker that needs it", f"needed for {what}")
    if not lacks:
        return Finding(title, OK, f"on all {len(homes)} nodes with room for workers that need it, for {what}")
    said = "; ".join(f"{name} (room for {', '.join(homes[name])}): {lack}" for name, lack in lacks.items())
    advice = f"this configuration asks for it ({what}): install it there, or start Ray there without room for them"
    return Finding(title, FAILED, said, advice, {"lacking": dict(lacks)})
