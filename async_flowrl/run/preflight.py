"""The check whether a configuration can start here, or with `runtime.address` on every node of that cluster."""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from async_flowrl.config.check import ConfigError
from async_flowrl.config.paths import expanded
from async_flowrl.config.schema import SHARED, Config
from async_flowrl.config.scoring_pools import ROLLOUT, TRAINER, is_scoring_pool, scoring_pools
from async_flowrl.memory import devices, host
from async_flowrl.memory.footprints import MemoryPlan, plan_memory
from async_flowrl.memory.trainer_layout import resolved
from async_flowrl.run import features
from async_flowrl.run import machines as nodes
from async_flowrl.run.findings import FAILED, OK, SKIPPED, WARNING, Finding, failed, verdict
from async_flowrl.run.launch import check_machine
from async_flowrl.run.machines import GB, GIB, FactsRequest, Machine, facts
from async_flowrl.run.nodes import OUR_CODE, marked
from async_flowrl.run.pools import pools
from async_flowrl.run.precheck import precheck
from async_flowrl.run.prepare import Prepared, doubts_of, prepare
from separation.cluster_probe import Survey, survey
from separation.group import VISIBLE_DEVICES, PoolSpec
from separation.resources import ResourcesMissing

FACTS, MISSING = "async_flowrl.run.machines:facts", "async_flowrl.run.features:missing"
NODES_SECONDS = 120.0  # Seconds for which nodes are waited for, if more than one is wanted.
FOLDER_BYTES = 200_000_000  # Size of a run directory without checkpoints: logs, metrics, images, report.
REFUSED, WARNED = "a run would refuse it with this sentence", "a run says this, too"
START = "start a cluster (ray start --head), or leave runtime.address out for one of this machine"


def configuration_findings(config: Config, least_nodes: int = 1) -> Iterator[Finding]:
    """Yields the findings on a configuration, then on the machines, until a failure leaves nothing more to check."""
    try:
        prepared = prepare(precheck(config), whole=True)
    except ConfigError as error:
        yield failed("configuration", error, REFUSED)
        return
    shown = f"{config.mode_name}, {config.model.path}, {config.total_steps} steps"
    yield Finding("configuration", OK, f"{shown}: composed, checked, its prompts and model found")
    yield from (Finding("configuration", WARNING, doubt, WARNED) for doubt in doubts_of(prepared))
    yield from start_findings(prepared, least_nodes)


def preflight(prepared: Prepared) -> list[str]:
    """Returns the warnings of `preflight=true`. Raises ConfigError with all failed findings if a run cannot start."""
    findings = list(start_findings(prepared))
    if broken := [f"  {finding.line()}" for finding in findings if finding.status == FAILED]:
        lines = [f"preflight: {len(broken)} of {len(findings)} checks failed, so nothing was started", *broken]
        raise ConfigError("\n".join(lines))
    return [f"preflight: {finding.line()}" for finding in findings if finding.status == WARNING]


def start_findings(prepared: Prepared, least_nodes: int = 1) -> Iterator[Finding]:
    config = prepared.config
    yield from (features.optional_finding(name, config) for name in features.FEATURES)
    try:
        check_machine(prepared)
    except ConfigError as error:
        yield failed("this machine", error, REFUSED)
        return
    with ExitStack() as stack:
        try:
            mark, text = stack.enter_context(marked(nearest(config)))
        except OSError:  # not writable; the finding on the run directory reports that
            mark = text = ""
        request = FactsRequest((run_folder(config),), OUR_CODE, tuple(modules_of(config)), mark, text)
        here = this_machine(request)
        if not config.runtime.on_this_machine:
            yield from on_cluster(prepared, here, request, least_nodes)
        else:
            yield nodes.machine_finding(here)
            yield from judged(prepared, here, [here], None)


