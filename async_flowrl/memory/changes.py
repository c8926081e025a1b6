"""Change is a setting that would make a process smaller, as a refusal or a warning names it."""

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from async_flowrl.config.check import check
from async_flowrl.config.schema import Config, mode_name
from async_flowrl.tickets.arithmetic import check_batching


@dataclass(frozen=True)
class Change:
    """Setting that reduces memory: a configuration key and its new value."""

    key: str
    value: Any
    also: tuple["Change", ...] = ()
    """Further settings that must change with it."""

    def __str__(self) -> str:
        value = str(self.value).lower() if isinstance(self.value, bool) else self.value
        return " ".join([f"{self.key}={'null' if value is None else value}", *map(str, self.also)])

    def applied(self, config: Config) -> Config:
        """Returns a copy of the configuration with this setting."""
        changed = deepcopy(config)
        for other in self.also:
            changed = other.applied(changed)
        *path, name = self.key.split(".")
        owner: Any = changed
        for part in path:
            owner = getattr(owner, part)
        setattr(owner, name, self.value)
        return changed

    def accepted(self, config: Config) -> bool:
        """Returns whether the configuration with this setting passes the checks of a run's start."""
        changed = self.applied(config)
        try:
            check(changed)
            check_batching(changed)
        except ValueError:
            return False
        return True


def fresh_images(config: Config) -> Change:
    """Returns `max_staleness=0`, by which fewer versions are live; if `mode` is set, with the name that it has then."""
    named = () if config.mode is None else (Change("mode", mode_name(0, config.hand_over)),)
    return Change("max_staleness", 0, named)
