"""Rows of the live panel (panel.py): the state of a run as styled text, cut to the size of the terminal."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from rich.text import Text

from async_flowrl.observability.progress import Progress, duration, number, with_change

LABEL_CHARACTERS = 11
"""Columns for the name of a row; the plain lines at the start and the end of a run use the same width."""
MIN_BAR, MAX_BAR = 8, 40
MIN_SPARK_CHARACTERS, MAX_SPARK_CHARACTERS = 8, 40
WORDS = {
    "busy": {"rollout": "generating", "trainer": "training"},
    "wait_data": {"rollout": "waiting for prompts", "trainer": "waiting for images"},
    "wait_weights": {},
    "sync": {"rollout": "taking weights", "trainer": "publishing weights"},
    "idle": {},
}
USUALLY = {
    "busy": "scoring",
    "wait_data": "waiting for images",
    "wait_weights": "waiting for weights",
    "sync": "weights",
    "idle": "idle",
}
"""State of the ledger → words for the reward pools, which WORDS does not name."""
LABELS = {"reward": "rewards"}
"""Pool → name of its row if it differs, because the row "reward" shows the value of the reward."""
STYLES = {"busy": "green", "sync": "cyan", "idle": "red"}


@dataclass(frozen=True)
class Glyphs:
    """Characters that the panel is drawn with."""

    spark: str = "▁▂▃▄▅▆▇█"
    full: str = "━"
    empty: str = "╌"
    cut: str = "…"
    dot: str = "●"
    plus_minus: str = "±"
    rule: str = "─"


ASCII = Glyphs(spark="_.-=*#", full="#", empty="-", cut="~", dot="*", plus_minus="+-", rule="-")
"""Characters for terminals without Unicode."""


@dataclass
class Now:
    """State that the panel shows besides the progress; the panel updates it."""

    title: str
    phase: str = "starting"
    """Text shown until the first step is done."""
    pools: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Pool → state → number of places in this state now."""
    mfu: Mapping[str, float] = field(default_factory=dict)
    """Pool → share of the peak FLOP/s of its devices over the last steps; only pools for which it is known."""
    held_out: bool = False
    """True if no evaluated prompt is also a training prompt."""
    bound: int = 0
    """The setting max_staleness."""
    warnings: Sequence[str] = ()
    """Warnings to show, the newest last."""
    ended: bool = False
    """True in the last drawing."""


def rows(progress: Progress, now: Now, width: int, height: int, glyphs: Glyphs) -> list[Text]:
    """The panel's rows, at most `width` columns wide; they are ordered by importance and cut to `height` rows."""
    lines = [
        _rule(progress, now, width, glyphs),
        _steps(progress, now, width, glyphs),
        *(_reward(progress, width, glyphs) if progress.line else []),
        *_evaluation(progress, now, width, glyphs),
        *(_age(progress, now, width) if progress.line else []),
        *(_pool(pool, states, progress, now, width=width, glyphs=glyphs) for pool, states in now.pools.items()),
        *_speed(progress, width),
        *([_row("lost", [Text(lost, "yellow") for lost in progress.losses], width)] if progress.losses else []),
        *(_row("warning", [Text(warning, "yellow")], width) for warning in now.warnings),
    ]
    for row in lines:
        row.truncate(width, overflow="crop")
        if "…" in row.plain and glyphs is ASCII:
            row.plain = row.plain.replace("…", glyphs.cut)
    return lines[: max(1, height)]


def _row(label: str, parts: Sequence[Text], width: int) -> Text:
    """A row with its name and as many parts as fit; the first part is cut if it does not fit."""
    row = Text(f"{label:{LABEL_CHARACTERS}}"[: LABEL_CHARACTERS - 1] + " ", "dim", no_wrap=True, end="")
    for index, part in enumerate(parts):
        if index and len(row) + 3 + part.cell_len > width:
            break
        row.append("   " if index else "")
        row.append_text(part)
    if row.cell_len > width:
        row.truncate(width, overflow="ellipsis")
    return row


def _rule(progress: Progress, now: Now, width: int, glyphs: Glyphs) -> Text:
    title, clock = f" {now.title} ", f" {duration(progress.clock() - progress.began)} "
    if glyphs is ASCII:
        title = title.replace("·", "-")
    row = Text(glyphs.rule * 2, "dim", no_wrap=True, end="")
    row.append(title[: max(0, width - len(clock) - 4)], "bold not dim")
    row.append(glyphs.rule * max(0, width - row.cell_len - len(clock) - 2))
    row.append(clock + glyphs.rule * 2)
    return row


