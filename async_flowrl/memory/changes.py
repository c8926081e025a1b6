"""Settings that make a run smaller, as a refusal names them."""

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from typing import Any

from async_flowrl.config.check import check
from async_flowrl.config.schema import Config, mode_name
from async_flowrl.tickets.arithmetic import check_batching

Change = Mapping[str, Any]  # Configuration key → its new value; all of them are set together.


def in_words(change: Change) -> str:
    values = {key: str(value).lower() if isinstance(value, bool) else value for key, value in change.items()}
    return " ".join(f"{key}={value}" for key, value in values.items())


def applied(change: Change, config: Config) -> Config:
    """Returns a copy of the configuration with these settings."""
    changed = deepcopy(config)
    for key, value in change.items():
        *path, name = key.split(".")
        owner: Any = changed
        for part in path:
            owner = getattr(owner, part)
        setattr(owner, name, value)
    return changed


def fresh_images(config: Config) -> Change:
    """Returns `max_staleness=0`, by which fewer versions are live; if `mode` is set, with the name that it has then."""
    mode = {} if config.mode is None else {"mode": mode_name(0, config.hand_over)}
    return {"max_staleness": 0, **mode}


def best(
    changes: Iterable[Change], config: Config, needed: Callable[[Config], int], available: int
) -> tuple[str, int] | None:
    """Returns in words the first change with which `needed(config)` bytes are at most `available`, and those bytes.

    If none is enough, it is the change that needs least; None if no change makes it less. Changes that the checks of a
    run's start refuse are left out.
    """
    least, smallest = needed(config), None
    for change in changes:
        changed = applied(change, config)
        try:
            check(changed)
            check_batching(changed)
        except ValueError:
            continue
        if (size := needed(changed)) < least:
            least, smallest = size, (in_words(change), size)
            if size <= available:
                break
    return smallest
