"""Single facts about a run for its report: counts, speed, pools, settings, software, digest, commands."""

import json
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from omegaconf import OmegaConf

from async_flowrl.config.compose import record_of, resume_command, typed_command
from async_flowrl.config.error_text import as_written
from async_flowrl.config.schema import Config, RewardTerm
from async_flowrl.observability.bottleneck import step_pools
from async_flowrl.observability.ledger import STATES, pool_of
from async_flowrl.observability.summary import mfu
from async_flowrl.observability.timeline import SHARING_POOLS
from async_flowrl.report.records import Records

Row = tuple[str, str]
TERM = asdict(RewardTerm())
# Settings that are left out, because every run has its own.
OF_NO_MATTER = ("name", "output_dir")


def facts_of(run: Records) -> list[Row]:
    summary = run.summary
    sync, size = summary.get("sync") or {}, summary.get("rollout_size") or {}
    images = sum(int(line.get("images") or 0) for line in run.metrics)
    rows: list[tuple[str, str | None]] = [
        ("Mode", str(summary.get("mode") or run.setting("mode") or "–")),
        ("Placement", "shared: each process samples and trains" if run.shared else None),
        ("Staleness allowed, versions", _text(summary.get("max_staleness", run.setting("max_staleness")))),
        ("Steps", f"{run.steps} of {run.total_steps}" if run.total_steps else str(run.steps)),
        ("Training images", f"{images:,}"),
        ("Wall clock", str(timedelta(seconds=round(run.window[1] - run.window[0]))) if run.step_events else None),
        ("Images per second", _text(summary.get("steady_images_per_s") or summary.get("images_per_s"))),
        ("Efficiency in the steady state", _text(summary.get("efficiency"), ".0%")),
        ("Overlap of the shorter phase", _text((summary.get("overlap") or {}).get("share"), ".0%")),
        ("MFU", mfu(summary) or None),
        ("Tickets", _tickets(summary.get("tickets") or {})),
        ("Faults", ", ".join(f"{count} × {kind}" for kind, count in (summary.get("faults") or {}).items()) or None),
        ("Swaps of the sampled weights", _text(summary.get("swaps"))),
        ("Rollout workers", f"{size['fewest']} to {size['most']}" if size else None),
        ("Versions", f"{sync['publishes']}, {sync['bytes'] / 2**20:.1f} MiB by {sync['transport']}" if sync else None),
        ("Finished", summary.get("finished")),
    ]
    return [(label, value) for label, value in rows if value]


def pools_of(run: Records) -> list[dict[str, Any]]:
    """Per pool: name, number of workers, and the share of their time in each state from the first to the last step."""
    # With `placement=shared` rollout and trainer have what their devices did, and their shares lack the time in which
    # the other worker of the process computed.
    whole = run.window[1] - run.window[0]
    counts = Counter(pool_of(track.place) for track in run.tracks)
    pools = []
    for pool, seconds in step_pools(run.tracks, run.window).items():
        total = whole * counts[pool] if run.shared and pool in SHARING_POOLS else sum(seconds.values())
        if total > 0:
            shares = {state: seconds[state] / total for state in STATES}
            pools.append({"pool": pool, "workers": counts[pool], "shares": shares})
    return pools


def environment_of(run: Records) -> list[Row]:
    folders = (run.root / "checkpoints").glob("step_*")
    checkpoints = [int(step) for folder in folders if (step := folder.name.removeprefix("step_")).isdigit()]
    newest = run.root / "checkpoints" / f"step_{max(checkpoints, default=0)}" / "controller.json"
    numerics = json.loads(newest.read_text(encoding="utf-8")).get("numerics", {}) if newest.exists() else {}
    rows = [(key, str(value)) for key, value in numerics.items() if "." not in key and value is not None]
    nodes = sorted({str(e["node"]) for e in run.history if e["event"] == "worker"})
    return rows + ([("nodes", ", ".join(nodes))] if nodes else [])


def verification_of(run: Records) -> dict[str, Any]:
    """`digest` of the final weights; `typed`, the command line of the run; `commands` that verify or resume it."""
    folder, record = shlex.quote(str(run.root)), record_of(run.root)
    commands = [("check these files against the guarantees", f"async-flowrl verify {folder}")]
    if run.state not in ("finished", "running"):
        unknown = f"async-flowrl train … output_dir={folder} resume=auto"
        commands = [("go on from the last checkpoint", resume_command(record, run.root) or unknown)]
    return {"digest": run.summary.get("weights_digest"), "commands": commands, "typed": typed_command(record)}


def _text(value: Any, form: str = ".4g") -> str | None:
    return format(value, form) if isinstance(value, float) else None if value is None else str(value)


def _tickets(counts: dict[str, int]) -> str | None:
    if not counts:
        return None
    more = [f"{counts[key]} {key}" for key in ("skipped", "retried", "duplicate") if counts.get(key)]
    return ", ".join([f"{counts['trained']:,} of {counts['issued']:,} trained", *more])


def settings_of(run: Records) -> dict[str, Any]:
    """`changed`: key, value and default of the settings that differ from the default; `all`: config.yaml as text."""
    values = flat(run.config)
    defaults = flat(asdict(Config()))
    for key in values:
        setting = key.rpartition(".")[2]
        if "reward.terms." in key and setting in TERM and setting != "weight":  # A weight is always shown.
            defaults[key] = TERM[setting]
    changed = [
        {"key": key, "value": as_written(value), "default": as_written(defaults[key]) if key in defaults else "–"}
        for key, value in values.items()
        if key not in OF_NO_MATTER and (key not in defaults or defaults[key] != value)
    ]
    return {"changed": changed, "all": OmegaConf.to_yaml(OmegaConf.create(run.config)) if run.config else ""}


def differences(runs: Sequence[Records]) -> dict[str, Any] | None:
    """`rows`: key and the runs' values, for each setting in which the runs differ; None for a single run."""
    if len(runs) < 2:
        return None
    configs = [flat(run.config) for run in runs]
    keys = dict.fromkeys(key for config in configs for key in config if key not in OF_NO_MATTER)
    rows = {key: [as_written(config[key]) if key in config else "–" for config in configs] for key in keys}
    return {"rows": [{"key": key, "values": values} for key, values in rows.items() if len(set(values)) > 1]}


def flat(values: Any, prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as dotted key → value; lists and empty dictionaries count as values."""
    if not isinstance(values, dict) or not values:
        return {prefix: values} if prefix else {}
    flattened: dict[str, Any] = {}
    for key, value in values.items():
        flattened |= flat(value, f"{prefix}.{key}" if prefix else str(key))
    return flattened