def on_cluster(prepared: Prepared, here: Machine, request: FactsRequest, least: int) -> Iterator[Finding]:
    """Yields findings on every node of the cluster at `runtime.address`; a failure if nothing answers there."""
    config, address, specs = prepared.config, str(prepared.config.runtime.address), pools(prepared)
    try:
        with survey(address, nodes=least, wait=NODES_SECONDS if least > 1 else 0.0) as probe:
            advice = f"{least} were waited for ({NODES_SECONDS:g} s): see the output of `ray start` on the others"
            yield verdict("Ray", f"{len(probe.nodes)} nodes at {address}", (len(probe.nodes) < least, FAILED, advice))
            yield nodes.seats(specs, probe.nodes)
            machines = []
            reports, lacks = probe.run(FACTS, request), probe.run(MISSING, features.needed(config))
            for node in probe.nodes:
                answers, store = (reports[node.id], lacks[node.id]), node.resources.get("object_store_memory", 0.0)
                if errors := [answer for answer in answers if isinstance(answer, Exception)]:
                    yield failed(f"node {node.name}", errors[0], "install this package there, and start Ray from it")
                else:
                    machines.append(Machine(node.name, answers[0], store, node.resources, answers[1]))
            yield from map(nodes.machine_finding, machines)
            yield from nodes.same_findings(here.facts, machines)
            yield from features.feature_findings(config, machines)
            yield from judged(prepared, here, machines, probe) if machines else ()
    except (ResourcesMissing, ConnectionError, RuntimeError) as error:
        yield Finding("Ray", FAILED, f"runtime.address={address}: {str(error).partition(chr(10))[0]}", START)


def judged(prepared: Prepared, here: Machine, machines: Sequence[Machine], probe: Survey | None) -> Iterator[Finding]:
    config, version = prepared.config, 0
    yield device_finding(config, pools(prepared), machines)
    try:
        plan = plan_memory(config)
    except ValueError as error:
        yield failed("plan", error, "memory and disks were not compared", WARNING)
    else:
        version = plan.model.version_bytes
        on_gpus = any(machine.facts["gpus"] for machine in machines)
        yield memory_finding(memory_needs(config, plan, on_gpus=on_gpus), machines)
        yield store_finding(plan.payload, machines)
        yield from disk_findings(config, plan, here, machines)
    if probe is not None:
        yield from nodes.network_findings(probe, version)


def device_finding(config: Config, specs: Sequence[PoolSpec], machines: Sequence[Machine]) -> Finding:
    # GPUs that are too small are a failure, or a warning if there are larger ones, because Ray chooses among them when
    # the workers start. vllm_omni plans its memory itself.
    largest, smallest = 0, dict[str, int]()
    planned = {TRAINER, SHARED, *([ROLLOUT] if config.rollout.engine != "vllm_omni" else [])}
    for spec in specs:
        sizes = [int(gpu["memory"]) for one in nodes.room_for(spec, machines) for gpu in one.facts["gpus"]]
        if sizes and spec.gpus_per_worker and (spec.name in planned or is_scoring_pool(spec.name)):
            largest, smallest[spec.name] = max(largest, *sizes), min(sizes)
    if not smallest:
        return Finding("devices", SKIPPED, "no pool of the plan gets a GPU", "nothing to plan")
    try:
        warnings = devices.check_devices(resolved(config, smallest).applied(config), smallest)
    except ConfigError as error:
        mixed = largest > min(smallest.values())
        off = "Ray may choose larger ones: keep the pools off the smaller ones, ray start --num-gpus there"
        return failed("devices", error, off if mixed else REFUSED, WARNING if mixed else FAILED)
    sentence = (
        f"the plan fits the smallest GPUs: {', '.join(f'{pool} {n / GIB:.1f} GiB' for pool, n in smallest.items())}"
    )
    return verdict("devices", "; ".join(warnings) or sentence, (bool(warnings), WARNING, WARNED))


def memory_needs(config: Config, plan: MemoryPlan, *, on_gpus: bool) -> list[tuple[str, int]]:
    shares = {TRAINER: config.trainer.gpus_per_worker, ROLLOUT: config.rollout.gpus_per_worker}
    workers = {TRAINER: range(config.trainer.num_workers), ROLLOUT: range(config.rollout.worker_bounds[0])}
    with_gpus = [pool for pool, gpus in shares.items() if on_gpus and gpus > 0]
    needs = [
        *host.host_needs(config, plan.model, workers, with_gpus),
        *((pool.name, 0) for pool in scoring_pools(config) for _ in range(pool.workers)),
        ("controller", host.KEPT_BY_CONTROLLER * plan.snapshot * config.keeps_state),
    ]
    return [(title, host.PROCESS_BYTES + size) for title, size in needs]


