"""Report of the benchmark of weights in shares (shares.py) as Markdown, and what it predicts for larger models."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from async_flowrl.plan.cards import Assumptions
from benchmarks.page import between_markers

COLUMNS = (
    ("MB", "megabytes", "{:g}"),
    ("receivers", "receivers", "{}"),
    ("delivery s", "delivery_seconds", "{:.3f}"),
    ("primitive s", "primitive_seconds", "{:.3f}"),
    ("fraction", "fraction", "{:.2f}"),
    ("gloo s", "gloo_seconds", "{:.3f}"),
    ("of gloo", "fraction_of_gloo", "{:.2f}"),
    ("stall, copies", "stall_copies", "{:.2f}"),
    ("with calls", "publish_copies", "{:.2f}"),
    ("activation s", "activate_seconds", "{:.3f}"),
)
TARGETS: tuple[tuple[str, str, Callable[[float], bool]], ...] = (
    ("fraction >= 0.8", "fraction", lambda value: value >= 0.8),
    ("stall <= 1 copy", "stall_copies", lambda value: value <= 1.0),
)
SECTION = "shares"
"""Name of the part of a page that gets the report, as its two markers have it."""
MODEL_BYTES, MODEL_GPUS = 41e9, 4
NETWORKS = {"100 Gbit/s": 12.5e9, "400 Gbit/s": 50e9}
"""Bytes per second of a receiver's network."""


def report(result: Mapping[str, Any]) -> str:
    """Returns the table, the rows that met each target, the prediction, and what was not measured."""
    cells, machine = result["cells"], result["machine"]
    load = " ".join(f"{value:.1f}" for value in machine["load"])
    about = f"{machine['cores']} cores, {machine['date']}, medians of {result['repeats']} publishes; load averages "
    lists = [
        [f"{about}{load} before and {' '.join(f'{value:.1f}' for value in machine['load_after'])} after"],
        [f"{name}: {_met(cells, key, met)}" for name, key, met in TARGETS],
        predicted(cells, Assumptions()),
        [f"not measured: {reason}" for reason in result["skipped"]],
    ]
    return "\n\n".join([_table(cells), "\n".join(f"- {line}" for lines in lists for line in lines)])


def into_page(page: str, result: Mapping[str, Any]) -> str:
    """Returns the text of a page with the report between its two markers. Raises ValueError if one is missing."""
    return between_markers(page, SECTION, f"\n{report(result)}\n\n")


def predicted(cells: Sequence[Mapping[str, Any]], given: Assumptions) -> list[str]:
    """Returns sentences on 41 GB from 4 trainer to 4 rollout GPUs, each on a node of its own, at stated link speeds.

    The network of each receiver carries the whole model, at the fraction of its rate that the delivery to 4 receivers
    reached of the primitive, and a receiver's host copies and digests at the rate of the delivery to one receiver here.
    A rank copies its share from its GPU. The slowest of the three decides, because they overlap. The activation is one
    copy to the GPU. Where one of the two deliveries was not measured, there is no prediction.
    """
    found = {of: _largest([cell for cell in cells if cell["receivers"] == of]) for of in (MODEL_GPUS, 1)}
    rows, alone = found[MODEL_GPUS], found[1]
    if rows is None or alone is None:
        return [f"no prediction: it needs deliveries to 1 and to {MODEL_GPUS} receivers"]
    host = alone["megabytes"] * 1e6 / alone["delivery_seconds"]
    from_gpu = MODEL_BYTES / MODEL_GPUS / given.host_bytes_per_second
    to_gpu = MODEL_BYTES / given.host_bytes_per_second
    taken = f"{MODEL_BYTES / host:.1f} s at the {host / 1e9:.1f} GB/s of {alone['megabytes']:g} MB to one receiver here"
    sentences = [
        f"predicted, not measured: 41 GB over {MODEL_GPUS} -> {MODEL_GPUS} GPUs, each on a node of its own. A host "
        f"takes {taken}"
    ]
    for name, rate in NETWORKS.items():
        network = MODEL_BYTES / (rate * rows["fraction"])
        slowest = max(network, MODEL_BYTES / host, from_gpu)
        sentences.append(
            f"with {name} for each receiver, the network takes {network:.1f} s at the fraction {rows['fraction']:.2f} "
            f"of {rows['megabytes']:g} MB to {MODEL_GPUS}: {slowest:.1f} s of delivery beside training and sampling, "
            f"then {to_gpu:.1f} s of activation at {given.host_bytes_per_second / 1e9:g} GB/s"
        )
    return sentences


def _largest(cells: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    return max(cells, key=lambda cell: float(cell["megabytes"]), default=None)


def _table(cells: Sequence[Mapping[str, Any]]) -> str:
    rows = [[title for title, _, _ in COLUMNS]]
    rows += [[form.format(cell[key]) for _, key, form in COLUMNS] for cell in cells]
    head, *others = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([head, "|" + "---|" * len(COLUMNS), *others])


def _met(cells: Sequence[Mapping[str, Any]], key: str, met: Callable[[float], bool]) -> str:
    named = [(met(cell[key]), f"{cell['megabytes']:g} MB to {cell['receivers']} ({cell[key]:.2f})") for cell in cells]
    missed = [name for good, name in named if not good]
    which = f", not by {'; '.join(missed)}" if missed else ""
    return f"met by {len(cells) - len(missed)} of {len(cells)} rows{which}"
