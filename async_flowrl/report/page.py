"""The HTML page that shows a report's document: one file that contains its styles, its scripts and the library uPlot.

It makes no requests: it contains its pictures as data URIs, as many as fit `max_mib`, and its Content-Security-Policy
forbids all requests.

Texts from files cannot inject markup: the page contains them as JSON in which `<`, `>` and `&` are escaped, and the
scripts insert them as text.
"""

import base64
import hashlib
import json
from collections.abc import Iterator
from functools import cache
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from async_flowrl.config.paths import replace_file
from async_flowrl.report.document import Document, document
from async_flowrl.report.pictures import data_uri

# Files in assets/, in the order in which the page runs them; uPlot (MIT, assets/uPlot.LICENSE) comes first.
SCRIPTS = ("dom.js", "charts.js", "timeline.js", "gallery.js", "sections.js", "show.js")


def write_page(runs: list[Path], path: Path, *, max_mib: float | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, render(document(runs), max_mib=max_mib))


def render(document: Document, *, max_mib: float | None = None) -> str:
    """The page as text. `max_mib` is the limit on its pictures in MiB; None means the document's own limit.

    Pictures that are missing or exceed the limit are left out, and the page says so. Raises ValueError for NaN or
    infinity.
    """
    limit = document["max_mib"] if max_mib is None else max_mib
    pictures, left_out = embedded(document, round(limit * 2**20))
    style = _asset("uPlot.min.css") + _asset("page.css")
    script = _asset("uPlot.iife.min.js") + "\n" + "\n".join(map(_asset, SCRIPTS))
    values = {
        "policy": policy(style, script),
        "title": escape(document["title"]),
        "headline": escape(document["headline"]),
        "document": as_data({**document, "left_out": left_out}),
        "pictures": as_data(pictures),
        "style": style,
        "script": script,
    }
    parts = _asset("page.html").split("{{")
    return parts[0] + "".join(values[name] + rest for name, _, rest in (part.partition("}}") for part in parts[1:]))


def as_data(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def policy(style: str, script: str) -> str:
    """The Content-Security-Policy: allows this style, this script and data URIs."""
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, script)]
    return (
        f"default-src 'none'; script-src 'sha256-{hashes[1]}'; style-src 'sha256-{hashes[0]}'; img-src data:; "
        f"connect-src 'none'; base-uri 'none'; form-action 'none'"
    )


def embedded(document: Document, limit: int) -> tuple[dict[str, str], str | None]:
    """(name → data URI, sentence about missing ones or None), in order until the URIs have `limit` characters.

    A name is `<number of the run>/<path below its images folder>`.
    """
    uris: dict[str, str] = {}
    size = missing = 0
    pictures = list(dict.fromkeys(in_order(document)))  # Several prompts may edit one image.
    for name, folder, below in pictures:
        if (data := data_uri(folder, below)) is None:
            missing += 1
            continue
        size += len(data)
        if size > limit:
            break
        uris[name] = data
    if len(uris) == len(pictures):
        return uris, None
    return uris, (
        f"{len(uris)} of {len(pictures)} images are in this file, which holds {limit / 2**20:g} MiB of them at most "
        f"(monitor.report_mib, or --max-mib of the command); {missing} are not in the run directory, or no pictures."
    )


def in_order(document: Document) -> Iterator[tuple[str, Path, str]]:
    # The images that are edited come first. The first image of every prompt comes before the second ones; among equal
    # images, the first and the last evaluation come first, and so on inwards.
    ranked = []
    for number, run in enumerate(document["runs"]):
        pictures = run["pictures"] or {"prompts": [], "evaluations": []}
        evaluations, at = pictures["evaluations"], Path(run["folder"]) / "images"
        for prompt in pictures["prompts"]:
            first = (-1, 0, int(prompt["place"]), number)
            ranked += [(first, f"{number}/{file}", at, file) for file in prompt["sources"]]
        for position, evaluation in enumerate(evaluations):
            rank = min(position, len(evaluations) - 1 - position)
            for place, prompt in evaluation["prompts"].items():
                for index, file in enumerate(prompt["files"]):
                    below = f"{evaluation['folder']}/{file}"
                    ranked.append(((index, rank, int(place), number), f"{number}/{below}", at, below))
    for _, name, folder, below in sorted(ranked):
        yield name, folder, below


@cache
def _asset(name: str) -> str:
    return (files("async_flowrl.report") / "assets" / name).read_text(encoding="utf-8")
