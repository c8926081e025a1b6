"""Entry point of training: python -m async_flowrl.main [--config-name one_step_off] [key=value ...].

It composes the configuration with Hydra, checks it, and starts one run or, with --multirun, a sweep of runs.
"""

import argparse
import importlib.util
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from async_flowrl.config import exit_codes
from async_flowrl.config.check import ConfigError
from async_flowrl.config.compose import (
    DEFAULT,
    VERSION_BASE,
    checked,
    composed,
    explain,
    for_hydra,
    is_hydras,
    registered,
    typed,
    without_hydra,
)
from async_flowrl.config.error_text import did_you_mean
from async_flowrl.config.paths import config_dir
from async_flowrl.config.schema import Config
from async_flowrl.observability.terminal import run_program, say

if TYPE_CHECKING:
    from async_flowrl.run.prepare import Workers


class GuardError(RuntimeError):
    """Another installed package has the same import name as one of this project's packages."""


def main(workers: "Workers | None" = None) -> int:
    """Trains what sys.argv describes; returns the exit code. A wrong configuration: one sentence on stderr, code 2."""
    arguments = [home_expanded(argument) for argument in sys.argv[1:]]
    try:
        guard_imports()
        options, hydras = command_line(arguments)
        if hydras:
            return through_hydra(arguments, options, workers)
        values = composed(options.config_name, options.overrides, options.config_dir)
        config = typed(values)
        return train(config, lambda: record(values, values.hydra, config.output_dir), workers)
    except (ConfigError, GuardError) as error:
        say(f"async_flowrl: {error}\n", sys.stderr)
        return exit_codes.CONFIG
    except KeyboardInterrupt:
        say("async_flowrl: interrupted\n", sys.stderr)
        return exit_codes.INTERRUPTED


def train(config: Config, hydra_record: Callable[[], Mapping[str, str]], workers: "Workers | None" = None) -> int:
    """Trains one run and returns its exit code. Raises ConfigError if one of the checks before the run fails.

    `hydra_record` returns file → text of `.hydra/`; `workers`: classes of tests and benchmarks in place of the run's.
    """
    from async_flowrl.run.precheck import precheck

    checked_config = precheck(config)
    from async_flowrl.run.stopping import sigterm_ends

    with sigterm_ends():
        from async_flowrl.run.job import run

        return run(checked_config, hydra_record(), workers or {})


def report_over(folders: Sequence[Path], jobs: int) -> None:
    from async_flowrl.report.page import write_page

    runs = [folder for folder in folders if (folder / "report.html").exists()]
    if runs and jobs > 1:
        path = (Path(os.path.commonpath(runs)) if len(runs) > 1 else runs[0].parent) / "report.html"
        share = f"all {jobs}" if len(runs) == jobs else f"{len(runs)} of {jobs}"
        write_page(runs, path)
        say(f"{'report':8} {path}: {share} runs\n")


# Options of Hydra that command_line does not read.
HYDRAS = (
    "--help",
    "--hydra-help",
    "--version",
    "--resolve",
    "--run",
    "--multirun",
    "--shell-completion",
    "--experimental-rerun",
)
READ = ("--config-name", "--config-dir", "--config-path", "--cfg", "--package", "--info")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; `async-flowrl train --help` shows how it is written")


def command_line(arguments: Sequence[str]) -> tuple[argparse.Namespace, bool]:
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config-name", "-cn", default=DEFAULT)
    parser.add_argument("--config-dir", "-cd", type=lambda text: Path(text).absolute())
    for flag in (("--cfg", "-c"), ("--package", "-p"), ("--info", "-i"), ("--config-path", "-cp")):
        parser.add_argument(*flag, nargs="?", const="", dest="hydras", action="append", default=[])
    parser.add_argument("overrides", nargs="*")
    options, unknown = parser.parse_known_intermixed_args(arguments)
    if wrong := next((flag for flag in unknown if flag.startswith("--") and flag not in HYDRAS), None):
        name = wrong.partition("=")[0]
        near = did_you_mean(name, (*READ, *HYDRAS), mistyped=True)
        raise ConfigError(f"{name} is no option; a setting is written without dashes, key=value{near}")
    return options, bool(options.hydras or unknown or any(is_hydras(override) for override in options.overrides))


