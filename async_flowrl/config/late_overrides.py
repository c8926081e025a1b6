"""Overrides that only change single values, told apart from those that decide what Hydra composes.

Hydra reads some twenty files to compose a configuration, and applies overrides of single values at the end. So a
composition can be kept, and is the same for all values.
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf, open_dict


@functools.lru_cache(maxsize=1024)
def parse(override: str) -> Override:
    """Returns an override of a command line, parsed. It is kept, since parsing takes Hydra half a millisecond.

    Raises HydraException if it cannot be parsed.
    """
    (parsed,) = OverridesParser.create().parse_overrides([override])
    return parsed


def divided(overrides: Sequence[str], groups: Path) -> tuple[tuple[str, ...], tuple[Override, ...]]:
    """Returns the overrides that Hydra must know when it composes, and those that may be applied afterwards.

    The second are `key=value` with one value. None may, if anything is overridden besides such values and the names of
    groups' configurations, because then the order counts. `groups` is the folder whose folders are the groups. Raises
    HydraException for an override that cannot be parsed.
    """
    parsed = [parse(each) for each in overrides]
    named = [(groups / each.key_or_group).is_dir() and isinstance(each.value(), str) for each in parsed]
    late = [not (groups / each.key_or_group).is_dir() and _changes_one_value(each) for each in parsed]
    if not all(one or other for one, other in zip(named, late, strict=True)):
        return tuple(overrides), ()
    first = [line for line, is_late in zip(overrides, late, strict=True) if not is_late]
    return tuple(first), tuple(each for each, is_late in zip(parsed, late, strict=True) if is_late)


def apply(values: DictConfig, late: Sequence[Override], overrides: Sequence[str]) -> None:
    """Changes composed values, and notes in Hydra's own part all `overrides` of the command line, as Hydra does.

    Raises OmegaConfBaseException, or ValueError for a list's index that is no number, if a value cannot be set.
    """
    for each in late:
        OmegaConf.update(values, each.key_or_group, each.value(), merge=True)
    with open_dict(values.hydra):
        values.hydra.overrides.task = list(overrides)
        values.hydra.job.override_dirname = ",".join(sorted(overrides))


def _changes_one_value(override: Override) -> bool:
    changes = not (override.is_add() or override.is_force_add() or override.is_delete())
    plain: Any = changes and override.package is None and not override.is_sweep_override()
    return bool(plain and isinstance(override.value(), str | int | float | bool | None))
