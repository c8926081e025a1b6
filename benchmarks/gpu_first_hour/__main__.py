"""The first hour on one GPU: python -m benchmarks.gpu_first_hour [STAGE ...] [key=value ...] [--call N].

Every stage is a process with a limit of its own. When it has ended, however it ended, the folder --out holds all that
is known: stages.json, stages.md (a line per stage) and logs.tar.gz. Then the next stage begins. On a machine without
Ray, the packages that prepare.sh has packed into .gpukit/ are unpacked first. The exit code is 1 if a stage was not ok.
"""

import argparse
import importlib.util
import json
import os
import secrets
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from async_flowrl.config.error_text import unknown_name
from benchmarks.gpu_first_hour.task import GRACE_SECONDS, end_marked, run_within

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / ".gpukit" / "site.tar.xz"
CALL_SECONDS = 590
"""The longest that all stages of one call may take together."""


@dataclass(frozen=True)
class Stage:
    """One stage. `place` is `module:function`, `seconds` its limit, `call` the call (1, 2, 3) that it belongs to."""

    place: str
    seconds: int
    call: int
    what: str
    beside: str | None = None
    """The stage before it with which it begins: neither measures speed."""


HERE = "benchmarks.gpu_first_hour"
STAGES = {
    "kernels": Stage(f"{HERE}.kernel_bits:kernels", 80, 1, "one kernel of each kind gives the same bits again"),
    "tiny": Stage(f"{HERE}.runs:tiny", 130, 1, "digests of the tiny job: seeds, placements, dtypes, families"),
    "full": Stage(f"{HERE}.full_size:full", 190, 1, "Qwen-Image at full size: speed, MFU, peak against plan"),
    "one_card": Stage(f"{HERE}.one_card:one_card", 180, 1, "NCCL and pynccl between processes on one card"),
    "tests": Stage(f"{HERE}.runs:gpu_tests", 180, 1, "tests/gpu, while one_card runs", beside="one_card"),
    "glyphs": Stage(f"{HERE}.runs:glyphs", 190, 2, "a small model learns to write: held-out OCR of at least 0.8"),
    "probe": Stage(f"{HERE}.probe:probe", 110, 2, "ceilings, attention, torch.compile and CUDA graphs of a block"),
    "whole": Stage(f"{HERE}.runs:whole", 270, 2, "two whole runs at full size end with one digest"),
    "compiled": Stage(f"{HERE}.full_size:compiled", 160, 3, "`full` with compiled blocks"),
    "others": Stage(f"{HERE}.full_size:others", 110, 3, "`full` without guidance, with SD 3.5 medium, with FLUX.1-dev"),
}
"""Name → stage, in the order in which they run."""
LEAST_SECONDS = 5.0
"""A stage that would have less is skipped."""
HEAVY = (".safetensors", ".pt", ".bin", ".png", ".webp")
"""Suffixes of files that are left out of logs.tar.gz."""
FIXED = (
    "PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 WANDB_MODE=disabled RAY_USAGE_STATS_ENABLED=0 RAY_memory_monitor_refresh_ms=0"
)
"""Environment of every stage."""
MEMORY_ERRORS = ("MemoryError", "OutOfMemoryError")
KILLED = -9
HEAD = "| stage | result | seconds | of | what came out | card afterwards |\n|---|---|---|---|---|---|\n"


