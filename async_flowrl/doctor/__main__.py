"""Command line of the doctor: python -m async_flowrl.doctor [--config-name NAME] [key=value ...] | [--gpu ...].

With a configuration it checks whether a run with it can start here, or on the cluster at its `runtime.address`. With
`--gpu` it runs a series of checks, each in a process of its own with a time limit, and writes a report. Without either
it shows versions, devices and optional features. The exit code is 0 if nothing failed, 1 if something failed, and 2 for
wrong arguments, a configuration that cannot be read, or `--gpu` without a GPU.
"""

import argparse
import datetime
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from async_flowrl.config import exit_codes
from async_flowrl.config.check import ConfigError
from async_flowrl.config.compose import DEFAULT, compose_config
from async_flowrl.config.messages import unknown_name
from async_flowrl.config.schema import Config
from async_flowrl.doctor import machine
from async_flowrl.doctor.checks import CHECKS, supervise
from async_flowrl.doctor.facts import Asked, facts
from async_flowrl.doctor.findings import FAILED, Finding, exit_code
from async_flowrl.doctor.machines import Machine, machine_finding
from async_flowrl.doctor.optional import optional_findings
from async_flowrl.doctor.report import PRETENDED_DEVICE, Report
from async_flowrl.doctor.setting import Setting
from async_flowrl.doctor.start import Wanted, configuration_findings
from async_flowrl.plan.arguments import count, factor

PROGRAM = "async-flowrl doctor"
NO_GPU = (
    "--gpu needs a CUDA device, and torch {torch} sees none here: see nvidia-smi, and that this torch is a CUDA build"
)
MORE = "--gpu checks determinism, transports, memory, speed, whole runs and tests/gpu, in at most 15 minutes"
CONFIGURATION = "a configuration, as `train` takes it: whether it can start here"
MINUTES = 15.0
"""Default of --minutes, the time for all checks; other values scale every check's limit."""
NODES_SECONDS = 120.0
"""Seconds that `--nodes` waits for a cluster that is still starting."""


def parser() -> argparse.ArgumentParser:
    command_line = argparse.ArgumentParser(prog=PROGRAM, description="Look at this machine.", allow_abbrev=False)
    option = command_line.add_argument
    option("--gpu", action="store_true", help=MORE)
    option("--quick", action="store_true", help="with --gpu: small sizes, no tests, about two minutes")
    option("--minutes", type=factor, default=MINUTES, metavar="M", help="with --gpu: of all checks (default 15)")
    option("--only", action="append", default=[], metavar="CHECK", help=f"with --gpu: of {', '.join(CHECKS)}")
    option("--out", type=Path, default=Path("outputs/doctor"), metavar="FOLDER", help="doctor.{json,md}, logs/ go here")
    option("--config-name", "-cn", metavar="NAME", help=CONFIGURATION)
    option("--config-dir", "-cd", type=Path, metavar="FOLDER", help="a folder of them beside the shipped ones")
    option("--nodes", type=count, default=1, metavar="N", help="wait for N nodes at runtime.address, two minutes")
    option("overrides", nargs="*", metavar="key=value", help=CONFIGURATION)
    return command_line


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    given = parser().parse_intermixed_args(words)
    if unknown := [name for name in given.only if name not in CHECKS]:
        return refused(unknown_name("--only", unknown[0], CHECKS))
    configured = given.config_name is not None or bool(given.overrides)
    if not given.gpu:
        if given.quick or given.only:
            return refused(f"{'--quick' if given.quick else '--only'} belongs to --gpu")
        return started(given) if configured else look()
    if configured:
        return refused("--gpu looks at the machine and takes no configuration: ask for one after the other")
    if not torch.cuda.is_available():
        return refused(NO_GPU.format(torch=torch.__version__))
    try:
        return examine(given, shlex.join([PROGRAM, *words]))
    except KeyboardInterrupt:
        sys.stderr.write(f"doctor: interrupted; what was found so far is in {given.out}\n")
        return exit_codes.INTERRUPTED


def refused(sentence: str) -> int:
    """Prints why the command cannot run; returns exit code 2."""
    sys.stderr.write(f"doctor: {sentence}\n")
    return exit_codes.CONFIG


def look() -> int:
    """Prints versions, devices and optional features without computing anything; returns the exit code."""
    rows = [machine.versions_finding(machine.versions()), machine_finding(Machine("here", facts(Asked())))]
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    rows += [machine.device_finding(machine.device(index)) for index in range(devices)]
    rows += optional_findings()
    for each in rows:
        say(each)
    sys.stdout.write(f"{MORE}\n" if devices else "no CUDA device here; with one, --gpu checks it\n")
    sys.stdout.write("with --config-name or key=value: whether that configuration can start here\n")
    return exit_code(rows)


def started(given: argparse.Namespace) -> int:
    """Prints one line per finding on the configuration, then the answer; returns the exit code."""
    try:
        config: Config = compose_config(given.config_name or DEFAULT, given.overrides, given.config_dir)
    except ConfigError as error:
        return refused(str(error))
    if given.nodes > 1 and config.runtime.address is None:
        return refused(f"--nodes {given.nodes} needs runtime.address: without it a run has this machine alone")
    findings: list[Finding] = []
    for finding in configuration_findings(config, Wanted(given.nodes, NODES_SECONDS if given.nodes > 1 else 0.0)):
        findings.append(finding)
        say(finding)
    failures = sum(finding.status == FAILED for finding in findings)
    answer = f"cannot start here: {failures} of {len(findings)} checks failed" if failures else "can start here"
    sys.stdout.write(f"this configuration {answer}\n")
    return exit_code(findings)


def examine(given: argparse.Namespace, command: str) -> int:
    """Runs all checks in order, even after failures, and rewrites the report after each; returns the exit code."""
    out = given.out.expanduser()
    try:
        (out / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return refused(f"--out {out} cannot be written: {error.strerror}")
    started = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    until = time.monotonic() + 60 * given.minutes
    with tempfile.TemporaryDirectory(prefix="async_flowrl_doctor_") as work:
        setting = Setting(
            devices=torch.cuda.device_count(),
            device_name=torch.cuda.get_device_name(0),
            quick=given.quick,
            work=work,
            logs=str((out / "logs").resolve()),
        )
        report = Report(command, started, setting)
        if setting.pretended:
            sys.stdout.write(f"{PRETENDED_DEVICE}\n")
        for name in [name for name in CHECKS if name in given.only or not given.only]:
            one(name, report, until - time.monotonic(), given.minutes / MINUTES)
            report.write(out)
    sys.stdout.write(f"{report.counts()}; wrote doctor.json, doctor.md and logs/ to {out}: send these on\n")
    return exit_code(report.findings)


def one(name: str, report: Report, left: float, scale: float) -> None:
    """Runs one check, prints its findings and adds them to the report; `left` and `scale` are those of `supervise`."""
    sys.stdout.write(f"{name}: {CHECKS[name].what}\n")
    sys.stdout.flush()
    began = time.monotonic()
    report.checks[name] = supervise(name, report.setting, left, scale)
    report.seconds[name] = time.monotonic() - began
    for finding in report.checks[name]:
        say(finding)


def say(finding: Finding) -> None:
    sys.stdout.write(f"  {finding.line()}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
