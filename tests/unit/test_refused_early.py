"""Test of a folder that may not be read: refused in one sentence, like a missing one."""

from pathlib import Path

import pytest

from async_flowrl.config.check import ConfigError
from async_flowrl.config.compose import compose_config
from async_flowrl.run.early import refuse_early


def test_a_folder_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The neighbours of a misspelt model are looked for in its folder."""

    def forbidden(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", forbidden)
    config = compose_config("sync", [f"model.path={tmp_path}/model", f"output_dir={tmp_path}/run"])
    with pytest.raises(ConfigError, match=f"Permission denied: '{tmp_path}'"):
        refuse_early(config)
