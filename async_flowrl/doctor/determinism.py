"""Check `determinism`: the same work must give the same bits twice in one process and once in a second process."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from async_flowrl.doctor.findings import FAILED, OK, Finding
from async_flowrl.doctor.processes import run_within
from async_flowrl.doctor.setting import Setting

REFUSED = "refused"
ADVICE = (
    "runs will not repeat bit for bit here; try model.attention_backend=_native_math, and send the report with the "
    "name of the work that differs"
)
Digests = Mapping[str, Sequence[str]]
"""Name of the work to one digest per round, as digests.py writes it."""


def check(setting: Setting, seconds: float) -> Iterator[Finding]:
    """Runs the work with `deterministic=true`, as in runs; without `--quick` also without it, for information only."""
    ways: dict[str, tuple[str, ...]] = {"twice": ("--rounds=2", "--deterministic"), "beside": ("--deterministic",)}
    if not setting.quick:
        ways["free"] = ("--rounds=2",)
    with ThreadPoolExecutor(len(ways)) as pool:
        made = dict(zip(ways, pool.map(lambda way: run(setting, way, ways[way], seconds), ways), strict=True))
    yield from (result for result in made.values() if isinstance(result, Finding))
    digests = {way: result for way, result in made.items() if not isinstance(result, Finding)}
    if "twice" in digests and "beside" in digests:
        yield from judged(digests["twice"], digests["beside"])
    if "free" in digests:
        yield without(digests["free"])


def run(setting: Setting, way: str, options: Sequence[str], seconds: float) -> Digests | Finding:
    """Returns the digests that one process makes, or a finding if it fails."""
    folder = setting.folder("digests")
    told, out = folder / f"{way}_setting.json", folder / f"{way}.json"
    setting.write(told)
    command = [sys.executable, "-m", "async_flowrl.doctor.digests", str(told), str(out), *options]
    log = Path(setting.logs) / f"determinism_{way}.log"
    ended = run_within(command, seconds, log, environment=setting.environment())
    if ended.code != 0:
        why = f"no digests within {seconds:g} s" if ended.code is None else ended.last_words()
        return Finding(f"determinism, process {way}", FAILED, why, f"see {log.name}")
    digests: dict[str, list[str]] = json.loads(out.read_text(encoding="utf-8"))
    return digests


def judged(twice: Digests, beside: Digests) -> list[Finding]:
    """Returns one finding per kind of work: failed if the digests differ or torch has no deterministic kernel."""
    findings = []
    for work, digests in twice.items():
        everywhere = {*digests, *beside[work]}
        name, figures = f"determinism of {work}", {"digests": [*digests, *beside[work]]}
        if refused := sorted(each for each in everywhere if each.startswith(REFUSED)):
            findings.append(Finding(name, FAILED, refused[0], ADVICE, figures))
        elif len(set(digests)) > 1:
            findings.append(Finding(name, FAILED, "other bits the second time in one process", ADVICE, figures))
        elif len(everywhere) > 1:
            findings.append(Finding(name, FAILED, "other bits in another process", ADVICE, figures))
        else:
            findings.append(Finding(name, OK, "same bits twice, and in another process", figures=figures))
    return findings


def without(digests: Digests) -> Finding:
    """Says which work repeats without `deterministic=true`; never a failure."""
    differ = sorted(work for work, made in digests.items() if len(set(made)) > 1)
    name = "without deterministic=true"
    if not differ:
        return Finding(name, OK, "all of it repeats within a process all the same (for information)")
    return Finding(name, OK, f"does not repeat: {', '.join(differ)} (for information; runs have deterministic=true)")
