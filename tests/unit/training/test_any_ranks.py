"""Tests of any number of ranks and every layout of the base: the same bits, which adding floats would not give."""

from pathlib import Path

import numpy as np
import pytest

from async_flowrl.config.schema import Config
from tests.support import trainer_rig as rig
from tests.unit.training.trainer_ranks import Job, Outcome, run_alone, run_ranks

pytestmark = pytest.mark.slow
GLYPHS = Path(__file__).parents[3] / "examples" / "glyphs" / "weights"
GROUPS, STEPS = 7, 3


def demanding(shard: str = "none", **trainer: int) -> Config:
    """Everything at once: samples two versions old with a mask, KL, guidance, bfloat16, two parts in each group."""
    config = rig.tiny_config(micro_batch_size=2, shard=shard, **trainer)
    config.prompts_per_step, config.max_staleness, config.model.dtype = GROUPS, 2, "bfloat16"
    config.algorithm.kl_coef, config.algorithm.correction = 0.04, "mask"
    config.rollout.true_cfg_scale = 2.0
    return config


def glyphs(shard: str = "none", **trainer: int) -> Config:
    """The shipped model that writes: wide enough that its gradients round differently with more threads."""
    config = rig.tiny_config(micro_batch_size=2, shard=shard, **trainer)
    config.prompts_per_step, config.model.path, config.model.dtype = GROUPS, str(GLYPHS), "float32"
    config.lora.rank, config.lora.alpha = 16, 32.0
    config.rollout.resolution, config.trainer.timesteps_per_forward = 64, None
    return config


def preference(shard: str = "none", **trainer: int) -> Config:
    """A loss that compares whole groups, which are cut into two parts, with the reference and a moving average."""
    config = rig.tiny_config(micro_batch_size=2, shard=shard, **trainer)
    config.prompts_per_step, config.algorithm.name, config.algorithm.sde_type = GROUPS, "dgpo", "ode"
    config.algorithm.beta, config.algorithm.average_decay, config.algorithm.kl_coef = 100.0, "half", 0.1
    return config


CONFIGURATIONS = {"demanding": demanding, "glyphs": glyphs, "preference": preference}


@pytest.fixture(scope="module")
def batches() -> dict[str, list[list[rig.Handed]]]:
    made = {}
    for name, configuration in CONFIGURATIONS.items():
        config = configuration()
        sampler, oldest = rig.Sampler(config), config.max_staleness
        made[name] = [
            [
                sampler.group(step, group, version=max(0, step - oldest), age=min(step, oldest))
                for group in range(GROUPS)
            ]
            for step in range(STEPS if name != "glyphs" else 2)
        ]
    return made


def jobs(batches: dict[str, list[list[rig.Handed]]], **trainer: int) -> dict[str, Job]:
    layouts = ["none", "full"] + (["hybrid"] if "shard_size" in trainer else [])
    shared = {
        f"{name}, {shard}": (CONFIGURATIONS[name](shard, **trainer), batches[name])
        for name in ("demanding", "preference")
        for shard in layouts
    }
    return {**shared, "glyphs": (glyphs(**trainer), batches["glyphs"])}


@pytest.fixture(scope="module")
def alone(batches: dict[str, list[list[rig.Handed]]]) -> dict[str, Outcome]:
    return {name: run_alone((config(), batches[name])) for name, config in CONFIGURATIONS.items()}


@pytest.mark.parametrize("world", [2, 3, 4])
def test_any_number_of_ranks_makes_the_weights_of_one(
    world: int, batches: dict[str, list[list[rig.Handed]]], alone: dict[str, Outcome], tmp_path: Path
) -> None:
    trainer = {"num_workers": 4, "shard_size": 2} if world == 4 else {"num_workers": world}
    given = jobs(batches, **trainer)
    found = dict(zip(given, run_ranks(world, list(given.values()), tmp_path), strict=True))
    layouts = {"none": f"whole on each of {world}", "full": f"fsdp2 over {world}", "hybrid": "fsdp2 over 2, 2 times"}
    for name, ranks in found.items():
        expected = alone[name.split(",")[0]]
        assert len({rank["digest"] for rank in ranks}) == 1
        counts = np.sum([rank["parts"] for rank in ranks], axis=0)
        assert counts.tolist() == expected["parts"] and all(min(rank["parts"]) > 0 for rank in ranks)
        assert ranks[0]["digest"] == expected["digest"], name
        assert ranks[0]["metrics"] == expected["metrics"]
        if ", " in name:
            assert ranks[0]["info"]["layout"] == layouts[name.split(", ")[1]]