def memory_finding(needs: Sequence[tuple[str, int]], machines: Sequence[Machine]) -> Finding:
    needed, free = sum(size for _, size in needs), [machine.facts["memory"] for machine in machines]
    alone = max(size for _, size in needs) > max(free)
    counted, where = host.listed(needs), nodes.everywhere(machines)
    sentence = f"{needed / GIB:.1f} GiB planned ({counted}), {sum(free) / GIB:.1f} free on {where}"
    advice = "fewer workers, a smaller batch, or machines with more: `async-flowrl plan --memory` shows the parts"
    return verdict("memory", sentence, (needed > sum(free) or alone, FAILED, advice))


def store_finding(payload: int, machines: Sequence[Machine]) -> Finding:
    """Compares the bytes that wait at most with the object stores, which lie on disk where /dev/shm is too small."""
    store = sum(machine.object_store for machine in machines)
    sentence = f"{payload / GB:.2f} GB of images and trajectories wait at most, there is room for {store / GB:.2f}"
    small = payload > store, FAILED, "a smaller step or max_staleness, or a larger --object-store-memory"
    slow = any(not one.store and 0 < one.facts["shm"] < one.object_store for one in machines)
    return verdict(
        "object store", sentence, small, (slow, WARNING, "/dev/shm is too small for it: docker run --shm-size")
    )


def disk_findings(config: Config, plan: MemoryPlan, here: Machine, machines: Sequence[Machine]) -> Iterator[Finding]:
    # It holds the kept checkpoints, one more being written, a best one, and the weights of both.
    folder, best = run_folder(config), config.save.best is not None
    checkpoint = plan.snapshot * (config.trainer.num_workers if config.in_shares else 1)
    size = FOLDER_BYTES + (1 + best) * plan.model.version_bytes + (config.save.keep + 1 + best) * checkpoint
    disk = here.facts["disks"][folder]
    sentence = f"{folder}: {size / GB:.2f} GB planned, {disk['free'] / GB:.1f} free"
    locked = not disk["writable"], FAILED, "it cannot be written: set output_dir to a folder of yours"
    yield verdict("run directory", sentence, locked, (size > disk["free"], FAILED, "free some, or lower save.keep"))
    blind = ", ".join(machine.name for machine in machines if not machine.facts["marked"])
    if len(machines) > 1:
        nowhere = not any(machine.facts["marked"] for machine in machines)
        advice = "set output_dir to a file system that all nodes see: checkpoints lie there"
        sentence = f"not seen on {blind}" if blind else f"seen by {nodes.everywhere(machines)}"
        yield verdict("shared run directory", sentence, (nowhere, FAILED, advice), (bool(blind), WARNING, advice))


def this_machine(request: FactsRequest) -> Machine:
    """Returns this machine; its GPUs are torch's if nvidia-smi shows none or CUDA_VISIBLE_DEVICES limits them."""
    here = facts(request)
    if not here["gpus"] or VISIBLE_DEVICES in os.environ:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        cards = (torch.cuda.get_device_properties(index) for index in range(count))
        here["gpus"] = [{"name": card.name, "memory": card.total_memory} for card in cards]
    return Machine("here", here)


def modules_of(config: Config) -> list[str]:
    terms = [*config.reward.terms.values(), *config.evaluate.reward.terms.values()]
    named = [config.model.family, config.model.tiny.family, config.algorithm.name, *(term.name for term in terms)]
    return sorted({name.rpartition(":")[0] for name in named if name is not None and ":" in name})


def run_folder(config: Config) -> str:
    return str(expanded(config.output_dir).absolute())


def nearest(config: Config) -> Path:
    return next(folder for folder in (Path(run_folder(config)), *Path(run_folder(config)).parents) if folder.is_dir())
