"""Every shipped algorithm configuration fits the schema and builds in every mode."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from async_flowrl.algorithms.registry import BUILT_IN, build_algorithm
from async_flowrl.algorithms.window import draw_window
from async_flowrl.config.check import check
from async_flowrl.config.schema import AlgorithmConfig, Config, RolloutConfig

FILES = sorted((Path(__file__).parents[3] / "configs" / "algorithm").glob("*.yaml"))
MODES = [(0, "batch"), (0, "stream"), (1, "stream"), (2, "stream")]


def load(path: Path) -> AlgorithmConfig:
    merged = OmegaConf.merge(OmegaConf.structured(AlgorithmConfig), OmegaConf.load(path))
    config = OmegaConf.to_object(merged)
    assert isinstance(config, AlgorithmConfig)
    return config


@pytest.mark.extended
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_builds_in_every_mode(path: Path) -> None:
    config = load(path)
    for steps in (6, 10, 25):
        rollout = RolloutConfig(num_inference_steps=steps)
        for staleness, hand_over in MODES:
            run = Config(max_staleness=staleness, hand_over=hand_over, algorithm=config, rollout=rollout)
            check(run)
            assert build_algorithm(run).name == config.name
        window = draw_window(config, num_inference_steps=steps, seed=0, step=0, group=0)
        assert window.train_steps and max(window.train_steps) < steps


def test_every_built_in_algorithm_has_a_configuration() -> None:
    assert {load(path).name for path in FILES} == set(BUILT_IN)
