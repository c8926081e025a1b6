"""The content of a report: one JSON-able document, read from the files of run directories.

All files but metrics.jsonl may be missing, and in a run that still goes on a last line unfinished. Nothing that a
configuration names is imported. The same files always give the same document, whose size does not grow with the length
of a run: a point of a curve is the mean of equally many steps, and a timeline has exact bars for a few windows.
`page.render` makes an HTML page of it, whose JavaScript function `show(document)` draws it and loads its pictures.
"""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from async_flowrl.config.curves import REWARD
from async_flowrl.observability.bottleneck import verdict
from async_flowrl.observability.evaluations import between
from async_flowrl.observability.result import change_words, ends_of
from async_flowrl.report.advice import advice_for, evaluations_of, result_of
from async_flowrl.report.facts import differences, environment_of, facts_of, pools_of, settings_of, verification_of
from async_flowrl.report.panels import panels_for
from async_flowrl.report.pictures import pictures_of
from async_flowrl.report.records import Records, read_run
from async_flowrl.report.schedule import timeline_of
from async_flowrl.report.series import bucket_width, lines_of, rounded

Document = dict[str, Any]
# Value of `max_mib` (MiB of pictures inside a page) if no configuration sets monitor.report_mib.
MAX_MIB = 16.0
# Runs that differ in at most so many settings have them in their names, if that takes at most so many letters.
NAMED_SETTINGS, MAX_NAMED_LETTERS = 2, 60


def document(runs: Sequence[Path]) -> Document:
    """The document about these run directories. Raises FileNotFoundError without metrics.jsonl, or ValueError."""
    records = [read_run(Path(run)) for run in runs]
    roots = [run.root.resolve() for run in records]
    common = os.path.commonpath([root.parent for root in roots])
    # The runs of a --multirun are 0, 1, …; "1 ended highest" would be a riddle.
    relative = [root.relative_to(common) for root in roots]
    names = [str(path.with_name(f"run {path.name}") if path.name.isdigit() else path) for path in relative]
    differ = differences(records)
    if differ and 0 < len(differ["rows"]) <= NAMED_SETTINGS:
        settings = [settings_in_words(differ["rows"], place) for place in range(len(names))]
        if max(map(len, settings)) <= MAX_NAMED_LETTERS:
            names = [f"{name} ({each})" for name, each in zip(names, settings, strict=True)]
    documents = [run_document(run, name) for run, name in zip(records, names, strict=True)]
    return {
        "title": names[0] if len(names) == 1 else f"{len(names)} runs",
        "headline": documents[0]["result"]["headline"] if len(documents) == 1 else compared(records, documents),
        "runs": documents,
        "panels": panels_for(key for run in documents for key in run["lines"]),
        "differences": differ,
        "max_mib": max(float(run.setting("monitor.report_mib", MAX_MIB)) for run in records),
        "notes": [note for pair in zip(records, documents, strict=True) for note in notes_on(*pair)],
    }


def settings_in_words(rows: Sequence[Document], place: int) -> str:
    return ", ".join(f"{'.'.join(row['key'].split('.')[-2:])}={row['values'][place]}" for row in rows)


def run_document(run: Records, name: str) -> Document:
    x, lines = lines_of(run)
    evaluations = evaluations_of(run.evaluations, str(run.setting("evaluate.on_hacking", "warn")))
    pictures = pictures_of(run)
    entry = {
        "name": name,
        "folder": str(run.root),
        "state": run.state,
        **result_of(run),
        "bottleneck": verdict(run.workers, run.history, placement=run.setting("placement")),
        "facts": facts_of(run),
        "pools": pools_of(run),
        "shared": run.shared,
        "warnings": advice_for(run, evaluations),
        "x": x,
        "lines": lines,
        "evaluations": evaluations,
        "pictures": pictures,
        "settings": settings_of(run),
        "environment": environment_of(run),
        "verification": verification_of(run),
    }
    return {**rounded(entry), "timeline": timeline_of(run)}  # whose times need more digits than six


def compared(records: Sequence[Records], runs: Sequence[Document]) -> str:
    """The headline for several runs: which ended with the highest reward, if their evaluations can be compared.

    The difference from the next one is paired by prompt and noise, like a change within a run.
    """
    states = Counter(run["state"] for run in runs)
    count = f"{len(runs)} runs, " + ", ".join(f"{n} {state}" for state, n in states.items())
    ends = [(run["change"], run["name"], ends_of(record.policy)) for record, run in zip(records, runs, strict=True)]
    lasts = [(change, name, both[-1]) for change, name, both in ends if change and both]
    ordered = sorted(lasts, key=lambda last: -float(last[0]["after"]))
    if len(ordered) < 2 or any(change["of"] != ordered[0][0]["of"] for change, _, _ in ordered):
        return f"{count}. No evaluations of the same prompts, noises and reward compare them."
    (best, name, highest), (second, other, next_highest) = ordered[:2]
    if (more := between(REWARD, highest, next_highest)) is None:
        return f"{count}. The evaluations of {name} and {other} scored no prompt in common."
    return (
        f"{count}. On the same prompts {name} ended highest, at {best['after']:.3g} from {best['before']:.3g}; next is "
        f"{other}, at {second['after']:.3g}. The difference: {change_words(more)}."
    )


def notes_on(run: Records, entry: Document) -> list[str]:
    notes, name = [], entry["name"]
    if (width := bucket_width(len(run.metrics))) > 1:
        notes.append(f"{name}: each point of a curve is the mean of {width} steps, its band their range.")
    timeline, pictures, evaluations = (entry[key] or {} for key in ("timeline", "pictures", "evaluations"))
    shown = [
        (timeline.get("shown", 0), timeline.get("workers", 0), "workers in the timeline"),
        (len(timeline.get("marks", ())), timeline.get("mark_count", 0), "faults and recoveries"),
        (len(pictures.get("evaluations", ())), pictures.get("count", 0), "evaluations with images"),
        (len(evaluations.get("rows", ())), evaluations.get("count", 0), "evaluations in the table"),
    ]
    return notes + [f"{name}: {some} of {every} {what} are shown." for some, every, what in shown if some < every]
