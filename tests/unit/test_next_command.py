"""Tests of the command that a run prints for going on: it finds the same configuration and the same folder."""

import shlex
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from async_flowrl.config.check import ConfigError
from async_flowrl.config.compose import composed, resume_command, typed
from async_flowrl.main import command_line, record


def gone_on(command: str | None) -> tuple[str, Path | None, list[str]]:
    """What the command line says: configuration, folder, overrides."""
    assert command is not None
    given, hydras = command_line(shlex.split(command)[2:])
    assert not hydras
    return given.config_name, given.config_dir, given.overrides


def test_a_folder_of_ones_own_is_named_again(tmp_path: Path) -> None:
    folder = tmp_path / "my configs"
    folder.mkdir()
    (folder / "mine.yaml").write_text("defaults:\n  - sync\n  - _self_\ntotal_steps: 3\n")
    values = composed("mine", ["++resume=never", f"output_dir='{tmp_path}/a b'"], folder)
    name, given_folder, overrides = gone_on(resume_command(record(values, values.hydra, f"{tmp_path}/a b")))
    again = typed(composed(name, overrides, given_folder))
    assert (given_folder, again.total_steps, again.resume) == (folder, 3, "auto")
    assert again.output_dir == f"{tmp_path}/a b"
    assert not [override for override in overrides if "resume=never" in override]


def test_a_job_of_a_sweep_goes_on_in_its_own_folder(tmp_path: Path) -> None:
    values = composed("sync", ["seed=2", "output_dir=elsewhere"])
    hydras = DictConfig(OmegaConf.merge(values.hydra, {"mode": "MULTIRUN"}))
    own = str(tmp_path / "seed=2,it's für")
    name, folder, overrides = gone_on(resume_command(record(values, hydras, own)))
    again = typed(composed(name, overrides, folder))
    assert (folder, again.seed, again.output_dir) == (None, 2, own)


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--config-dir .*nope is no folder"):
        composed("sync", [], tmp_path / "nope")


def test_a_flag_without_its_value_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match=r"--config-name/-cn: expected one argument; `async-flowrl train --help`"):
        command_line(["--config-name"])
