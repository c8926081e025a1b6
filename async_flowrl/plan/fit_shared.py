"""Layouts of `placement=shared` that the table of recipes and hardware tries (`plan --fit`)."""

from collections.abc import Iterator


def shared_layouts(experiment: str, devices: int, rewards: int, seated: float) -> Iterator[list[str]]:
    """Yields the arguments of `async-flowrl train` with which all `devices` sample and train on one base each.

    `rewards`: workers of the reward pool. A single device also has the reward worker, if that has GPUs (`seated`, its
    share of one).
    """
    words = ["--config-name one_step_off", f"experiment={experiment}", "placement=shared"]
    words += [f"rollout.num_workers={devices}", f"trainer.num_workers={devices}", f"reward.num_workers={rewards}"]
    alone = devices == 1 and seated
    yield words + ([f"{pool}.gpus_per_worker={1 - seated:g}" for pool in ("trainer", "rollout")] if alone else [])
