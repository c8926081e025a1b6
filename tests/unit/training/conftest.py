"""Fixtures of the trainer's tests: groups that a tiny real policy has sampled."""

import pytest

from tests.support import trainer_rig as rig


@pytest.fixture(scope="module")
def sampler() -> rig.Sampler:
    return rig.Sampler(rig.tiny_config())


@pytest.fixture(scope="module")
def handed(sampler: rig.Sampler) -> list[list[rig.Handed]]:
    """Three batches of two groups, sampled from the initial weights."""
    return [[sampler.group(step, group) for group in (0, 1)] for step in range(3)]
