"""async-flowrl doctor [--config-name NAME] [key=value ...] [--run]: can a run with this configuration start here?

Without a configuration it shows versions, devices and optional features. With one it starts a run's workers as the run
does, without their models, and with --run it then trains two steps. The exit code is 0 if nothing failed, 1 if
something failed, and 2 for wrong arguments or a bad configuration.
"""

import argparse
import asyncio
import logging
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from async_flowrl.cli.benchmark import NOTHING_BUT_TRAINING
from async_flowrl.cli.options import count
from async_flowrl.cli.plan_fit import LARGEST_FIRST, Hardware, largest
from async_flowrl.cli.serve_rewards import check_packages
from async_flowrl.config import exit_codes
from async_flowrl.config.check import ConfigError
from async_flowrl.config.compose import DEFAULT, compose_config
from async_flowrl.config.paths import expanded
from async_flowrl.config.schema import Config
from async_flowrl.config.scoring_pools import TRAINER
from async_flowrl.controller.trainer import TrainerGroup
from async_flowrl.memory.footprints import GIB
from async_flowrl.memory.rehearsed import model_sizes
from async_flowrl.observability.terminal import refuse, say
from async_flowrl.rollout.vllm_omni.engine_settings import check_installed
from async_flowrl.run.job import first_cause, refused
from async_flowrl.run.launch import check_machine, check_pools, check_stored, open_cluster
from async_flowrl.run.nodes import LIBRARIES, check_memory
from async_flowrl.run.precheck import precheck
from async_flowrl.run.prepare import Prepared, doubts_of, prepare
from checkpoint_engine.transports import NCCL, PYNCCL, transport_here
from separation.node import free_memory, temporary_folder, temporary_refusal, versions_of

CONFIGURATION = "a configuration, as `train` takes it: whether it can start here"
TWO_STEPS = (*NOTHING_BUT_TRAINING, "total_steps=2", "save.every=0", "resume=never")
NODES_SECONDS = 120.0  # Seconds for which nodes are waited for, if more than one is wanted.
OK, WARNING, FAILED, SKIPPED = "ok", "warning", "failed", "skipped"
CUPY = ("cupy-cuda13x", "cupy-cuda12x", "cupy")  # Distributions that provide the module cupy.
# First compute capability whose tensor cores multiply bfloat16; least free share of the memory of a device that no
# other program uses.
LEAST_CAPABILITY, MIN_FREE_SHARE = (8, 0), 0.9
SHM = Path("/dev/shm")
SMALL_SHM = GIB  # Bytes of /dev/shm below which Ray puts the objects of most runs on a disk.
LEAST_DISK = GIB // 5  # Bytes on disk that the logs of Ray need at least.
# Used share of a disk above which Ray writes no objects to it (its local_fs_capacity_threshold).
SPILL_SHARE = 0.95
# Optional feature → what it is for, and a function that raises ValueError, with what to install, without it.
FEATURES: Mapping[str, tuple[str, Callable[[], object]]] = {
    "NCCL": (f"transport {NCCL}", partial(transport_here, NCCL)),
    "cupy": (f"transport {PYNCCL}", partial(transport_here, PYNCCL)),
    "vllm-omni": ("rollout.engine=vllm_omni", check_installed),
    "serve-rewards": ("serve-rewards", check_packages),
}


def parser() -> argparse.ArgumentParser:
    command_line = argparse.ArgumentParser(prog="async-flowrl doctor", description=__doc__, allow_abbrev=False)
    option = command_line.add_argument
    option("--config-name", "-cn", metavar="NAME", help=CONFIGURATION)
    option("--config-dir", "-cd", type=Path, metavar="FOLDER", help="a folder of them beside the shipped ones")
    option("--nodes", type=count, default=1, metavar="N", help="wait for N nodes at runtime.address, two minutes")
    option("--run", action="store_true", help="where nothing failed, also train two steps; what they write is deleted")
    option("overrides", nargs="*", metavar="key=value", help=CONFIGURATION)
    return command_line


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_intermixed_args(arguments)
    try:
        config: Config = compose_config(options.config_name or DEFAULT, options.overrides, options.config_dir)
    except ConfigError as error:
        return refuse(error)
    if options.nodes > 1 and config.runtime.address is None:
        return refuse(f"--nodes {options.nodes} needs runtime.address: without it a run has this machine alone")
    configured = options.config_name is not None or bool(options.overrides)
    good = all([*(check_configuration(config, options.nodes) if configured else look())])
    if options.run and good:
        good = two_steps(options, config)
    answer = "can start here" if good else "cannot start here"
    more = "with --config-name or key=value: whether that configuration can start here"
    say(f"this configuration {answer}\n" if configured else f"{more}\n")
    return exit_codes.OK if good else exit_codes.ERROR


