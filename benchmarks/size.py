"""Command `make size`: the size of the project against the budgets of pyproject.toml, and the files that a run visits.

    python -m benchmarks.size            # code lines, files and docstrings of every room; tests and docs
    python -m benchmarks.size --check    # the same; exit code 1 if a budget of [tool.size] is exceeded
    python -m benchmarks.size --way      # also makes a tiny run and counts the project files on a ticket's way

Code is what is not blank, comment or docstring. A room is a folder of `async_flowrl`, one of the two other packages, or
the files in the root of `async_flowrl` together.
"""

import argparse
import ast
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import tokenize
import tomllib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from operator import add
from pathlib import Path
from typing import Any

from benchmarks import visited
from benchmarks.visited import PACKAGES

ROOT = Path(__file__).resolve().parent.parent
TINY_RUN = (
    *("--config-name", "stream", "total_steps=6", "trainer.num_workers=2", "trainer.micro_batch_size=2"),
    *("evaluate.before_training=false", "console=quiet", "monitor.report=false", "save.every=100"),
)
"""Arguments of the run whose way is counted: streamed hand-over and two trainer ranks on the tiny model."""
MODES = ("placement", "shard", "backend", "tune")
"""Settings that decide which objects a run is made of; what comes after gets an object."""
FOLLOWED_STEP = 3
"""The training step whose first ticket is followed to the version that it makes."""


@dataclass(frozen=True)
class Count:
    """Lines of some Python files."""

    files: int = 0
    lines: int = 0
    code: int = 0
    docstrings: int = 0

    def __add__(self, other: "Count") -> "Count":
        return Count(*map(add, astuple(self), astuple(other)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the sizes; returns 1 if `--check` finds a budget exceeded, else 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.size", description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="exit code 1 if a budget is exceeded")
    parser.add_argument("--way", action="store_true", help="also make a tiny run and count the files on its way")
    options = parser.parse_args(arguments)
    sizes = measured(ROOT)
    budgets: Mapping[str, float] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["size"]
    if options.way:
        sizes |= way_of_a_ticket()
    over = [name for name, most in budgets.items() if sizes.get(name, 0) > most]
    for name, size in sizes.items():
        budget = f" of {budgets[name]:,g}" if name in budgets else ""
        sys.stdout.write(f"{name:34} {size:>9,g}{budget}{'  EXCEEDED' if name in over else ''}\n")
    return 1 if options.check and over else 0


def measured(root: Path) -> dict[str, float]:
    """Returns name → size: `code/ROOM` and `files/ROOM` for each room, totals, and words of the documentation."""
    rooms: dict[str, Count] = defaultdict(Count)
    for path in tracked(root, [f"{package}/*.py" for package in PACKAGES]):
        rooms[room_of(path.relative_to(root))] += count(path.read_text())
    packages = sum(rooms.values(), Count())
    others = {
        folder: sum(count(path.read_text()).code for path in tracked(root, (f"{folder}/*.py",)))
        for folder in ("benchmarks", "examples", "tests")
    }
    scripts = sum(script_lines(path) for path in tracked(root, ("*.js", "*.css")) if not path.name.endswith(".min.js"))
    by_room = {f"code/{name}": float(room.code) for name, room in sorted(rooms.items(), key=lambda item: -item[1].code)}
    return by_room | {
        "code/packages": packages.code,
        "files/packages": packages.files,
        "docstring_percent/packages": round(100 * packages.docstrings / packages.lines, 1),
        **{f"code/{folder}": found for folder, found in others.items()},
        "code/js_and_css": scripts,
        "code/all_but_tests": packages.code + others["benchmarks"] + others["examples"] + scripts,
        **{f"deciding/{mode}": float(len(files)) for mode, files in deciding(root).items()},
        "words/docs": sum(len(path.read_text().split()) for path in tracked(root, ("docs/*.md",))),
    }


def deciding(root: Path) -> dict[str, set[Path]]:
    """Returns setting → the files of the packages that compare it: a mode is decided in few places."""
    files: dict[str, set[Path]] = {mode: set() for mode in MODES}
    sources = {path: path.read_text() for path in tracked(root, [f"{package}/*.py" for package in PACKAGES])}
    for path in (path for path, text in sources.items() if any(f".{mode}" in text for mode in MODES)):
        for node in ast.walk(ast.parse(sources[path])):
            for side in (node.left, *node.comparators) if isinstance(node, ast.Compare) else ():
                if isinstance(side, ast.Attribute) and side.attr in MODES:
                    files[side.attr].add(path)
    return files


def room_of(path: Path) -> str:
    """Returns the room of a file, given relative to the repository."""
    package, *inner = path.parts
    if package != PACKAGES[0]:
        return package
    return f"{package}/{inner[0]}" if len(inner) > 1 else package


def tracked(root: Path, patterns: Sequence[str]) -> list[Path]:
    """Returns the files below `root` that match git's `patterns` and are tracked or new, but not ignored."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", "--", *patterns]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    return [root / name for name in sorted(set(listed.split("\0"))) if name and (root / name).is_file()]


def count(source: str) -> Count:
    """Counts the lines of one Python file; a string that stands alone is a docstring."""
    code: set[int] = set()
    docstrings: set[int] = set()
    statement: list[tokenize.TokenInfo] = []
    dull = {tokenize.COMMENT, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NEWLINE:
            lines = docstrings if all(part.type == tokenize.STRING for part in statement) else code
            for part in statement:
                lines.update(range(part.start[0], part.end[0] + 1))
            statement.clear()
        elif token.type not in dull:
            statement.append(token)
    return Count(1, len(source.splitlines()), len(code), len(docstrings))


def script_lines(path: Path) -> int:
    """Returns the lines of a JS or CSS file that are not blank and not comments."""
    source = re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)
    return sum(bool(line.strip()) and not line.strip().startswith("//") for line in source.splitlines())


def way_of_a_ticket() -> dict[str, float]:
    """Makes the tiny run and returns how many project files it executes on two of its ways.

    `way/ticket_to_next_version` counts them in all processes between the first ticket of a step and the last
    acknowledgement of the version that the step makes, `way/main_to_loop` from the entry point to the loop.
    """
    with tempfile.TemporaryDirectory() as scratch:
        run, calls = Path(scratch, "run"), Path(scratch, "calls")
        calls.mkdir()
        environment = visited.environment(calls, ROOT)
        command = [sys.executable, "-m", "async_flowrl.main", *TINY_RUN, f"output_dir={run}"]
        subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, check=True, stdout=subprocess.DEVNULL)
        events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
        files, before = (
            visited.files_within(calls, *followed(events)),
            visited.files_before(calls, "async_flowrl/run/loop.py"),
        )
    return {"way/ticket_to_next_version": len(files), "way/main_to_loop": len(before)}


def followed(events: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Returns the unix seconds between which the ticket of FOLLOWED_STEP became a version that all have."""
    began = min(e["time"] for e in events if e["event"] == "ticket" and e["step"] == FOLLOWED_STEP)
    ended = max(
        e["time"]
        for e in events
        if e["event"] == "version" and e["version"] == FOLLOWED_STEP + 1 and e["state"] == "acknowledged"
    )
    return began, ended


if __name__ == "__main__":
    sys.exit(main())