def through_hydra(arguments: Sequence[str], options: argparse.Namespace, workers: "Workers | None" = None) -> int:
    """Lets Hydra run the command line, e.g. a sweep; returns the worst exit code. Raises ConfigError.

    After a job that failed, a sweep goes on; one that was interrupted or stopped ends it: SystemExit with its code.
    """
    flags = [argument for argument in arguments if argument not in options.overrides]
    sweeps = bool({"--multirun", "-m"}.intersection(flags))
    overrides = checked(options.config_name, options.overrides, options.config_dir, sweeps=sweeps)
    codes, folders = [exit_codes.OK], list[Path]()

    def job(values: DictConfig) -> None:
        try:
            config, hydra_config = typed(values), cast("DictConfig", HydraConfig.get())
            if hydra_config.mode == RunMode.MULTIRUN:
                config = replace(config, output_dir=hydra_config.runtime.output_dir)
                folders.append(Path(config.output_dir))
            codes.append(train(config, lambda: record(values, hydra_config, config.output_dir), workers))
        except ConfigError as error:
            say(f"async_flowrl: {error}\n", sys.stderr)
            codes.append(exit_codes.CONFIG)
        if codes[-1] in (exit_codes.INTERRUPTED, exit_codes.RESUMABLE):
            raise SystemExit(codes[-1])  # Ctrl-C or SIGTERM is meant for the whole sweep, not for one job

    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises its errors, and `explain` can turn them into a sentence
    sys.argv[1:] = [*flags, *for_hydra(options.config_name, overrides, options.config_dir)]
    entry: Any = hydra.main(version_base=VERSION_BASE, config_path=str(config_dir()), config_name=DEFAULT)(job)
    try:
        with registered(light=False):  # `for_hydra` has composed.
            entry()
        report_over(folders, jobs=len(codes) - 1)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(explain(error)) from error
    return worst(codes)


def worst(codes: Collection[int]) -> int:
    worst_first = (exit_codes.ERROR, exit_codes.CONFIG, exit_codes.HACKING, exit_codes.INCOMPLETE, exit_codes.OK)
    return next(code for code in worst_first if code in codes)


def record(values: DictConfig, hydras: DictConfig, output_dir: str) -> dict[str, str]:
    hydra_part = OmegaConf.create({"hydra": OmegaConf.to_container(hydras)})
    hydra_part.hydra.runtime.output_dir = str(Path(output_dir).absolute())
    return {
        "config.yaml": OmegaConf.to_yaml(without_hydra(values)),
        "hydra.yaml": OmegaConf.to_yaml(hydra_part),
        "overrides.yaml": OmegaConf.to_yaml(hydras.overrides.task),
    }


def home_expanded(argument: str) -> str:
    """Replaces `~` by the home folder in `key=~/path`, as shells do not do it there."""
    key, equals, value = argument.partition("=")
    return f"{key}={Path(value).expanduser()}" if equals and value.startswith("~/") else argument


def guard_imports() -> None:
    """Raises GuardError if `checkpoint_engine` is PyPI's package of that name (by Moonshot), not this project's."""
    ours = importlib.util.find_spec("separation")
    theirs = importlib.util.find_spec("checkpoint_engine")
    where = [Path(spec.origin).resolve().parent.parent if spec and spec.origin else None for spec in (ours, theirs)]
    if where[0] is None or where[0] != where[1]:
        raise GuardError(
            f"checkpoint_engine is imported from {where[1]}, but async_flowrl's own is in {where[0]}: another package "
            "of that name is installed; run `pip uninstall checkpoint-engine` and reinstall async-flowrl"
        )


if __name__ == "__main__":
    run_program(main)