def finding(status: str, name: str, sentence: str) -> bool:
    """Prints a line on a check, and returns whether it has not failed."""
    say(f"  {status:8} {name}: {sentence}\n")
    return status != FAILED


def look() -> Iterator[bool]:
    yield finding(OK, "versions", ", ".join(map(" ".join, software().items())))
    yield machine()
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        yield device(index)
    yield recipe()
    for name, (purpose, check) in FEATURES.items():
        try:
            check()
        except ValueError as error:
            yield finding(SKIPPED, f"optional {name}", f"{error}; needed for {purpose} alone")
        else:
            yield finding(OK, f"optional {name}", f"here, for {purpose}")


def recipe() -> bool:
    """Names the first of LARGEST_FIRST that fits the devices of this machine, each as large as the smallest of them."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        return finding(SKIPPED, "recipe", "no GPU is here; `async-flowrl plan --fit --cards 1x24` plans for others")
    gib = min(torch.cuda.mem_get_info(index)[1] for index in range(count)) / GIB
    found = largest(Hardware(f"{count} x {gib:.1f} GiB", gib, count))
    if found is None:
        return finding(WARNING, "recipe", f"none of {', '.join(LARGEST_FIRST)} fits {count} x {gib:.1f} GiB")
    compared = f"the largest of the image recipes compared ({', '.join(LARGEST_FIRST)})"
    return finding(OK, "recipe", f"{found.experiment} is {compared} that fits {found.hardware}: {found.command}")


def software() -> dict[str, str]:
    versions = {"Python": platform.python_version(), **versions_of(("async-flowrl", *LIBRARIES, *CUPY))}
    versions |= {"torch": torch.__version__, "CUDA": str(torch.version.cuda or "none")}
    if torch.version.cuda is not None and dist.is_nccl_available():
        versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return {name: number for name, number in versions.items() if number != "none"}


def machine() -> bool:
    shm, folder = shutil.disk_usage(SHM).free if SHM.is_dir() else 0, temporary_folder()
    disk = shutil.disk_usage(nearest(Path(folder)))
    sentence = (
        f"{os.cpu_count()} cores; free: {free_memory() / GIB:.1f} GiB of memory, {shm / GIB:.1f} in /dev/shm, "
        f"{disk.free / GIB:.1f} in {folder}"
    )
    status, cure = OK, "free some, or ray start --temp-dir"
    if refusal := temporary_refusal():
        status, sentence = FAILED, refusal
    elif disk.free < LEAST_DISK:
        status, sentence = FAILED, f"{sentence}; Ray has no room for its logs there: {cure}"
    elif disk.free < (1 - SPILL_SHARE) * disk.total:
        status, sentence = WARNING, f"{sentence}; Ray spills nothing to a disk this full: {cure}"
    elif 0 < shm < SMALL_SHM:
        status, sentence = WARNING, f"{sentence}; /dev/shm is small: docker run --shm-size"
    return finding(status, f"machine {socket.gethostname()}", sentence)


def device(index: int) -> bool:
    free, total = torch.cuda.mem_get_info(index)
    capability, name = torch.cuda.get_device_capability(index), torch.cuda.get_device_name(index)
    sentence = f"{name}, {total / GIB:.1f} GiB, {free / GIB:.1f} free, capability {capability[0]}.{capability[1]}"
    status = OK
    if capability < LEAST_CAPABILITY:
        status, sentence = FAILED, f"{sentence}; bfloat16 needs capability 8.0 (Ampere) or newer"
    elif free < MIN_FREE_SHARE * total:
        status, sentence = WARNING, f"{sentence}; something else holds memory there: see nvidia-smi, end it"
    return finding(status, f"device {index}", sentence)


def check_configuration(config: Config, nodes: int) -> Iterator[bool]:
    try:
        prepared = prepare(precheck(config), whole=True)
        check_machine(prepared)
    except ConfigError as error:
        yield finding(FAILED, "configuration", str(error))
        return
    shown = f"{config.mode_name}, {config.model.path}, {config.total_steps} steps"
    yield finding(OK, "configuration", f"{shown}: composed, checked, its prompts and model found")
    for doubt in doubts_of(prepared):
        yield finding(WARNING, "configuration", doubt)
    if nodes > 1:
        yield (there := wait_for(nodes, config))
        if not there:
            return
    logging.getLogger().addHandler(warnings := Warnings(logging.WARNING))
    try:
        with scratch(config) as folder:
            workers = asyncio.run(start(prepared, Path(folder)))
    except Exception as error:
        yield finding(FAILED, "start", refused(error, config) or first_cause(error))
    else:
        yield finding(OK, "start", f"{workers} workers, as a run has them before it loads models")
    finally:
        logging.getLogger().removeHandler(warnings)


def wait_for(nodes: int, config: Config) -> bool:
    from separation.ray_cluster import wait_for_nodes

    address = str(config.runtime.address)
    try:
        found = wait_for_nodes(address, nodes, NODES_SECONDS)
    except Exception as error:
        return finding(FAILED, "nodes", refused(error, config) or first_cause(error))
    missing = f": {nodes} were waited for ({NODES_SECONDS:g} s), see the output of `ray start` on the others"
    few = found < nodes
    return finding(FAILED if few else OK, "nodes", f"{found} at {address}{missing if few else ''}")


async def start(prepared: Prepared, folder: Path) -> int:
    """Starts and ends a run's workers, with its checks of them and of their nodes; returns their number."""
    config = replace(prepared.config, output_dir=str(folder))
    prepared = replace(prepared, config=config)
    async with open_cluster(prepared, folder / "logs") as groups:
        settled, devices, _ = await check_pools(prepared, groups, TrainerGroup(groups[TRAINER], prepared.algorithm))
        await check_memory(settled, groups, devices, folder)
        if not config.runtime.in_threads:
            await compare_store(settled)
        return sum(len(group.workers) for group in groups.values())


