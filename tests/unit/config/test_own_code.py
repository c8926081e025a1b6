"""Tests of one's own code that is named by its file: other folders, siblings, resumes, and the docs' own algorithm."""

import re
import sys
from pathlib import Path

import pytest

from async_flowrl.algorithms.registry import build_algorithm
from async_flowrl.config.compose import compose_config
from async_flowrl.config.own_code import import_named
from async_flowrl.controller.resume import reward_sources
from async_flowrl.rewards.registry import check_rewards

ROOT = Path(__file__).parents[3]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "own_sibling.py").write_text("def twice(x):\n    return 2 * x\n")
    source = (
        "from own_sibling import twice\ndef redness(images, prompt):\n    return twice(images[..., 0].mean((1, 2)))\n"
    )
    (tmp_path / "own_file.py").write_text(source)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path


def test_a_file_is_found_from_another_folder_with_what_lies_beside_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = compose_config("sync", ["reward.terms={r: {name: '../own_file.py:redness'}}"])
    monkeypatch.chdir("/")
    assert config.reward.terms["r"].name == f"{folder}/own_file.py:redness"
    assert not check_rewards(config.reward) and reward_sources(config.reward.terms).keys() == {"r"}
    named = import_named("key", f"{folder}/own_file.py:redness")
    assert named is import_named("key", f"{folder}/elsewhere/../own_file.py:redness")
    with pytest.raises(ValueError, match="must be one of redness, got 'twice_'"):  # twice is imported there
        import_named("key", f"{folder}/own_file.py:twice_")


@pytest.mark.extended
def test_the_algorithm_of_the_docs_is_one_in_every_mode(folder: Path) -> None:
    page = (ROOT / "docs/algorithms.md").read_text().split("## Your own")[1]
    (snippet,) = re.findall(r"```python\n(.*?)```", page.split("\n## ")[0], re.DOTALL)
    (folder / "docs_algorithm.py").write_text(snippet)
    for mode in ("sync", "stream", "one_step_off", "fully_async"):
        config = compose_config(mode, ["algorithm.name=../docs_algorithm.py:Unclipped"])
        assert build_algorithm(config).name == "unclipped"