def main(arguments: Sequence[str] | None = None) -> int:
    rows = (f"  {name:9} {each.seconds:4} s, call {each.call}: {each.what}" for name, each in STAGES.items())
    listed, form = "Stages, in this order:\n" + "\n".join(rows), argparse.RawDescriptionHelpFormatter
    command_line = argparse.ArgumentParser("gpu_first_hour", description=listed, formatter_class=form)
    option = command_line.add_argument
    option("words", nargs="*", metavar="STAGE or key=value", help="stages (all); settings of the stages at full size")
    option("--call", type=int, choices=sorted({each.call for each in STAGES.values()}), help="the stages of one call")
    option("--limit", type=float, metavar="SECONDS", help=f"of all stages (with --call {CALL_SECONDS}, else none)")
    option("--scale", type=float, default=1.0, metavar="X", help="of the stages' own limits, on a slow machine")
    option("--out", type=Path, default=Path("outputs/gpu_first_hour"), metavar="FOLDER", help="for the results")
    scratch = Path(tempfile.gettempdir()) / "gpu_first_hour"
    option("--work", type=Path, default=scratch, metavar="FOLDER", help="for models, runs and logs; kept")
    given = command_line.parse_intermixed_args(arguments)
    settings = [word for word in given.words if "=" in word]
    names = [word for word in given.words if "=" not in word]
    if unknown := [name for name in names if name not in STAGES]:
        sys.stderr.write(f"gpu_first_hour: {unknown_name('a stage', unknown[0], STAGES)}\n")
        return 2
    chosen = {
        name: replace(stage, seconds=round(stage.seconds * given.scale))
        for name, stage in STAGES.items()
        if name in (names or STAGES) and given.call in (None, stage.call)
    }
    limit = given.limit or (float(CALL_SECONDS) if given.call else float("inf"))
    return run_stages(chosen, given.out, given.work, limit, settings)