async def compare_store(prepared: Prepared) -> None:
    """Raises StoreTooSmall as the run does once its models are loaded; a warning for a model that cannot be planned."""
    try:
        trained = (await asyncio.to_thread(model_sizes, prepared.config)).adapter_parameters
    except ValueError as error:
        logging.getLogger(__name__).warning("the object store was not compared with a plan: %s", error)
    else:
        check_stored(prepared, trained)


class Warnings(logging.Handler):
    """Prints what is logged as a finding."""

    def emit(self, record: logging.LogRecord) -> None:
        finding(WARNING, "start", record.getMessage())


def scratch(config: Config) -> tempfile.TemporaryDirectory[str]:
    folder = nearest(expanded(config.output_dir).absolute())
    try:
        return tempfile.TemporaryDirectory(prefix=".async_flowrl_doctor_", dir=folder)
    except OSError as error:
        raise ConfigError(f"output_dir={config.output_dir} cannot be written: {error.strerror} in {folder}") from error


def nearest(folder: Path) -> Path:
    return next(parent for parent in (folder, *folder.parents) if parent.is_dir())


def two_steps(options: argparse.Namespace, config: Config) -> bool:
    command = [sys.executable, "-m", "async_flowrl.main", "--config-name", options.config_name or DEFAULT]
    command += ["--config-dir", str(options.config_dir)] if options.config_dir else []
    began = time.monotonic()
    with scratch(config) as folder:
        command += [*options.overrides, *TWO_STEPS, f"output_dir={folder}/run"]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    sentence = f"exit code {done.returncode} after {time.monotonic() - began:.0f} s"
    if done.returncode == 0:
        return finding(OK, "two steps", sentence)
    last = ["no output", *filter(None, map(str.strip, done.stdout.splitlines()))][-1]
    return finding(FAILED, "two steps", f"{sentence}; {last}")
