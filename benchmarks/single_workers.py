"""python -m benchmarks.single_workers [key=value ...]: one worker of each pool against the bare loops.

Everything runs in this process, in turns, on the same images: a rollout worker, a trainer rank at age 1 as one_step_off
has it, the bare loops, and diffusers' own pipeline. CPU seconds are compared beside wall clock, because they stay true
on a machine that is busy with other things.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np
import torch

from async_flowrl.config.compose import compose_config
from async_flowrl.config.schema import Config
from async_flowrl.policies.loading import quiet
from async_flowrl.policies.lora import lora_modules
from async_flowrl.policies.registry import DTYPES
from async_flowrl.rollout.worker import RolloutWorker
from async_flowrl.run.prepare import Prepared, prepare
from async_flowrl.tickets.arithmetic import trained_steps
from async_flowrl.tickets.request import sampling
from async_flowrl.tickets.table import TRAIN, Ticket
from async_flowrl.training.messages import GroupMeta, StepPlan, TrainRequest
from async_flowrl.training.worker import TrainerWorker
from async_flowrl.types import Trajectory
from benchmarks.bare import Bare
from benchmarks.page import markdown_table

STREAM = "policy"


@dataclass(frozen=True)
class Ratios:
    """Rates (wall clock, CPU seconds), medians of pairs: above 1 the worker is faster than what it is compared with."""

    rollout_to_bare: tuple[float, float]
    bare_to_pipeline: tuple[float, float]
    update_to_bare: tuple[float, float]
    stage_to_update: float
    """Wall clock that the trainer waits for a publish, as a share of the update."""
    activate_to_generate: float
    seconds: dict[str, float]
    """Wall clock per training step of each contestant, least of all rounds."""


class Workers:
    """A rollout worker and a trainer rank that play one_step_off by hand."""

    def __init__(self, prepared: Prepared) -> None:
        config = prepared.config
        self.prepared, self.config = prepared, config
        self.rollout = RolloutWorker(config, prepared.model, 0, "rollout-0")
        self.trainer = TrainerWorker(config, prepared.model, 0, "trainer-0")
        self.rollout.load()
        self.trainer.load()
        self.step = 0
        self.batches: dict[int, list[Trajectory]] = {}
        self.staging: list[float] = []
        self.activating: list[float] = []
        self.deliver(0)

    def deliver(self, version: int) -> None:
        """Only staging holds the trainer up."""
        began = time.perf_counter()
        self.trainer.sender.stage(version, STREAM)
        self.staging.append(time.perf_counter() - began)
        self.trainer.sender.policy.seal(version)
        self.rollout.receiver.receive(*self.trainer.sender.policy.payload(version))

    def generate(self) -> None:
        """The images of the step that is trained next but one."""
        made = [
            self.rollout.generate(self.prepared.requests.request(ticket)) for ticket in tickets(self.config, self.step)
        ]
        self.activating.append(
            sum(s.end - s.start for report, *_ in made for s in report.spans if s.name == "activate")
        )
        self.batches[self.step] = [trajectory for _, _, trajectory in made if trajectory is not None]

    def update(self) -> None:
        """Trains on the images just made."""
        config, trainer = self.config, self.trainer
        rows = config.prompts_per_step * config.group_size * trained_steps(config)
        trainer.update.begin(self.step, StepPlan(rows=rows))
        for ticket, trajectory in zip(tickets(config, self.step), self.batches.pop(self.step), strict=True):
            trainer.update.accumulate([meta(config, ticket)], trajectory)
        trainer.train(TrainRequest(self.step, (), finishes=True))

    def publish(self) -> None:
        """Delivers the next version."""
        self.step += 1
        self.deliver(self.step)


def tickets(config: Config, step: int) -> list[Ticket]:
    """The tickets of a step, a whole group each."""
    groups, version = config.prompts_per_step, max(0, step - config.max_staleness)
    return [Ticket(TRAIN, step * groups + group, step, group, 0, version) for group in range(groups)]


def meta(config: Config, ticket: Ticket) -> GroupMeta:
    """The metadata of a ticket's group; its advantages are random and depend on step and group."""
    size = config.group_size
    drawn = np.random.default_rng([ticket.step, ticket.group]).standard_normal(size)
    return GroupMeta(
        group=ticket.group,
        tickets=1,
        version=ticket.version,
        age=ticket.step - ticket.version,
        advantages=tuple((drawn - drawn.mean()).tolist()),
        selected=tuple(range(size)),
        seeds=tuple(range(size)),
        negative=config.rollout.negative_prompt,
        sampling=sampling(config),
    )


