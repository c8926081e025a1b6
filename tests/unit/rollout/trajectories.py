"""What a rollout recorded, for tests."""

from async_flowrl.rollout.base import Rollout
from async_flowrl.types import Trajectory


def trajectory_of(rollout: Rollout) -> Trajectory:
    assert rollout.trajectory is not None
    return rollout.trajectory
