"""Refusal of `placement=shared` for a run that has another one, so that nobody is advised what would be refused."""

from dataclasses import replace

from async_flowrl.config.check import ConfigError, check
from async_flowrl.config.schema import Config
from async_flowrl.config.shared import SAME, SHARED


def sharing_refusal(config: Config, workers: int) -> str | None:
    """Returns the sentence with which the run would be refused with `placement=shared`; None if it would not be.

    The run gets as many processes as `workers`. Settings that must be equal for both pools, and of which the number of
    processes is one, do not count, because whoever takes the advice sets them.
    """
    try:
        check(_shared_by(config, workers))
    except ConfigError as error:
        return str(error)
    return None


def _shared_by(config: Config, workers: int) -> Config:
    """Returns the configuration with processes that sample and train, which have the trainer's settings."""
    trainer = replace(config.trainer, num_workers=workers, workers_per_node=None)
    rollout = replace(config.rollout, **{key: getattr(trainer, key) for key in SAME})
    return replace(config, placement=SHARED, trainer=trainer, rollout=rollout)
