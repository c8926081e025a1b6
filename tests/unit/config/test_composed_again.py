"""Tests of configurations that are composed more than once in a process."""

import time
from pathlib import Path

import pytest

from async_flowrl.config.check import ConfigError
from async_flowrl.config.compose import compose_config, composed

GIVEN = ("sync", ["experiment=two_prompts", "seed=3"])


def test_a_change_of_what_was_composed_does_not_reach_the_next_one() -> None:
    first, values = compose_config(*GIVEN), composed(*GIVEN)
    untouched = compose_config(*GIVEN)
    first.reward.terms.clear()
    values.trainer.learning_rate = 7.0
    assert compose_config(*GIVEN) == untouched != first
    assert composed(*GIVEN).trainer.learning_rate == untouched.trainer.learning_rate


def test_the_time_is_that_of_each_composition() -> None:
    given = ["output_dir=outputs/${now:%H-%M-%S-%f}"]
    first = compose_config("sync", given).output_dir
    time.sleep(0.001)
    assert compose_config("sync", given).output_dir != first


def test_the_environment_is_that_of_each_composition(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["output_dir=${oc.env:TEST_FOLDER}"]
    for folder in ("one", "two"):
        monkeypatch.setenv("TEST_FOLDER", folder)
        assert compose_config("sync", given).output_dir == folder


def test_a_file_in_a_folder_of_hydras_search_path_is_read_each_time(tmp_path: Path) -> None:
    file = tmp_path / "mine/group/one.yaml"
    file.parent.mkdir(parents=True)
    for seed in (11, 22):
        file.write_text(f"# @package _global_\nseed: {seed}\n")
        assert composed("sync", [f"hydra.searchpath=[file://{tmp_path}]", "+mine/group=one"]).seed == seed


def test_the_working_directory_is_that_of_each_composition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    composed(*GIVEN)
    monkeypatch.chdir(tmp_path)
    assert composed(*GIVEN).hydra.runtime.cwd == str(tmp_path)


def test_a_refusal_is_made_each_time() -> None:
    for _ in range(2):
        with pytest.raises(ConfigError, match="no_such"):
            compose_config("sync", ["experiment=no_such"])