def _steps(progress: Progress, now: Now, width: int, glyphs: Glyphs) -> Text:
    count = Text(f"{progress.done}/{progress.total}", "bold")
    if not progress.line:
        return _row("step", [count, Text(now.phase), Text(duration(progress.since_step), "dim")], width)
    left = max(0.0, (progress.seconds_left or 0.0) - (0.0 if now.ended else progress.since_step))
    parts = [count, Text(f"ETA {duration(left)}")]
    pace = Text(f"{progress.step_seconds or 0.0:.3g} s/step")
    taken = LABEL_CHARACTERS + sum(part.cell_len + 3 for part in parts)
    if (room := min(MAX_BAR, width - taken - pace.cell_len - 3)) >= MIN_BAR:
        parts.insert(1, _bar(progress.done / max(1, progress.total), room, glyphs))
        parts.append(pace)
    return _row("step", parts, width)


def _bar(share: float, width: int, glyphs: Glyphs) -> Text:
    full = round(min(1.0, share) * width)
    return Text(glyphs.full * full, "green").append(glyphs.empty * (width - full), "dim")


def _reward(progress: Progress, width: int, glyphs: Glyphs) -> list[Text]:
    if not progress.rewards:
        return [_row("reward", [Text("none yet")], width)]
    values = [value for _, value in progress.rewards]
    parts = [Text(number(progress.line.get("reward/mean")), "bold")]
    room = min(MAX_SPARK_CHARACTERS, width - LABEL_CHARACTERS - parts[0].cell_len - 3)
    if room >= MIN_SPARK_CHARACTERS and len(values) > 1:
        parts.append(Text(spark(values, room, glyphs), "cyan"))
    parts.append(Text(f"first {values[0]:.4f}, highest {max(values):.4f}", "dim"))
    return [_row("reward", parts, width)]


def spark(values: Sequence[float], width: int, glyphs: Glyphs) -> str:
    """A bar chart in one line of at most `width` characters; each bar is the mean of neighbouring values."""
    count = min(width, len(values))
    edges = [round(index * len(values) / count) for index in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    if high == low:
        return glyphs.spark[len(glyphs.spark) // 2] * count
    top = len(glyphs.spark) - 1
    return "".join(glyphs.spark[round((mean - low) / (high - low) * top)] for mean in means)


def _evaluation(progress: Progress, now: Now, width: int, glyphs: Glyphs) -> list[Text]:
    """One row for the reward of the newest evaluation and one per held-out term, each with its change or its error."""
    if progress.evaluation is None:
        return []
    title, metrics = progress.evaluation
    names = ["reward", *(n.removesuffix("/mean") for n in metrics if re.fullmatch("held_out/[^/]+/mean", n))]
    lines = []
    label = "held-out" if now.held_out else "evaluated"
    for index, name in enumerate(names):
        text, high = with_change(metrics, name), metrics.get(f"{name}/high")
        if "(" not in text and high is not None:
            text += f" ± {high - metrics[f'{name}/mean']:.2g}"
        text = text.replace("±", glyphs.plus_minus).replace(")", " since the first)")
        said = Text(name.replace("held_out/", "held-out ") + " ").append(text, "bold")
        lines.append(_row("" if index else label, [said, Text(title, "dim")], width))
    return lines


def _age(progress: Progress, now: Now, width: int) -> list[Text]:
    line = progress.line
    parts = [Text(f"{number(line.get('staleness/mean'), '.2g')} of at most {now.bound}")]
    named = (("clip_fraction", "clipped", ".1%"), ("zero_std_ratio", "without spread", ".0%"), ("kl", "KL", ".3g"))
    parts += [Text(f"{name} {line[key]:{form}}") for key, name, form in named if line.get(key) is not None]
    return [_row("staleness", parts, width)]


def _pool(pool: str, states: Mapping[str, int], progress: Progress, now: Now, *, width: int, glyphs: Glyphs) -> Text:
    """The states of a pool's workers now (busy first, then by count), its busy share of the last step, and its MFU."""
    whole = sum(states.values())
    ranked = sorted(states.items(), key=lambda item: (item[0] != "busy", -item[1]))
    words = [_does(pool, state) + (f" {count}/{whole}" if whole > 1 else "") for state, count in ranked if count]
    style = STYLES.get(ranked[0][0], "yellow") if ranked else "dim"
    parts = [Text(f"{glyphs.dot} ", style).append(", ".join(words))]
    if (busy := progress.line.get(f"pool/{pool}/busy")) is not None:
        parts.append(Text(f"busy {busy:.0%}"))
    if pool in now.mfu:
        parts.append(Text(f"MFU {now.mfu[pool]:.1%}"))
    return _row(LABELS.get(pool, pool), parts, width)


def _does(pool: str, state: str) -> str:
    return WORDS.get(state, {}).get(pool, USUALLY.get(state, state))


def _speed(progress: Progress, width: int) -> list[Text]:
    rate = progress.images_per_second
    return [] if rate is None else [_row("speed", [Text(f"{rate:.3g} images/s")], width)]
