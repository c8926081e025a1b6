"""python -m async_flowrl.main [--config-name one_step_off] [key=value ...]: compose, check, build, run, exit code."""

import os
import sys
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig

from async_flowrl import exits
from async_flowrl.compose import DEFAULT, GuardError, compose_checked, guard_imports, typed
from async_flowrl.paths import config_dir


def main() -> None:
    """Checks everything that can be checked without starting a process, then hands over to Hydra."""
    from async_flowrl.check import ConfigError

    os.environ.setdefault("HYDRA_FULL_ERROR", "0")
    try:
        guard_imports()
        sys.argv[1:] = [home_expanded(argument) for argument in sys.argv[1:]]
        compose_checked(sys.argv[1:])
        entry()
    except (ConfigError, GuardError) as error:
        sys.stderr.write(f"async_flowrl: {error}\n")
        raise SystemExit(exits.CONFIG) from None
    except KeyboardInterrupt:
        sys.stderr.write("async_flowrl: interrupted\n")
        raise SystemExit(exits.INTERRUPTED) from None


def home_expanded(argument: str) -> str:
    """`key=~/path` with the home folder in it: shells leave it alone there, and Hydra's grammar refuses a bare `~`."""
    key, equals, value = argument.partition("=")
    return f"{key}={Path(value).expanduser()}" if equals and value.startswith("~") else argument


def _task(composed: DictConfig) -> None:
    from async_flowrl.build import run

    raise SystemExit(run(typed(composed)))


def entry() -> None:
    """The Hydra application (so `--cfg job`, `--multirun` and the like work)."""
    decorated: Any = hydra.main(version_base="1.3", config_path=str(config_dir()), config_name=DEFAULT)(_task)
    decorated()


if __name__ == "__main__":
    main()
