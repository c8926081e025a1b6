"""The section `debug` of the configuration: disturbances, for tests of this program."""

from dataclasses import dataclass, field

from async_flowrl.config.settings import FREE, setting


@dataclass
class DelaysConfig:
    """Seeded random delays in seconds (uniform from 0 to the value), to test that timing does not change results."""

    generate: float = setting(0.0, at_least=0)
    """Seconds after the images of a ticket."""
    score: float = setting(0.0, at_least=0)
    """Seconds after the rewards of a group."""
    update: float = setting(0.0, at_least=0)
    """Seconds after the update of a step."""
    publish: float = setting(0.0, at_least=0)
    """Seconds before a trainer rank digests a new version; of one in shares, its last bucket."""
    constant: bool = False
    """Wait exactly the value each time, instead of a random time."""
    slow_worker: float = setting(1.0, at_least=1)
    """Factor on the time that the first rollout worker takes."""


@dataclass
class DebugConfig:
    """Disturbances, for tests of this program."""

    delays: DelaysConfig = field(default_factory=DelaysConfig, metadata=FREE)
    freeze_publish: bool = False
    """Send the bytes of version 0 instead of those of every newer version; the run must notice it and stop."""
