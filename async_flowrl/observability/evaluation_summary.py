"""The evaluations of a run, as summary.json and the report tell them."""

from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from typing import Any

from async_flowrl.config.curves import best_curve
from async_flowrl.config.schema import Config
from async_flowrl.observability.charts import Line, line_chart
from async_flowrl.observability.evaluations import (
    DIVERSITY,
    HELD_OUT,
    TRAINED,
    Evaluation,
    between,
    first_comparable,
)
from async_flowrl.observability.hacking import alarms, best, notices

KINDS = {TRAINED: "trained", HELD_OUT: "held out", DIVERSITY: "diversity"}


def summarise_evaluations(config: Config, history: Sequence[Evaluation]) -> dict[str, Any]:
    """The keys `evaluations` and `hacking` of summary.json; what was not evaluated is null."""
    policy = sorted((e for e in history if not e.baseline), key=lambda each: each.version)
    baseline = next((e for e in history if e.baseline), None)
    judged = config.evaluate.on_hacking != "ignore"
    return {
        "evaluations": {
            "first": _row(policy[0], history) if policy else None,
            "last": _row(policy[-1], history) if policy else None,
            "baseline": _row(baseline, history) if baseline else None,
            "best": best_row(config, history),
        },
        "hacking": {
            "alarms": [alarm.sentence for alarm in alarms(history)] if judged else [],
            "notices": [notice.sentence for notice in notices(history)],
        },
    }


def best_row(config: Config, history: Sequence[Evaluation]) -> dict[str, Any] | None:
    """Curve, version and mean of the best evaluated version; None where none is kept or none was evaluated."""
    curve = best_curve(config)
    found = None if curve is None else best(history, curve)
    if curve is None or found is None:
        return None
    return {"curve": curve, "version": found.version, "mean": found.curves[curve].estimate().mean}


def _row(evaluation: Evaluation, history: Sequence[Evaluation]) -> dict[str, Any]:
    first = None if evaluation.baseline else first_comparable(history, evaluation)
    curves = {}
    for name, curve in evaluation.curves.items():
        moved = None if first is None else between(name, evaluation, first)
        paired = {"change": moved and moved.mean, "change_stderr": moved and moved.stderr}
        curves[name] = {"kind": curve.kind, **asdict(curve.estimate()), **paired}
    return {
        "version": evaluation.version,
        "steps": evaluation.steps,
        "guidance": evaluation.guidance,
        "curves": curves,
    }


def evaluation_parts(history: Sequence[Evaluation], on_hacking: str) -> list[str]:
    """The report's section: alarms first, then a table of every evaluation, then a chart per kind of curve."""
    if not history:
        return []
    policy = sorted((e for e in history if not e.baseline), key=lambda each: each.version)
    rows = [*(e for e in history if e.baseline), *policy]
    names = {name: curve.kind for e in rows for name, curve in e.curves.items()}
    fired = alarms(history) if on_hacking != "ignore" else []
    told = [*{alarm.curve: alarm.sentence for alarm in fired}.values(), *(n.sentence for n in notices(history))]
    head = "".join(f"<th>{escape(name)}<br><small>{KINDS[kind]}</small></th>" for name, kind in names.items())
    body = "".join(f"<tr>{_cells(e, history, list(names))}</tr>" for e in rows)
    explained = (
        "mean ± half the 95 % interval, errors clustered by prompt; in brackets the change since the first evaluation, "
        "paired by prompt and noise, ± its standard error"
    )
    charts = "".join(_chart(kind, [n for n in names if names[n] == kind], policy) for kind in KINDS)
    return [
        "<h2>Evaluations</h2>",
        *(f'<p class="lead">{escape(sentence)}</p>' for sentence in told),
        f"<table><tr><th></th>{head}</tr>{body}</table><p>{explained}</p>",
        f'<div class="charts">{charts}</div>',
    ]


def _cells(evaluation: Evaluation, history: Sequence[Evaluation], names: Sequence[str]) -> str:
    title = (
        f"baseline ({evaluation.steps} steps, guidance {evaluation.guidance:g})"
        if evaluation.baseline
        else f"version {evaluation.version}"
    )
    first = None if evaluation.baseline else first_comparable(history, evaluation)
    cells = [f"<th>{title}</th>"]
    for name in names:
        if name not in evaluation.curves:
            cells.append("<td>–</td>")
            continue
        found = evaluation.curves[name].estimate()
        text = f"{found.mean:.4g}" + ("" if found.high is None else f" ± {found.high - found.mean:.2g}")
        if first is not None and (moved := between(name, evaluation, first)) is not None:
            error = "" if moved.stderr is None else f" ± {moved.stderr:.2g}"
            text += f" ({moved.mean:+.3g}{error})"
        cells.append(f"<td>{text}</td>")
    return "".join(cells)


def _chart(kind: str, names: Sequence[str], policy: Sequence[Evaluation]) -> str:
    lines = []
    for name in names:
        drawn = [e for e in policy if name in e.curves]
        lines.append(Line(name, [e.version for e in drawn], [e.curves[name].estimate().mean for e in drawn]))
    if not lines:
        return ""
    chart = line_chart(lines, x_label="version", y_label="mean")
    return f"<figure>{chart}<figcaption>{KINDS[kind].capitalize()}, on the evaluated prompts</figcaption></figure>"
