"""Tests of configurations that are composed more than once in a process."""

import time
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from async_flowrl.config import compose
from async_flowrl.config.check import ConfigError
from async_flowrl.config.compose import compose_config, composed, typed, with_replaced_terms

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


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("sync", ["experiment=two_prompts", "seed=3", "model.tiny.layers=1", "output_dir=somewhere/else"]),
        (
            "fully_async",
            ["max_staleness=3", "algorithm=diffusion_nft", "algorithm.kl_coef=0.1", "algorithm.kl_coef=0.2"],
        ),
        ("one_step_off", ["reward=jpeg_compressibility", "time_limit=null", "trainer.betas=[0.1,0.9]", "name='a b'"]),
        ("one_step_off", ["reward.terms.color.weight=2.0", "~reward.terms.color", "reward.retries=7"]),
        ("sync", ["seed=6", "++seed=5", "total_steps=2"]),
        ("one_step_off", ["+reward.terms.more={name: color}", "reward.terms.more.weight=3", "reward.backoff=2"]),
        ("one_step_off", ["trainer.learning_rate=1e-4", "trainer={learning_rate: 5e-5}"]),
        ("one_step_off", ["trainer.learning_rate=1e-4", "+trainer={learning_rate: 5e-5}"]),
        ("one_step_off", ["data.train=x", "data={train: y}", "experiment=two_prompts"]),
    ],
)
def test_values_that_are_set_after_the_composition_are_those_that_hydra_sets(name: str, overrides: list[str]) -> None:
    """Hydra's own part, with the command line, too; where an addition or a deletion is around a key, order counts."""
    given = with_replaced_terms(name, overrides)
    ours, hydras = composed(name, overrides), compose._by_hydra(name, tuple(given), None)
    assert OmegaConf.to_yaml(ours) == OmegaConf.to_yaml(hydras)
    assert compose_config(name, overrides) == typed(ours) == typed(hydras)
    assert list(ours.hydra.overrides.task) == given


def test_a_value_where_a_list_has_numbers_is_refused_in_a_sentence() -> None:
    with pytest.raises(ConfigError):
        compose_config("one_step_off", ["trainer.betas.x=3"])


def test_what_differs_in_values_alone_is_composed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    by_hydra = compose._by_hydra
    monkeypatch.setattr(compose, "_by_hydra", lambda name, *given: (asked.append(name), by_hydra(name, *given))[1])
    compose._of_shipped_files.cache_clear()
    seeds = [compose_config("stream", ["algorithm=dance_grpo", f"seed={seed}"]).seed for seed in (4, 5)]
    assert (seeds, asked) == ([4, 5], ["stream"])
