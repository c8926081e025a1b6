"""Toy runs with a run directory: real checkpoints, ledgers and recoveries on toy pools in virtual time.

`run_controller` runs one controller. If it is killed, the run directory is copied at that moment, so nothing counts
that the controller writes afterwards; a test then starts the next controller in the copy.
"""

import asyncio
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from async_flowrl.algorithms.registry import build_algorithm
from async_flowrl.config.schema import Config
from async_flowrl.controller.resume import find_resume, warn_of_differences
from async_flowrl.controller.trainer import TrainerGroup
from async_flowrl.observability.evaluations import EvaluationLog
from async_flowrl.observability.events import Event, read_events
from async_flowrl.observability.run_directory import RunDirectory
from async_flowrl.policies.pipeline import Shapes
from async_flowrl.policies.registry import ResolvedModel
from async_flowrl.run.job import open_ledgers
from async_flowrl.run.launch import load_pools
from async_flowrl.run.prepare import Prepared
from async_flowrl.run.recovery import Run, restore, train_with_recovery, with_unevaluated
from async_flowrl.run.stopping import StopRequest
from async_flowrl.tickets.request import RequestBuilder
from async_flowrl.training.checkpoint import TRAINER
from async_flowrl.types import Prompt
from checkpoint_engine.transports import OBJECT_STORE
from separation.group import WorkerDied
from tests.support.toy import toy_groups
from tests.support.toy_pool import Fault, ToyPool, World
from tests.support.virtual import run_virtual

Groups = Mapping[str, ToyPool]
PROMPTS = [Prompt(index, f"prompt {index}") for index in range(5)]
CALLS = ("/retries", "/failures")
UNCOMPARED = ("timing/", "pool/", "images_per_s", "evaluation")
"""Prefixes of metrics that may differ between equal runs (times), or that are compared elsewhere (evaluations)."""


@dataclass
class Outside:
    """The test's side of a controller: `disturb` runs beside the controller and may call `kill` or ask `stop`."""

    world: World
    disturb: Callable[["Outside", Groups], Any] | None = None
    stop: StopRequest = field(default_factory=StopRequest)
    killed: asyncio.Event = field(default_factory=asyncio.Event)

    def kill(self) -> None:
        self.killed.set()


Disturb = Callable[[Outside, Groups], Any]


def at(**calls: str) -> Fault:
    """Returns a Fault for calls of trainer-0, e.g. `at(add_up_3="kill")` for its third optimizer step."""
    wanted = {(method.rpartition("_")[0], int(method.rpartition("_")[2])): what for method, what in calls.items()}
    return lambda worker, method, number: wanted.get((method, number)) if worker == "trainer-0" else None


def kill_after(seconds: float) -> Disturb:
    async def disturb(outside: Outside, groups: Groups) -> None:
        await asyncio.sleep(seconds)
        outside.kill()

    return disturb


def run_controller(
    config: Config, root: Path, world: World, *, disturb: Any = None, horizon: float = 1e5
) -> Path | None:
    """Runs one controller in the run directory `root`.

    Returns None if it ended by itself. If it was killed, or asked to stop and then lost a worker, it returns a copy of
    the directory from that moment. No pictures and no config.yaml are written, because they would take most of the
    time.
    """

    async def body() -> Path | None:
        outside = Outside(world, disturb)
        main = asyncio.ensure_future(controller(config, root, outside))
        death = asyncio.ensure_future(outside.killed.wait())
        await asyncio.wait([main, death], return_when=asyncio.FIRST_COMPLETED)
        if outside.killed.is_set() and not main.done():
            return Path(shutil.copytree(root, root.with_name(f"{root.name}k")))
        death.cancel()
        try:
            await main
        except WorkerDied:
            if not outside.stop():
                raise
            # `train` in run/job.py ends such a run with the exit code RESUMABLE.
            return Path(shutil.copytree(root, root.with_name(f"{root.name}k")))
        return None

    pictures = mock.patch("async_flowrl.controller.evaluation.write_grid")
    settings = mock.patch("async_flowrl.observability.run_directory.OmegaConf", **{"to_yaml.return_value": ""})
    with pictures, settings:
        return run_virtual(body(), horizon=horizon)


async def controller(config: Config, root: Path, outside: Outside) -> None:
    """Does what `train` in run/job.py does, with toy pools in place of a cluster."""
    directory = RunDirectory(root)
    directory.create(config, {})
    algorithm = build_algorithm(config)
    prepared = Prepared(
        config,
        ResolvedModel("toy", "toy", None, "float32"),
        algorithm,
        RequestBuilder(config, PROMPTS, PROMPTS[:2]),
        Shapes((4,), {}),
        data=None,
        sizes=(32,),
    )
    resume = find_resume(prepared.requests, directory)
    groups = toy_groups(config, outside.world)
    trainers = TrainerGroup(groups["trainer"], algorithm)
    info = await load_pools(config, groups, trainers)
    warn_of_differences(config, resume, info["device"])
    resume = with_unevaluated(config, resume, EvaluationLog(directory.evaluations))
    resume = await restore(trainers, directory, resume, lambda: find_resume(prepared.requests, directory, shares=True))
    ledgers = open_ledgers(prepared, directory, resume, clock=asyncio.get_running_loop().time)
    digest, device = info["base_digest"], info["device"]
    run = Run(prepared, directory, groups, trainers, ledgers, outside.stop, digest, "", device, OBJECT_STORE, {})
    beside = asyncio.ensure_future(outside.disturb(outside, groups)) if outside.disturb else None
    try:
        ctx = await train_with_recovery(run, resume)
        last = directory.checkpoints / f"step_{ctx.table.step}" / TRAINER
        digest = json.loads(last.read_text())["weights_digest"]
        summary = {"steps": ctx.table.step, "max_staleness": config.max_staleness, "weights_digest": digest}
        directory.write_summary(summary)
    finally:
        if beside is not None:
            beside.cancel()
        ledgers.events.close()
        ledgers.monitor.close()
        directory.release()


@contextmanager
def toy_ranks_meet(trainer_of: Callable[[Any], Any] = lambda worker: worker.target) -> Iterator[None]:
    """Context in which toy ranks need no process group: those that meet are those whose sums are added.

    `trainer_of` returns the toy trainer of a worker.
    """

    async def meet(pool: Any, timeout: float) -> None:
        targets = [trainer_of(worker) for worker in pool.workers]
        for target in targets:
            target.ranks = lambda: targets

    with mock.patch("async_flowrl.run.launch.join_process_group", meet):
        yield


def summary(root: Path) -> dict[str, Any]:
    return dict(json.loads((root / "summary.json").read_text()))


def logged(root: Path) -> list[dict[str, Any]]:
    """Returns the lines of metrics.jsonl without times, evaluations, and counts of reward calls."""
    lines = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
    return [
        {key: x for key, x in line.items() if not key.startswith(UNCOMPARED) and not key.endswith(CALLS)}
        for line in lines
    ]


def evaluations(root: Path) -> dict[int, float]:
    """Returns evaluated version → mean reward."""
    found: dict[int, float] = {}
    for text in (root / "metrics.jsonl").read_text().splitlines():
        line = json.loads(text)
        if "evaluation/reward/mean" in line:
            found[line["step"] + 1] = line["evaluation/reward/mean"]
        if "evaluation_before/reward/mean" in line:
            found[0] = line["evaluation_before/reward/mean"]
    return found


def rollbacks(root: Path) -> list[int]:
    return [event["step"] for event in events(root, "rollback")]


def events(root: Path, name: str) -> list[Event]:
    return [event for event in read_events(root / "events.jsonl") if event["event"] == name]
