"""python docs/write_benchmarks.py [NAME=FILE.json ...]: tables and picture of docs/benchmarks.md from measurements.

    python -m async_flowrl.benchmark --out outputs/modes
    python -m tests.performance.suite --out outputs/targets
    python -m tests.performance.controller --json > outputs/controller.json
    python -m tests.performance.profile --json > outputs/profile.json
    python -m tests.performance.profile --json model.tiny.layers=12 model.tiny.heads=24 > outputs/largest.json
    python -m tests.performance.frame --json outputs/frame.json
    python -m tests.performance.start --json outputs/start.json
    python -m tests.performance.placements --before TREE --out outputs/placements.json
    python docs/write_benchmarks.py modes=outputs/modes/benchmark.json targets=outputs/targets/targets.json \\
        controller=outputs/controller.json profile=outputs/profile.json largest=outputs/largest.json \\
        frame=outputs/frame.json start=outputs/start.json placements=outputs/placements.json

What is given is kept in docs/measured/; what is not given stays as it was measured last, and as it was written where
docs/measured/ has nothing of it. The page's other tables are written by hand from what the commands beside them print.
"""

import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from async_flowrl.benchmark import table
from async_flowrl.benchmark.page import between_markers
from tests.performance import controller, frame_tables, placements, profile, start, suite

DOCS = Path(__file__).resolve().parent
PAGE, MEASURED, PICTURE = DOCS / "benchmarks.md", DOCS / "measured", DOCS / "images" / "benchmark.png"


def of_modes(measured: Mapping[str, Any]) -> str:
    picture = "![Images per second by mode, and the bound](images/benchmark.png)"
    return f"{table.markdown(table.from_json(measured))}\n{picture}\n"


def of_targets(measured: Mapping[str, Any]) -> str:
    return suite.markdown(suite.from_dictionary(measured))


def of_controller(measured: Sequence[Mapping[str, Any]]) -> str:
    return controller.markdown([controller.Cost(**cost) for cost in measured])


def of_frame(measured: Mapping[str, Any]) -> str:
    return frame_tables.markdown(frame_tables.from_json(measured))


def of_threads(measured: Mapping[str, Any]) -> str:
    return frame_tables.threads_markdown(frame_tables.from_json(measured))


def of_placements(measured: Mapping[str, Any]) -> str:
    return placements.markdown(placements.from_json(measured))


SECTIONS: Mapping[str, Callable[[Any], str]] = {
    "modes": of_modes,
    "targets": of_targets,
    "controller": of_controller,
    "profile": profile.markdown,
    "largest": profile.markdown,
    "frame": of_frame,
    "threads": of_threads,
    "start": start.markdown,
    "placements": of_placements,
}
MEASURED_WITH = {"threads": "frame"}
"""Section → the section whose file it is made of, where that is not its own."""


def written(page: str) -> str:
    """`page` with what was measured between the markers of its section; a section never measured stays as it is."""
    for name, markdown in SECTIONS.items():
        path = MEASURED / f"{MEASURED_WITH.get(name, name)}.json"
        if path.exists():
            page = between_markers(page, name, markdown(json.loads(path.read_text(encoding="utf-8"))))
    return page


def main(arguments: Sequence[str]) -> None:
    MEASURED.mkdir(exist_ok=True)
    for argument in arguments:
        name, _, path = argument.partition("=")
        if name not in (known := [each for each in SECTIONS if each not in MEASURED_WITH]):
            raise SystemExit(f"{name!r} is no measurement; there are {', '.join(known)}")
        shutil.copyfile(Path(path).expanduser(), MEASURED / f"{name}.json")
    if (modes := MEASURED / "modes.json").exists():
        table.picture(table.from_json(json.loads(modes.read_text(encoding="utf-8"))), PICTURE)
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
