"""Configurations in a report: the settings that differ from their defaults or between runs, and the whole file."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from omegaconf import OmegaConf

from async_flowrl.config.schema import Config, RewardTerm
from async_flowrl.report.records import Records

TERM = asdict(RewardTerm())
OF_NO_MATTER = ("name", "output_dir")
"""Settings that are left out, because every run has its own."""


def settings_of(run: Records) -> dict[str, Any]:
    """`changed`: key, value and default of the settings that differ from the default; `all`: config.yaml as text."""
    given = flat(run.config)
    defaults = flat(asdict(Config())) | defaults_of_terms(given)
    changed = [
        {"key": key, "value": shown(value), "default": shown(defaults[key]) if key in defaults else "–"}
        for key, value in given.items()
        if key not in OF_NO_MATTER and (key not in defaults or defaults[key] != value)
    ]
    return {"changed": changed, "all": OmegaConf.to_yaml(OmegaConf.create(run.config)) if run.config else ""}


def defaults_of_terms(given: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted key → default for the settings of all reward terms in `given`.

    The weight is left out, so the report always shows it.
    """
    defaults = {}
    for key in given:
        head, terms, rest = key.rpartition("reward.terms.")
        name, _, setting = rest.partition(".")
        if terms and setting in TERM and setting != "weight":
            defaults[f"{head}{terms}{name}.{setting}"] = TERM[setting]
    return defaults


def differences(runs: Sequence[Records]) -> dict[str, Any] | None:
    """`rows`: key and the runs' values, for each setting in which the runs differ; None for a single run."""
    if len(runs) < 2:
        return None
    given = [flat(run.config) for run in runs]
    keys = dict.fromkeys(key for each in given for key in each)
    rows = [
        {"key": key, "values": [shown(each[key]) if key in each else "–" for each in given]}
        for key in keys
        if key not in OF_NO_MATTER and any(each.get(key, _MISSING) != given[0].get(key, _MISSING) for each in given)
    ]
    return {"rows": rows}


_MISSING = object()


def flat(values: Any, prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as dotted key → value; lists and empty dictionaries count as values."""
    if not isinstance(values, dict) or not values:
        return {prefix: values} if prefix else {}
    flattened: dict[str, Any] = {}
    for key, value in values.items():
        flattened |= flat(value, f"{prefix}.{key}" if prefix else str(key))
    return flattened


def shown(value: Any) -> str:
    """The value as it is written on the command line, e.g. "null" for None."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return "[" + ", ".join(shown(each) for each in value) + "]"
    return f"{value:g}" if isinstance(value, float) else str(value)
