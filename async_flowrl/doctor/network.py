"""Findings on the network between nodes: clocks, and how fast an object reaches all of them."""

from collections.abc import Iterator, Mapping

from async_flowrl.doctor.findings import FAILED, OK, WARNING, Finding
from separation.cluster_probe import Node, Offset, Survey

SKEW_SECONDS = 1.0
"""Clock difference above which the log lines of several nodes are in the wrong order."""
BROADCAST_BYTES = 32_000_000
"""Size of the object whose broadcast is timed."""
STORE_PART = 8
"""The broadcast object takes at most 1/STORE_PART of the smallest object store."""
SLOW_BYTES_PER_SECOND = 50e6
"""Half of gigabit Ethernet; a slower link is suspicious."""
NETWORK = "check the interface that Ray uses (ray start --node-ip-address) and the link"


def between(survey: Survey, version_bytes: int) -> Iterator[Finding]:
    """Measures clocks and a broadcast on all nodes; `version_bytes` is the size of one LoRA version."""
    names = {node.id: node.name for node in survey.nodes}
    yield clock_finding(names, survey.clocks())
    size = min(BROADCAST_BYTES, *(int(_store(node) / STORE_PART) for node in survey.nodes))
    yield broadcast_finding(names, survey.broadcast(size), size, version_bytes)


def _store(node: Node) -> float:
    return node.resources.get("object_store_memory", BROADCAST_BYTES * STORE_PART)


def clock_finding(names: Mapping[str, str], clocks: Mapping[str, Offset | Exception]) -> Finding:
    """Warns about clocks that differ. They do not affect the weights, but make logs hard to read."""
    errors = {names[node]: answer for node, answer in clocks.items() if isinstance(answer, Exception)}
    if errors:
        return _silent("clocks", errors)
    known = {names[node]: answer for node, answer in clocks.items() if isinstance(answer, Offset)}
    apart = {name: clock for name, clock in known.items() if abs(clock.seconds) - clock.within > SKEW_SECONDS}
    figures = {"seconds": {name: clock.seconds for name, clock in known.items()}}
    if apart:
        sentence = ", ".join(f"{name} is {_apart(clock.seconds)}" for name, clock in apart.items())
        advice = "start chrony or another NTP client there: weights do not depend on clocks, the times in logs do"
        return Finding("clocks", WARNING, sentence, advice, figures)
    most = max(abs(clock.seconds) for clock in known.values())
    return Finding("clocks", OK, f"at most {1000 * most:.0f} ms from this machine's", figures=figures)


def _apart(seconds: float) -> str:
    return f"{abs(seconds):.1f} s {'ahead' if seconds > 0 else 'behind'}"


def broadcast_finding(
    names: Mapping[str, str], taken: Mapping[str, float | Exception], nbytes: int, version_bytes: int
) -> Finding:
    """Reports how long every node takes to fetch `nbytes` from this node, all at once, and so how long a version takes.

    A slow link is a warning, a node without an answer a failure.
    """
    errors = {names[node]: answer for node, answer in taken.items() if isinstance(answer, Exception)}
    if errors:
        return _silent("broadcast", errors)
    seconds = {names[node]: answer for node, answer in taken.items() if not isinstance(answer, Exception)}
    slowest = max(seconds, key=lambda name: seconds[name])
    rate = nbytes / seconds[slowest]
    figures = {"bytes": nbytes, "seconds": seconds}
    sentence = (
        f"{nbytes / 1e6:.0f} MB by object store: "
        + ", ".join(f"{name} {value:.3f} s" for name, value in seconds.items())
        + f"; at the slowest one's {rate / 1e6:.0f} MB/s a version of {version_bytes / 1e6:.1f} MB takes "
        f"{version_bytes / rate:.2f} s"
    )
    if rate < SLOW_BYTES_PER_SECOND:
        return Finding("broadcast", WARNING, sentence, f"{slowest} is slow: {NETWORK}", figures)
    return Finding("broadcast", OK, sentence, figures=figures)


def _silent(name: str, errors: Mapping[str, Exception]) -> Finding:
    said = "; ".join(f"{node}: {type(error).__name__}: {first(error)}" for node, error in errors.items())
    return Finding(name, FAILED, said, NETWORK)


def first(error: Exception) -> str:
    """Returns the first line of an error's message."""
    return next(iter(str(error).strip().splitlines()), "no reason given")
