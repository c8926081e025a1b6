"""Checks of a configuration that need no torch and come first, so that most mistakes show at once."""

from pathlib import Path
from typing import NewType

from async_flowrl.config.check import ConfigError, check
from async_flowrl.config.curves import check_curves
from async_flowrl.config.models import local_index
from async_flowrl.config.paths import expanded, find_data
from async_flowrl.config.schema import Config
from async_flowrl.observability.run_directory import RunDirectory
from async_flowrl.rewards.registry import check_rewards

CheckedConfig = NewType("CheckedConfig", Config)


def precheck(config: Config) -> CheckedConfig:
    """Raises ConfigError, with one sentence, for the first wrong field, reward, file or folder."""
    try:
        check(config)
        local_index(config.model.path)
        check_rewards(config.reward)
        check_curves(config)
        for key, file in (("data.train", config.data.train), ("data.evaluation", config.data.evaluation)):
            if file is not None:
                find_data(file, key=key, folder=True)
        check_output(config)
    except (ValueError, FileNotFoundError, PermissionError) as error:
        raise ConfigError(str(error)) from error
    return CheckedConfig(config)


def check_output(config: Config) -> None:
    folder = Path(config.output_dir)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"output_dir={folder} is a file")
    if config.resume == "never":
        if RunDirectory(folder).used():
            raise ConfigError(
                f"output_dir={folder} is not empty: choose another one, or continue that run with resume=auto"
            )
    elif config.resume not in ("auto", "force") and not expanded(config.resume).is_dir():
        raise ConfigError(f"resume={config.resume} is neither never, auto nor force, nor the folder of a checkpoint")
