"""Tests of the command that a run prints for going on: it finds the same configuration and the same folder."""

import shlex
from pathlib import Path

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
