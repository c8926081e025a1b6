"""Rehearsals of small recipes, for tests."""

from functools import cache

from async_flowrl.cli.cards import CARDS
from async_flowrl.cli.rehearse import Rehearsal, rehearse
from async_flowrl.config.compose import compose_config
from async_flowrl.config.schema import Config
from async_flowrl.memory.rehearsal.model import FakeModel
from async_flowrl.memory.rehearsal.rollout import RolloutRehearsal, rehearse_rollout


def shallow(*overrides: str) -> Config:
    """One layer unless more are given: on fake tensors every operation costs the same, however small its tensors."""
    return compose_config("one_step_off", ["model.tiny.layers=1", *overrides])


@cache
def rehearsed(*overrides: str, card: str = "H100") -> Rehearsal:
    return rehearse(shallow(*overrides), CARDS[card])


def worker_alone(*overrides: str) -> RolloutRehearsal:
    config = shallow(*overrides)
    return rehearse_rollout(config, FakeModel.of(config))
