"""Variants that the benchmark compares: every mode on the same devices, with equal settings and images per step.

The rollout and trainer pools are separate, with devices of their own, or one pool of workers that do both (shared).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from async_flowrl.config.messages import unknown_name

BASELINE, IN_TURN, SHARED = "sync separate", "sync shared", "one_step_off shared"
ONE_POOL = "placement=shared"
NOTHING_BUT_TRAINING = (
    "evaluate.before_training=false",
    "evaluate.every=0",
    "evaluate.images_per_prompt=1",
    "evaluate.max_prompts=1",
    "console=quiet",
    "monitor.report=false",
)
"""Overrides that switch off evaluations and reports, which cost the same in every mode."""


@dataclass(frozen=True)
class Machine:
    """Devices of the benchmark (GPUs, or CPU cores without a GPU); `rollout` of them generate if pools are separate."""

    devices: int
    rollout: int
    gpu: bool

    @property
    def trainer(self) -> int:
        return self.devices - self.rollout

    @classmethod
    def here(cls, devices: int | None, split: tuple[int, int] | None) -> "Machine":
        """Returns `split` or `devices` if given, else all GPUs or, without one, two CPU cores; half of them generate.

        Raises ValueError for fewer than 2 devices.
        """
        gpu = torch.cuda.is_available()
        if split is not None:
            return cls(sum(split), split[0], gpu)
        count = devices or (torch.cuda.device_count() if gpu else 2)
        if count < 2:
            raise ValueError(f"separate pools need at least 2 devices, got {count}")
        return cls(count, count // 2, gpu)


@dataclass(frozen=True)
class Variant:
    """One way to use the devices: a mode with overrides."""

    name: str
    mode: str
    overrides: tuple[str, ...]

    @property
    def in_turn(self) -> bool:
        """True if all devices generate and then all train."""
        return self.name.startswith(IN_TURN)

    def is_called(self, name: str) -> bool:
        return name == self.name or (name == IN_TURN and self.in_turn)


def variants(machine: Machine) -> list[Variant]:
    """Returns all variants, those with phases in turn on all devices first."""
    return [*in_turn(machine), *overlapping(machine)]


def chosen(machine: Machine, only: Sequence[str]) -> list[Variant]:
    """Returns the variants named in `only`, or all if it is empty; "sync shared" means all of its variants.

    Raises ValueError for an unknown name.
    """
    every = variants(machine)
    for name in only:
        if not any(variant.is_called(name) for variant in every):
            raise ValueError(unknown_name("--only", name, [*(variant.name for variant in every), IN_TURN]))
    return [variant for variant in every if not only or any(variant.is_called(name) for name in only)]


def in_turn(machine: Machine) -> list[Variant]:
    """Returns `sync` with one process per device; on CPUs also with one process that has all threads."""
    ways = []
    if not machine.gpu:
        threads = (f"rollout.threads={machine.devices}", f"trainer.threads={machine.devices}")
        ways.append(Variant(f"{IN_TURN} 1 x {machine.devices} threads", "sync", (ONE_POOL, *_workers(1, 1), *threads)))
    overrides = (ONE_POOL, *_workers(machine.devices, machine.devices))
    ways.append(Variant(f"{IN_TURN} {machine.devices} x 1", "sync", overrides))
    return ways


def overlapping(machine: Machine) -> list[Variant]:
    """Returns each mode with separate pools, and one_step_off with a pool that does both."""
    workers = _workers(machine.rollout, machine.trainer)
    return [
        Variant(BASELINE, "sync", workers),
        Variant("stream", "stream", workers),
        Variant("one_step_off", "one_step_off", workers),
        Variant(SHARED, "one_step_off", (ONE_POOL, *_workers(machine.devices, machine.devices))),
        Variant("fully_async", "fully_async", workers),
    ]


def _workers(rollout: int, trainer: int) -> tuple[str, ...]:
    return f"rollout.num_workers={rollout}", f"trainer.num_workers={trainer}"