def compare(prepared: Prepared, rounds: int) -> Ratios:
    """Interleaved rounds after one that is thrown away; ratios are taken within a round."""
    config = prepared.config
    torch.set_num_threads(config.rollout.threads)
    workers = Workers(prepared)
    bare = bare_of(prepared, list(lora_modules(workers.trainer.policy.transformer)))
    texts = [prepared.requests.prompt(ticket).text for ticket in tickets(config, 0)]
    size, count = config.group_size, trained_steps(config)
    groups = [bare.generate(text, size)[1] for text in texts]
    at_once = config.trainer.timesteps_per_forward or count
    contestants: dict[str, Callable[[], Any]] = {
        "rollout": workers.generate,
        "bare rollout": lambda: [bare.generate(text, size) for text in texts],
        "pipeline": lambda: [pipeline(bare, text, size, config.rollout.num_inference_steps) for text in texts],
        "update": workers.update,
        "bare update": lambda: bare.update(groups, trained=count, at_once=at_once),
        "publish": workers.publish,
    }
    taken = [{name: timed(run) for name, run in contestants.items()} for _ in range(rounds + 1)][1:]
    update = median(t["update"][0] for t in taken)
    return Ratios(
        rollout_to_bare=ratio(taken, "bare rollout", "rollout"),
        bare_to_pipeline=ratio(taken, "pipeline", "bare rollout"),
        update_to_bare=ratio(taken, "bare update", "update"),
        stage_to_update=median(workers.staging[2:]) / update,
        activate_to_generate=median(workers.activating[1:]) / median(t["rollout"][0] for t in taken),
        seconds={name: min(t[name][0] for t in taken) for name in contestants},
    )


def bare_of(prepared: Prepared, targets: Sequence[str]) -> Bare:
    """The bare loops on the same model with adapters on the same layers."""
    config = prepared.config
    with quiet():
        bare = Bare(
            prepared.model.path,
            side=config.rollout.resolution,
            steps=config.rollout.num_inference_steps,
            targets=list(targets),
            rank=config.lora.rank,
            dtype=DTYPES[config.model.dtype],
        )
    bare.pipe.set_progress_bar_config(disable=True)
    return bare


def pipeline(bare: Bare, text: str, count: int, steps: int) -> Any:
    """`pipe(...)` itself: what a user of diffusers gets."""
    return bare.pipe(
        text,
        height=bare.side,
        width=bare.side,
        num_inference_steps=steps,
        num_images_per_prompt=count,
        true_cfg_scale=1.0,
        output_type="np",
    ).images


def timed(run: Callable[[], Any]) -> tuple[float, float]:
    """(wall clock, CPU seconds)."""
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - wall, time.process_time() - cpu


def ratio(taken: Sequence[dict[str, tuple[float, float]]], above: str, below: str) -> tuple[float, float]:
    wall, cpu = (median(t[above][i] / t[below][i] for t in taken) for i in (0, 1))
    return wall, cpu


def markdown(ratios: Ratios) -> str:
    pairs = (
        ("rollout worker ÷ bare loop", ratios.rollout_to_bare),
        ("bare loop ÷ pipe(...)", ratios.bare_to_pipeline),
        ("trainer rank ÷ bare loop", ratios.update_to_bare),
    )
    rows = [(name, f"{wall:.3f}", f"{cpu:.3f}") for name, (wall, cpu) in pairs]
    table = markdown_table(("rate", "wall clock", "CPU seconds"), rows)
    stalls = (
        f"A publish holds the trainer up for {ratios.stage_to_update:.2%} of an update, activations a rollout worker "
        f"for {ratios.activate_to_generate:.2%} of its generation."
    )
    return f"{table}\n\n{stalls}\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.single_workers")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_intermixed_args(arguments)
    config = compose_config("one_step_off", [*given.overrides, "output_dir=outputs/none"])
    ratios = compare(prepare(config), given.rounds)
    sys.stdout.write(json.dumps(asdict(ratios), indent=2) + "\n" if given.json else markdown(ratios))
    return 0


if __name__ == "__main__":
    sys.exit(main())
