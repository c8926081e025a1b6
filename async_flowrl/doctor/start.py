"""The check whether a configuration can start here, or with `runtime.address` on every node of that cluster."""

import os
import secrets
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from async_flowrl.config.check import ConfigError
from async_flowrl.config.schema import Config
from async_flowrl.doctor.cards import devices
from async_flowrl.doctor.facts import Asked, facts
from async_flowrl.doctor.findings import FAILED, OK, WARNING, Finding, failed
from async_flowrl.doctor.machines import (
    Machine,
    disk_findings,
    interface_findings,
    machine_finding,
    memory_findings,
    run_folder,
    same_findings,
)
from async_flowrl.doctor.needs import Needs, needs_of
from async_flowrl.doctor.network import between, first
from async_flowrl.doctor.node_features import node_feature_findings
from async_flowrl.doctor.optional import needed, optional_findings
from async_flowrl.doctor.seats import seats
from async_flowrl.run.launch import check_machine
from async_flowrl.run.nodes import OUR_CODE
from async_flowrl.run.pools import pools
from async_flowrl.run.prepare import Prepared, doubts_of, prepare
from separation.cluster_probe import Node, Survey, survey
from separation.group import VISIBLE_DEVICES
from separation.placement import ResourcesMissing, totals

FACTS, MISSING = "async_flowrl.doctor.facts:facts", "async_flowrl.doctor.optional:missing"


@dataclass(frozen=True)
class Wanted:
    """Least number of nodes in the cluster, and the seconds to wait for them."""

    nodes: int = 1
    seconds: float = 0.0


def configuration_findings(config: Config, wanted: Wanted = Wanted()) -> Iterator[Finding]:
    """Yields all findings on a configuration: its own checks, then the machines.

    It stops after a failure that leaves nothing more to check.
    """
    try:
        prepared = prepare(config)
    except ConfigError as error:
        yield failed("configuration", error, "a run would refuse it with this sentence")
        return
    shown = f"{config.mode_name}, {config.model.path}, {config.total_steps} steps"
    yield Finding("configuration", OK, f"{shown}: composed, checked, its prompts and model found")
    yield from (Finding("configuration", WARNING, doubt, "a run says this, too") for doubt in doubts_of(prepared))
    yield from start_findings(prepared, wanted)


def start_findings(prepared: Prepared, wanted: Wanted = Wanted()) -> Iterator[Finding]:
    """Yields the findings of `configuration_findings` for a configuration that is already prepared."""
    config = prepared.config
    yield from optional_findings(config)
    try:
        check_machine(prepared)
    except ConfigError as error:
        yield failed("this machine", error, "a run would refuse it with this sentence")
        return
    with marked(run_folder(config)) as (mark, text):
        asked = Asked((run_folder(config),), OUR_CODE, tuple(modules_of(config)), mark, text)
        here = told_here(asked)
        if config.runtime.address is None or config.runtime.backend != "ray":
            yield from alone(prepared, here)
        else:
            yield from on_cluster(prepared, here, asked, wanted)


def alone(prepared: Prepared, here: Machine) -> Iterator[Finding]:
    """Yields findings for a run that uses only this machine."""
    what = (
        "threads of one process"
        if prepared.config.runtime.backend == "local"
        else "a run starts a cluster of its own here"
    )
    yield Finding("Ray", OK, f"not asked: {what}, which has room for every worker")
    yield machine_finding(here)
    yield from judged(prepared, here, [here])


def on_cluster(prepared: Prepared, here: Machine, asked: Asked, wanted: Wanted) -> Iterator[Finding]:
    """Yields findings on every node of the cluster at `runtime.address`; a failure if nothing answers there."""
    config, address = prepared.config, str(prepared.config.runtime.address)
    try:
        with survey(address, nodes=wanted.nodes, wait=wanted.seconds) as looked:
            yield reached(looked.nodes, address, wanted)
            yield seats(pools(prepared), looked.nodes)
            answers, parts = looked.run(FACTS, asked), looked.run(MISSING, list(needed(config)))
            machines = [
                Machine(node.name, answers[node.id], _store(node), node.resources, node.address)
                for node in looked.nodes
                if _answered(answers[node.id])
            ]
            for node in looked.nodes:
                if unanswered := [each for each in (answers[node.id], parts[node.id]) if not _answered(each)]:
                    yield silent(node, unanswered[0])
            yield from map(machine_finding, machines)
            yield from same_findings(here.facts, machines)
            yield from interface_findings(machines)
            missing = {node.name: parts[node.id] for node in looked.nodes if _answered(parts[node.id])}
            yield from node_feature_findings(config, pools(prepared), machines, missing)
            yield from judged(prepared, here, machines, looked)
    except (ResourcesMissing, ConnectionError, RuntimeError) as error:
        advice = "start a cluster (ray start --head), or leave runtime.address out for one of this machine"
        yield Finding("Ray", FAILED, f"runtime.address={address}: {first(error)}", advice)


