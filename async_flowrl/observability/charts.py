"""Line charts and timelines as SVG text, for a report that needs no other file."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from async_flowrl.observability.intervals import Interval, intersect, union
from async_flowrl.observability.ledger import pool_of
from async_flowrl.observability.timeline import Track

WIDTH, HEIGHT = 520, 230
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 24, 34
PALETTE = ("#1f5fa8", "#d9822b", "#3a8f4d", "#8a4fa3", "#7a7a7a", "#b23a48")
ROW_HEIGHT, NAMES_WIDTH = 26, 92
"""Height of a timeline row and width of the worker names beside it, pixels."""
WAIT_COLOURS = {"wait_data": "#f25c5c", "wait_weights": "#f59f45", "sync": "#9b7fd1", "idle": "#e03131"}
REWARD_WAIT_COLOUR = "#f9dede"
"""Paler than other waiting: reward workers are cheap beside the others, and ought to wait."""
WORK_COLOURS = {"rollout": "#2b6cb0", "reward": "#2f9e77", "trainer": "#3b4252"}


@dataclass(frozen=True)
class Line:
    """One curve: x and y of equal length; points whose y is None are left out."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]


def line_chart(lines: Iterable[Line], *, x_label: str, y_label: str) -> str:
    """An SVG of the curves on common axes; a sentence instead if there is nothing to draw."""
    drawn = [(line.name, [(x, y) for x, y in zip(line.x, line.y, strict=True) if _known(y)]) for line in lines]
    points = [(x, y) for _, curve in drawn for x, y in curve if y is not None]
    if not points:
        return "<p>Nothing recorded.</p>"
    x_axis = _Axis.around([x for x, _ in points], LEFT, WIDTH - RIGHT)
    y_axis = _Axis.around([y for _, y in points], HEIGHT - BOTTOM, TOP)
    parts = [*_grid(x_axis, y_axis), *_labels(x_label, y_label)]
    for number, (name, curve) in enumerate(drawn):
        colour = PALETTE[number % len(PALETTE)]
        path = " ".join(f"{x_axis.at(x):.1f},{y_axis.at(y):.1f}" for x, y in curve if y is not None)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        if len(curve) == 1:
            parts.append(f'<circle cx="{path.split(",")[0]}" cy="{path.split(",")[1]}" r="3" fill="{colour}"/>')
        if len(drawn) > 1:
            parts.append(_text(LEFT + number * (WIDTH - LEFT) / len(drawn), 14, name, colour=colour))
    return _svg(WIDTH, HEIGHT, parts)


def timeline(workers: Sequence[Track], window: Interval, origin: float, *, width: int = 1060) -> str:
    """One row per worker inside `window`: work in the pool's colour, idle time red. Seconds count from `origin`."""
    height = len(workers) * ROW_HEIGHT + BOTTOM
    axis = _Axis(window[0], window[1], NAMES_WIDTH, width - RIGHT)
    parts: list[str] = []
    for number, track in enumerate(workers):
        top = number * ROW_HEIGHT + 2
        parts.append(_text(2, top + ROW_HEIGHT / 2 + 3, track.place))
        pool = pool_of(track.place).split("/", 1)[0]
        for state, shade in WAIT_COLOURS.items():
            parts += _bars(track.waiting(state), axis, top, REWARD_WAIT_COLOUR if pool == "reward" else shade, state)
        for name in sorted({span["name"] for span in track.spans}):
            spans = union((span["start"], span["end"]) for span in track.spans if span["name"] == name)
            parts += _bars(spans, axis, top, WORK_COLOURS.get(pool, "#555"), name)
    bottom = len(workers) * ROW_HEIGHT + 4
    for tick in _ticks(window[0] - origin, window[1] - origin):
        x = axis.at(tick + origin)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{bottom}" stroke="#0002"/>')
        parts.append(_text(x, bottom + 14, f"{tick:g} s", anchor="middle"))
    return _svg(width, height, parts)


def legend() -> str:
    """The colours of the timeline, as HTML."""
    entries = [*WORK_COLOURS.items(), *((name.replace("_", " for "), shade) for name, shade in WAIT_COLOURS.items())]
    boxes = (f'<span class="key"><i style="background:{shade}"></i>{escape(name)}</span>' for name, shade in entries)
    return f"<p>{' '.join(boxes)}</p>"


def _bars(intervals: Sequence[Interval], axis: "_Axis", top: float, shade: str, title: str) -> list[str]:
    """Bars thinner than half a pixel are merged with their neighbours, so that long windows stay small files."""
    pixel = (axis.high - axis.low) / abs(axis.end - axis.begin) / 2
    visible = intersect(intervals, [(axis.low, axis.high)])
    widened = union((start, max(end, start + pixel)) for start, end in visible)
    return [
        f'<rect x="{axis.at(start):.2f}" y="{top:.0f}" width="{axis.at(end) - axis.at(start):.2f}" '
        f'height="{ROW_HEIGHT - 5}" fill="{shade}"><title>{escape(title)}</title></rect>'
        for start, end in widened
    ]


@dataclass(frozen=True)
class _Axis:
    low: float
    high: float
    begin: float
    end: float

    @classmethod
    def around(cls, values: Sequence[float], begin: float, end: float) -> "_Axis":
        low, high = min(values), max(values)
        if high == low:
            low, high = (0.0, 1.0) if low == 0 else (low - 0.5, high + 0.5)
        return cls(low, high, begin, end)

    def at(self, value: float) -> float:
        return self.begin + (value - self.low) / (self.high - self.low) * (self.end - self.begin)


def _grid(x_axis: _Axis, y_axis: _Axis) -> list[str]:
    parts = []
    for tick in _ticks(y_axis.low, y_axis.high):
        y = y_axis.at(tick)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#0001"/>')
        parts.append(_text(LEFT - 6, y + 4, f"{tick:g}", anchor="end"))
    for tick in _ticks(x_axis.low, x_axis.high):
        x = x_axis.at(tick)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="#0001"/>')
        parts.append(_text(x, HEIGHT - BOTTOM + 14, f"{tick:g}", anchor="middle"))
    return parts


def _labels(x_label: str, y_label: str) -> list[str]:
    middle = (TOP + HEIGHT - BOTTOM) / 2
    return [
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, x_label, anchor="middle"),
        f'<g transform="rotate(-90 12 {middle})">{_text(12, middle, y_label, anchor="middle")}</g>',
    ]


def _ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers between low and high."""
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(number * step, 10) for number in range(first, math.floor(high / step + 1e-9) + 1)]


def _known(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _text(x: float, y: float, text: str, *, anchor: str = "start", colour: str = "#333") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'


def _svg(width: float, height: float, parts: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="system-ui, sans-serif" font-size="11">{"".join(parts)}</svg>'
    )
