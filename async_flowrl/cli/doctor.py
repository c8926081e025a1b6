"""async-flowrl doctor [--config-name NAME] [key=value ...] [--run]: can a run with this configuration start here?

Without a configuration it shows versions, devices and optional features. With --run it then trains two steps. The exit
code is 0 if nothing failed, 1 if something failed, and 2 for wrong arguments or a bad configuration.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from async_flowrl.cli.benchmark import NOTHING_BUT_TRAINING
from async_flowrl.cli.options import count
from async_flowrl.config import exit_codes
from async_flowrl.config.check import ConfigError
from async_flowrl.config.compose import DEFAULT, compose_config
from async_flowrl.config.schema import Config
from async_flowrl.observability.terminal import refuse
from async_flowrl.run import features
from async_flowrl.run import machines as nodes
from async_flowrl.run.findings import FAILED, OK, Finding, verdict
from async_flowrl.run.machines import FactsRequest
from async_flowrl.run.preflight import configuration_findings, nearest, this_machine

CONFIGURATION = "a configuration, as `train` takes it: whether it can start here"
TWO_STEPS = (*NOTHING_BUT_TRAINING, "total_steps=2", "save.every=0", "preflight=false", "resume=never")


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
    checks = configuration_findings(config, options.nodes) if configured else look()
    findings = [printed(finding) for finding in checks]
    if options.run and all(finding.status != FAILED for finding in findings):
        findings.append(printed(two_steps(options, config)))
    failures = sum(finding.status == FAILED for finding in findings)
    answer = f"cannot start here: {failures} of {len(findings)} checks failed" if failures else "can start here"
    more = "with --config-name or key=value: whether that configuration can start here"
    sys.stdout.write(f"this configuration {answer}\n" if configured else f"{more}\n")
    return exit_codes.ERROR if failures else exit_codes.OK


def printed(finding: Finding) -> Finding:
    sys.stdout.write(f"  {finding.line()}\n")
    sys.stdout.flush()
    return finding


def look() -> Iterator[Finding]:
    yield Finding("versions", OK, ", ".join(map(" ".join, features.software().items())))
    yield nodes.machine_finding(this_machine(FactsRequest()))
    yield from features.device_findings()
    yield from (features.optional_finding(name, None) for name in features.FEATURES)


def two_steps(options: argparse.Namespace, config: Config) -> Finding:
    command = [sys.executable, "-m", "async_flowrl.main", "--config-name", options.config_name or DEFAULT]
    command += ["--config-dir", str(options.config_dir)] if options.config_dir else []
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=".async_flowrl_doctor_", dir=nearest(config)) as scratch:
        command += [*options.overrides, *TWO_STEPS, f"output_dir={scratch}/run"]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    last = ["no output", *filter(None, map(str.strip, done.stdout.splitlines()))][-1]
    sentence = f"exit code {done.returncode} after {time.monotonic() - began:.0f} s"
    return verdict("two steps", sentence, (done.returncode != 0, FAILED, last))