def judged(
    prepared: Prepared, here: Machine, machines: Sequence[Machine], looked: Survey | None = None
) -> Iterator[Finding]:
    """Compares the needs of the configuration with the machines, and measures the network if `looked` is given."""
    if not machines:
        return
    config = prepared.config
    yield devices(config, pools(prepared), machines)
    needs: Needs | None = None
    try:
        needs = needs_of(config, on_gpus=any(machine.facts["gpus"] for machine in machines))
    except ValueError as error:
        yield Finding(
            "plan", WARNING, f"memory and disks were not compared: {first(error)}", "the model's shapes are not known"
        )
    if needs is not None:
        yield from memory_findings(needs, machines)
        yield from disk_findings(config, needs, here, machines)
    if looked is not None:
        yield from between(looked, needs.version if needs is not None else 0)


def reached(nodes: Sequence[Node], address: str, wanted: Wanted) -> Finding:
    """Checks that the cluster has as many nodes as wanted."""
    exists = totals(node.resources for node in nodes)
    sentence = f"{address} has {len(nodes)} nodes, {exists['CPU']:g} CPU and {exists['GPU']:g} GPU"
    if len(nodes) < wanted.nodes:
        advice = "see the output of `ray start` on the nodes that are missing: address, firewall, another Ray or Python"
        return Finding("Ray", FAILED, f"{sentence}, {wanted.nodes} were waited for ({wanted.seconds:g} s)", advice)
    return Finding("Ray", OK, sentence)


def told_here(asked: Asked) -> Machine:
    """Returns this machine; its GPUs are torch's if nvidia-smi shows none or CUDA_VISIBLE_DEVICES limits them."""
    told = facts(asked)
    if not told["gpus"] or VISIBLE_DEVICES in os.environ:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        cards = (torch.cuda.get_device_properties(index) for index in range(count))
        told["gpus"] = [{"name": card.name, "memory": card.total_memory} for card in cards]
    return Machine("here", told)


def modules_of(config: Config) -> list[str]:
    """Returns the modules that the configuration names as `pkg.module:attr`; every worker imports them."""
    terms = [*config.reward.terms.values(), *config.evaluate.reward.terms.values()]
    named = [config.model.family, config.model.tiny.family, config.algorithm.name, *(term.name for term in terms)]
    return sorted({name.partition(":")[0] for name in named if name is not None and ":" in name})


def _answered(answer: object) -> bool:
    return not isinstance(answer, Exception)


def _store(node: Node) -> float:
    return node.resources.get("object_store_memory", 0.0)


def silent(node: Node, error: Exception) -> Finding:
    """Returns the finding on a node that cannot run `facts`; usually async_flowrl is not installed there."""
    advice = "install this package there, in the same environment, and start Ray from it"
    return Finding(f"node {node.name}", FAILED, f"{type(error).__name__}: {first(error)}", advice)


@contextmanager
def marked(folder: str) -> Iterator[tuple[str, str]]:
    """Context with a temporary file in the run directory or its nearest existing parent; yields its path and its text.

    A node that can read the text shares the folder. Yields two empty strings if the file cannot be written.
    """
    place = Path(folder)
    while not place.is_dir():
        place = place.parent
    text = secrets.token_hex(16)
    try:
        mark = tempfile.NamedTemporaryFile("w", prefix=".async_flowrl_doctor_", dir=place)  # noqa: SIM115
    except OSError:  # not writable; the finding on the run directory reports that
        yield "", ""
        return
    with mark:
        mark.write(text)
        mark.flush()
        yield mark.name, text
