"""Tests of on-policy distillation: LoRAs beside the base teach the prompts that name them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from async_flowrl.config.check import check
from async_flowrl.config.schema import AlgorithmConfig, Config
from async_flowrl.policies import lora_file
from async_flowrl.tickets.request import teacher_of
from async_flowrl.training.messages import TrainRequest
from async_flowrl.types import Prompt
from tests.support import trainer_rig as rig
from tests.unit.algorithms.algorithm_cases import build

STEPS = 12


def taught(folder: Path, **fields: Any) -> Config:
    """Two teachers of random weights, one of half the student's rank, and no loss from rewards."""
    config = rig.tiny_config(learning_rate=0.02)
    for seed, (label, rank) in enumerate({"a": 4, "b": 2}.items()):
        other = rig.tiny_config()
        other.lora.rank, other.lora.alpha = rank, 8.0
        worker = rig.trainer(other)
        noise = torch.randn(worker.parameters.values.shape, generator=torch.Generator().manual_seed(seed))
        tensors = worker.parameters.named(worker.parameters.values.data + 0.1 * noise)
        lora_file.write(folder / label, tensors, alpha=8.0)
        config.algorithm.teachers[label] = str(folder / label)
    config.algorithm.teacher_coef, config.algorithm.policy_coef = 1.0, 0.0
    config.algorithm = replace(config.algorithm, **fields)
    return config


@pytest.mark.extended
@pytest.mark.parametrize("fields", [{}, {"name": "diffusion_nft", "sde_type": "ode"}], ids=["steps", "final images"])
def test_a_student_comes_near_the_teacher_of_each_prompt(fields: dict[str, Any], tmp_path: Path) -> None:
    config = taught(tmp_path, **fields)
    worker, sampler = rig.trainer(config), rig.Sampler(config)
    distance = []
    for step in range(STEPS):
        handed = [sampler.group(step % 2, group, teacher=label) for group, label in enumerate("ab")]
        distance.append(rig.update(worker, step, handed).metrics["teacher_kl"])
    assert 0.0 < distance[-1] < 0.5 * distance[0]


@pytest.mark.extended
def test_each_group_is_compared_with_its_own_teacher(tmp_path: Path) -> None:
    """The student begins at teacher `a`, so its distance is 0 there alone; a smaller rank computes the same."""
    config = taught(tmp_path)
    for label, other in (("a", "b"), ("b", "a")):
        worker, sampler = rig.trainer(config), rig.Sampler(config)
        source = lora_file.read(tmp_path / label).with_rank(4).with_alpha(8.0)
        worker.parameters.load(worker.parameters.pack(source.tensors, where=label))
        worker.versions.retain(0)
        same, different = (
            rig.update(worker, 0, [sampler.group(0, 0, teacher=which)]).metrics["teacher_kl"]
            for which in (label, other)
        )
        assert same == 0.0 < different


@pytest.mark.extended
def test_the_terms_of_a_group_see_reference_and_average_alone(tmp_path: Path) -> None:
    """Both where its parts are summed first and where one part is the whole group."""
    config = taught(tmp_path, name="dgpo", sde_type="ode", average_decay="half")
    worker, (meta, tickets) = rig.trainer(config), rig.Sampler(config).group(0, 0, teacher="a")
    algorithm: Any = worker.algorithm
    terms, seen = algorithm.group_terms, list[set[str]]()

    def watched(batch: Any, current: Any, frozen: dict[str, Any]) -> torch.Tensor:
        seen.append(set(frozen))
        return terms(batch, current, frozen)

    algorithm.group_terms = watched
    worker.update.group_sums(TrainRequest(0, (meta,)), *tickets)
    summed = len(seen)
    rig.update(worker, 0, [(meta, tickets)])
    assert 0 < summed < len(seen) and all(names == {"reference", "average"} for names in seen)


def test_labels_and_settings_that_do_not_fit_are_refused() -> None:
    prompt = Prompt(0, "a sign", metadata={"teacher": "b"})
    assert teacher_of({}, prompt) == "" and teacher_of({"a": "x"}, Prompt(0, "a sign")) == "a"
    assert teacher_of({"a": "x", "b": "y"}, prompt) == "b"
    for teachers in ({"a": "x", "c": "y"}, {"a": "x"}):
        with pytest.raises(ValueError, match="teacher='b'"):
            teacher_of(teachers, prompt)
    for fields in ({"teachers": {"a": "x"}}, {"teacher_coef": 1.0}, {"policy_coef": 0.0}):
        with pytest.raises(ValueError, match=r"teacher|policy_coef"):
            build(**fields)
    assert "teacher" in build(teachers={"a": "x"}, teacher_coef=1.0).needs
    assert not build(teachers={"a": "x"}, teacher_coef=1.0).vanishes_at_zero
    config = Config(tune="full", algorithm=AlgorithmConfig(teachers={"a": "x"}, teacher_coef=1.0))
    with pytest.raises(ValueError, match="tune=lora"):
        check(config)