def run_stages(stages: Mapping[str, Stage], out: Path, work: Path, limit: float, words: Sequence[str] = ()) -> int:
    """Runs the stages within `limit` seconds, and writes the results after each and after those beside it.

    Returns 1 if a stage was not ok, else 0.
    """
    out, work = out.resolve(), work.resolve()
    (work / "logs").mkdir(parents=True, exist_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + limit
    mark = f"GPU_FIRST_HOUR_{secrets.token_hex(8)}"
    environment = {**environment_of(work), mark: "1"}
    results: dict[str, dict[str, Any]] = {}
    for names in together(stages):

        def begin(name: str) -> dict[str, Any]:
            most = min(float(stages[name].seconds), until - time.monotonic() - 2 * GRACE_SECONDS)
            return run_stage(name, stages[name], most, work, environment, words)

        with ThreadPoolExecutor(len(names)) as pool:
            begun = {pool.submit(begin, name): name for name in names}
            try:
                for each in as_completed(begun):
                    results[begun[each]] = each.result()
                    write(results, out, work)
            except BaseException:  # Ctrl-C reaches neither the threads nor what the stages have started
                end_marked(mark)
                raise
        results |= {name: results.pop(name) | {"card": cards()} for name in names}
        write(results, out, work)
        for name in names:
            print(line(name, results[name]), flush=True)
    return int(any(result["result"] != "ok" for result in results.values()))


def together(stages: Mapping[str, Stage]) -> list[list[str]]:
    """Returns the names of the stages in groups that begin at once; a group waits for the one before it."""
    groups: list[list[str]] = []
    for name, stage in stages.items():
        if groups and stage.beside in groups[-1]:
            groups[-1].append(name)
        else:
            groups.append([name])
    return groups


def environment_of(work: Path) -> dict[str, str]:
    """Returns the environment of the stages: no hub, caches in `work`, and Ray counts a card that it may not see.

    Where Ray is missing, the packed packages are unpacked first.
    """
    site, here = work / "site", os.environ
    paths = [str(ROOT), *filter(None, [here.get("PYTHONPATH")])]
    program = here.get("PATH", "")
    if importlib.util.find_spec("ray") is None and SITE.exists():
        if not (site / "unpacked").exists():
            with tarfile.open(SITE) as archive:
                archive.extractall(site, filter="tar")
            (site / "unpacked").touch()
        paths, program = [str(site), *paths], f"{site / 'bin'}{os.pathsep}{program}"
    card = {"RAY_OVERRIDE_RESOURCES": json.dumps({"GPU": len(cards())})} if cards() else {}
    own = {"PYTHONPATH": os.pathsep.join(paths), "PATH": program, "ASYNC_FLOWRL_CACHE": str(work / "cache")}
    return {**card, **here, **own, **dict(each.split("=") for each in FIXED.split())}


def cards() -> list[str]:
    """Returns memory, temperature, power and clock of every card as nvidia-smi tells them; empty without it."""
    if (program := shutil.which("nvidia-smi")) is None:
        return []
    query = "--query-gpu=memory.used,temperature.gpu,power.draw,clocks.sm"
    with suppress(subprocess.TimeoutExpired):
        said = subprocess.run([program, query, "--format=csv,noheader"], capture_output=True, text=True, timeout=60)
        return said.stdout.splitlines() if said.returncode == 0 else []
    return []


def run_stage(
    name: str, stage: Stage, most: float, work: Path, environment: Mapping[str, str], words: Sequence[str]
) -> dict[str, Any]:
    """Runs one stage for at most `most` seconds; returns its result and its lines."""
    if most < LEAST_SECONDS:
        return {"result": "skipped: no time was left", "seconds": 0.0, "limit": max(most, 0.0), "lines": [], "card": []}
    answer, log = work / f"{name}.json", work / "logs" / f"{name}.log"
    answer.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.gpu_first_hour.task", stage.place, str(answer), str(work)]
    began = time.monotonic()
    code, left_over = run_within([*command, str(most), *words], most, log, environment, ROOT)
    lines = json.loads(answer.read_text()) if answer.exists() else []
    failed = [each["what"] for each in lines if each.get("ok") is False]
    kinds = {each.get("kind") for each in lines}
    if code is None:
        result = f"hangs: not done within {most:.0f} s"
    elif kinds.intersection(MEMORY_ERRORS) or code == KILLED:
        result = "out of memory" if code != KILLED else "killed (SIGKILL), as Linux does where memory is short"
    elif code != 0:
        result = f"failed: {', '.join(failed) or f'exit code {code}'}"
    else:
        result = "ok" if lines else "failed: it said nothing"
    seconds = round(time.monotonic() - began, 1)
    told = {"result": result, "seconds": seconds, "limit": most, "lines": lines, "card": []}
    return told | ({"left_over": left_over} if left_over and code is not None else {})


def line(name: str, result: Mapping[str, Any]) -> str:
    """Returns the result as a row in Markdown: verdicts that are not ok first, then errors and measurements."""
    said = sorted(result["lines"], key=lambda each: each.get("ok") is not False)
    shown = "; ".join(f"{each['what']} {short({key: each[key] for key in each if key != 'what'})}" for each in said)
    left = f"; left over: {', '.join(result['left_over'])}" if "left_over" in result else ""
    cells = (name, result["result"], f"{result['seconds']:.0f}", f"{result['limit']:.0f}", shown + left)
    return "| " + " | ".join(cell.replace("|", "/") for cell in (*cells, "; ".join(result["card"]))) + " |"


def short(value: Any) -> str:
    """Returns a value as a row shows it, with three digits."""
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, dict):
        return "(" + ", ".join(f"{key} {short(each)}" for key, each in value.items()) + ")"
    return str(value)[:200].replace("\n", " ")


def write(results: Mapping[str, Mapping[str, Any]], out: Path, work: Path) -> None:
    """Writes stages.json, stages.md and logs.tar.gz: all logs, and of runs everything but weights and images."""
    (out / "stages.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    rows = "\n".join(line(name, result) for name, result in results.items())
    (out / "stages.md").write_text(HEAD + rows + "\n", encoding="utf-8")
    with tarfile.open(out / "logs.tar.gz", "w:gz") as archive:
        for folder in ("logs", "runs"):
            if (work / folder).exists():
                archive.add(work / folder, folder, filter=lambda each: None if each.name.endswith(HEAVY) else each)


if __name__ == "__main__":
    sys.exit(main())
