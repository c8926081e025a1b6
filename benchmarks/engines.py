"""Benchmark of the rollout engines, the implementations of image generation.

python -m benchmarks.engines [--tickets N] [--rounds N] [--out DIR] [key=value ...]

Each engine makes the same tickets with the same weights, in a process of its own. The table, in Markdown, shows images
per second, memory, and the differences between the engines' results. With rollout.tickets_per_batch above 1, batches of
tickets are measured too. The tables of several models can be put together, as every row names its model family.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import psutil
import torch

from async_flowrl.config.check import ConfigError
from async_flowrl.config.compose import compose_config
from async_flowrl.config.schema import Config
from async_flowrl.rollout.base import Rollout
from async_flowrl.rollout.rollout_worker import RolloutWorker
from async_flowrl.run.precheck import precheck
from async_flowrl.run.prepare import Prepared, prepare
from async_flowrl.seeds import derive, generator
from async_flowrl.tickets.arithmetic import shape
from async_flowrl.tickets.table import Ticket
from async_flowrl.types import POLICY, TRAIN, RolloutRequest
from benchmarks.markdown_tables import markdown_table
from checkpoint_engine import Draft

PROGRAM = "python -m benchmarks.engines"
ENGINES = ("diffusers", "vllm_omni")
# vllm_omni is only accepted with these settings; no cluster is started.
PLACE = ("runtime.backend=ray", "placement=separate")


@dataclass(frozen=True)
class Found:
    """Cost of one engine for the tickets of all rounds. `way` says if tickets were made one by one or in batches.

    Seconds and `images` are totals of the measured rounds, except `start_seconds` (loading). CPU seconds and host
    memory are those of the engine's process and of those that it started, such as the ranks of vllm-omni; device memory
    is that of the engine's process alone. Bytes are peaks so far, so those of batches include those of tickets made one
    by one.
    """

    family: str
    engine: str
    way: str
    images: int
    wall_seconds: float
    cpu_seconds: float
    start_seconds: float
    host_bytes: int
    device_bytes: int


def requests(prepared: Prepared, tickets: int) -> list[RolloutRequest]:
    """Returns the first tickets of the first step's batches, on version 0.

    Raises ValueError if a step has fewer tickets.
    """
    plan = shape(prepared.config)
    if tickets > plan.tickets_per_step:
        raise ValueError(f"--tickets must be at most {plan.tickets_per_step}, the tickets of a step, got {tickets}")
    per_group = plan.tickets_per_group
    places = [(group, part) for group in prepared.requests.batch_order(0) for part in range(per_group)][:tickets]
    made = [Ticket(TRAIN, group * per_group + part, 0, group, part, 0) for group, part in places]
    return [prepared.requests.request(ticket) for ticket in made]


def deliver(worker: RolloutWorker) -> None:
    """Delivers version 0, a LoRA that changes every layer and depends only on tensor names: equal for all engines."""
    receiver, layout = worker.receiver, worker.receiver.layout
    buffer = layout.empty()
    for name, view in layout.views(buffer).items():
        view.copy_(0.02 * torch.randn(view.shape, generator=generator(derive(worker.config.seed, name))))
    data = buffer.numpy()
    header = Draft(POLICY, 0, layout, receiver.alpha, receiver.rank).sealed(layout.digests(data))
    worker.receiver.receive(header, data)
    worker.prove(0)


def measure(engine: str, overrides: Sequence[str], tickets: int, rounds: int, out: Path) -> list[Found]:
    """Measures one engine in the current process, once per way, and writes its results into the folder `out`."""
    prepared = prepare(precheck(configuration(engine, overrides)))
    config, asked = prepared.config, requests(prepared, tickets)
    torch.set_num_threads(config.rollout.threads)
    began = time.monotonic()
    worker = RolloutWorker(config, prepared.model, 0, "rollout-0")
    worker.load()
    deliver(worker)
    started = time.monotonic() - began
    ways: dict[str, Callable[[], list[Rollout]]] = {
        "one by one": lambda: [worker.engine.generate([request])[0] for request in asked]
    }
    if (size := config.rollout.tickets_per_batch) > 1:
        starts = range(0, tickets, size)
        ways[f"batches of {size}"] = lambda: [
            made for k in starts for made in worker.engine.generate(asked[k : k + size])
        ]
    measured = []
    for way, make in ways.items():
        save(out / f"{engine}-{way}.npz".replace(" ", "-"), make())  # warms up, too
        wall, cpu = time.monotonic(), cpu_seconds()
        for _ in range(rounds):
            make()
        took = time.monotonic() - wall, cpu_seconds() - cpu
        images = rounds * sum(len(request.images) for request in asked)
        measured.append(Found(prepared.model.family, engine, way, images, *took, started, *memory()))
    if close := getattr(worker.engine, "close", None):
        close()
    return measured


def cpu_seconds(root: psutil.Process | None = None) -> float:
    """Returns the CPU seconds that a process (this one) and those that it started took so far, ended ones included."""
    seconds = 0.0
    for process in processes(root):
        with suppress(psutil.NoSuchProcess):  # It has just ended, and counts as its parent's then.
            seconds += sum(process.cpu_times()[:4])  # user and system, its own and those of its ended children
    return seconds


def memory() -> tuple[int, int]:
    """Peak bytes in host memory, of this process and those that it started, and of this process on its GPU (or 0)."""
    host = 0
    for process in processes():
        with suppress(FileNotFoundError, ProcessLookupError):  # It has just ended.
            lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            host += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    return host, torch.cuda.max_memory_reserved() if torch.cuda.is_available() else 0


def processes(root: psutil.Process | None = None) -> list[psutil.Process]:
    """Returns a process (this one) and all living ones that it started."""
    root = root or psutil.Process()
    return [root, *root.children(recursive=True)]


def save(path: Path, made: Sequence[Rollout]) -> None:
    """Writes images, latents and log-probabilities of all tickets into one .npz file."""
    recorded = [rollout.trajectory for rollout in made if rollout.trajectory is not None]
    np.savez(
        path,
        images=np.concatenate([rollout.images for rollout in made]),
        latents=np.concatenate([trajectory.latents for trajectory in recorded]),
        log_probs=np.concatenate([trajectory.log_probs for trajectory in recorded]),
    )


def configuration(engine: str, overrides: Sequence[str]) -> Config:
    return compose_config(overrides=[*overrides, f"rollout.engine={engine}", *PLACE])


def table(measured: Sequence[Found], out: Path) -> str:
    """One row per engine and way; differences are to the first row."""
    files = [out / f"{each.engine}-{each.way}.npz".replace(" ", "-") for each in measured]
    header = ["family", "engine", "tickets", "images/s", "CPU s/image", "start s", "host GiB", "device GiB"]
    rows = []
    for each, file in zip(measured, files, strict=True):
        row = [each.family, each.engine, each.way]
        row += [f"{each.images / each.wall_seconds:.3g}", f"{each.cpu_seconds / each.images:.4f}"]
        sizes = (f"{size / 2**30:.2f}" for size in (each.host_bytes, each.device_bytes))
        rows.append([*row, f"{each.start_seconds:.1f}", *sizes, *differences(file, files[0])])
    return markdown_table([*header, "latents", "log-probs", "bits"], rows)


def differences(file: Path, reference: Path) -> list[str]:
    """Largest absolute differences of latents and log-probabilities, and "same" if all results are bitwise equal."""
    with np.load(file) as mine, np.load(reference) as theirs:
        gaps = [float(np.abs(mine[name] - theirs[name]).max(initial=0.0)) for name in ("latents", "log_probs")]
        same = all(np.array_equal(mine[name], theirs[name]) for name in mine.files)
    return [*(f"{gap:.1e}" for gap in gaps), "same" if same else "differ"]


def compare(given: argparse.Namespace, out: Path) -> str:
    """Runs each engine in a process of its own, whose output goes to stderr, and returns the table.

    Raises ConfigError or ValueError for wrong settings before any engine starts, and what an engine raises.
    """
    engines = given.engine or list(ENGINES)
    for engine in engines:
        requests(prepare(precheck(configuration(engine, given.overrides))), given.tickets)
        if engine == "vllm_omni":
            from async_flowrl.rollout.vllm_omni.engine_settings import check_installed

            check_installed()
    measured = []
    for engine in engines:
        with ProcessPoolExecutor(1, get_context("spawn"), initializer=os.dup2, initargs=(2, 1)) as process:
            measured += process.submit(measure, engine, given.overrides, given.tickets, given.rounds, out).result()
    (out / "engines.json").write_text(json.dumps([asdict(one) for one in measured], indent=2) + "\n")
    return table(measured, out)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=PROGRAM, description="The rollout engines on the same tickets.")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="configuration of both engines")
    parser.add_argument("--engine", action="append", choices=ENGINES, help="only this engine (and others given so)")
    parser.add_argument("--tickets", type=int, default=2, help="tickets of the first step")
    parser.add_argument("--rounds", type=int, default=3, help="how often each way is repeated, after one to warm up")
    parser.add_argument("--out", type=Path, help="keep images, latents and log-probabilities here, and engines.json")
    given = parser.parse_intermixed_args(arguments)
    try:
        with tempfile.TemporaryDirectory() as directory:
            out = given.out or Path(directory)
            out.mkdir(parents=True, exist_ok=True)
            sys.stdout.write(compare(given, out) + "\n")
    except (ConfigError, ValueError) as error:
        sys.stderr.write(f"{PROGRAM}: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
