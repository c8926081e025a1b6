"""Report of a benchmark result as Markdown, for the terminal and for a documentation page."""

from collections.abc import Callable
from typing import Any

from benchmarks.markdown_tables import markdown_table

COLUMNS = (
    ("transport", "transport", "{}"),
    ("MB", "megabytes", "{:g}"),
    ("receivers", "receivers", "{}"),
    ("delivery s", "delivery_seconds", "{:.3f}"),
    ("primitive s", "primitive_seconds", "{:.3f}"),
    ("fraction", "fraction_of_primitive", "{:.2f}"),
    ("trainer stall, copies", "trainer_stall_memcpys", "{:.2f}"),
    ("worker stall, copies", "worker_stall_memcpys", "{:.2f}"),
    ("loop lag p99 ms", "loop_lag_p99_ms", "{:.1f}"),
)
LARGE_MB = 50.0
"""The targets hold for payloads of at least this many megabytes."""
TARGETS: tuple[tuple[str, str, Callable[[float], bool]], ...] = (
    ("fraction >= 0.8", "fraction_of_primitive", lambda value: value >= 0.8),
    ("trainer stall <= 1.5 copies", "trainer_stall_memcpys", lambda value: value <= 1.5),
    ("worker stall <= 1.5 copies", "worker_stall_memcpys", lambda value: value <= 1.5),
    ("loop lag p99 < 100 ms", "loop_lag_p99_ms", lambda value: value < 100.0),
)
MAX_SURVIVOR_SECONDS = 5.0
"""Target: largest number of seconds after a SIGKILL until the survivors have the version."""


def report(result: dict[str, Any]) -> str:
    """Returns the table, the recoveries after SIGKILL, the rows that met each target, and those not measured."""
    machine, cells = result["machine"], map(_with_milliseconds, result["cells"])
    load = " ".join(f"{value:.1f}" for value in machine["load"])
    parts = [
        markdown_table(
            [title for title, _, _ in COLUMNS], [[form.format(cell[key]) for _, key, form in COLUMNS] for cell in cells]
        ),
        "\n".join(_kills(result["after_kill"])),
        "\n".join(_targets(result)),
        "\n".join(f"- Not measured: {reason}" for reason in result["skipped"]),
        f"{machine['cores']} cores, torch {machine['torch']}, medians of {result['repeats']} publishes; "
        f"load averages at the end: {load}",
    ]
    return "\n\n".join(part for part in parts if part)


def _kills(kills: list[dict[str, Any]]) -> list[str]:
    lines = []
    for transport in dict.fromkeys(kill["transport"] for kill in kills):
        mine = [kill for kill in kills if kill["transport"] == transport]
        seconds = ", ".join(f"{kill['seconds']:.2f}" for kill in mine)
        lines.append(
            f"- SIGKILL of one receiver during {mine[0]['megabytes']:g} MB by {transport}: "
            f"the {mine[0]['survivors']} survivors had the version after {seconds} s"
        )
    return lines


def _targets(result: dict[str, Any]) -> list[str]:
    large = [_with_milliseconds(cell) for cell in result["cells"] if cell["megabytes"] >= LARGE_MB]
    lines = []
    for title, key, met in TARGETS:
        missed = [f"{c['transport']} {c['megabytes']:g} MB to {c['receivers']}" for c in large if not met(c[key])]
        which = f", not by {'; '.join(missed)}" if missed else ""
        lines.append(
            f"- {title} at {LARGE_MB:g} MB and above: met by {len(large) - len(missed)} of {len(large)} rows{which}"
        )
    kills = result["after_kill"]
    met_kills = sum(kill["seconds"] <= MAX_SURVIVOR_SECONDS for kill in kills)
    return [*lines, f"- survivors served within {MAX_SURVIVOR_SECONDS:g} s of a SIGKILL: {met_kills} of {len(kills)}"]


def _with_milliseconds(cell: dict[str, Any]) -> dict[str, Any]:
    return cell | {"loop_lag_p99_ms": 1000 * cell["loop_lag_p99_seconds"]}
