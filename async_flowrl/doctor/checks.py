"""The checks in their order, and one of them in a process of its own: `python -m async_flowrl.doctor.checks`.

A check is a function of the setting and of the seconds it has; it yields findings. A process of its own means that
what crashes, hangs or fills a device ends one check and no other, and what was found before counts.
"""

import faulthandler
import json
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from pkgutil import resolve_name

from async_flowrl.config import exit_codes
from async_flowrl.doctor.findings import FAILED, SKIPPED, Finding, as_finding
from async_flowrl.doctor.processes import GRACE_SECONDS, run_within
from async_flowrl.doctor.setting import Setting

RESERVE_SECONDS = 3 * GRACE_SECONDS
"""Of a check's limit, so that what it starts is over before it is itself."""


@dataclass(frozen=True)
class Check:
    """`place`: `module:function`; `seconds`: its limit where all of them have 15 minutes, and with `--quick`."""

    place: str
    what: str
    seconds: float
    quick_seconds: float

    def limit(self, *, quick: bool, left: float, scale: float = 1.0) -> float:
        """Seconds it may take where so many are left of the whole, which is `scale` times 15 minutes."""
        return min(scale * (self.quick_seconds if quick else self.seconds), left)


CHECKS = {
    "machine": Check("async_flowrl.doctor.machine:check", "versions and devices", 60.0, 30.0),
    "determinism": Check("async_flowrl.doctor.determinism:check", "the same work, the same bits", 150.0, 60.0),
    "transports": Check("async_flowrl.doctor.transports:check", "delivery of an adapter", 240.0, 90.0),
    "pools": Check("async_flowrl.doctor.pools:check", "memory and speed of both pools", 240.0, 60.0),
    "runs": Check("async_flowrl.doctor.runs:check", "the whole program", 420.0, 120.0),
    "tests": Check("async_flowrl.doctor.gpu_tests:check", "tests/gpu of a checkout", math.inf, 30.0),
}


def supervise(name: str, setting: Setting, left: float, scale: float = 1.0) -> list[Finding]:
    """One check in a process of its own; a finding that says so where it ended without an answer.

    `left`: seconds that remain of all checks together; `scale`: of a slow machine, whose checks have more than usual.
    """
    check = CHECKS[name]
    limit = check.limit(quick=setting.quick, left=left, scale=scale)
    if limit <= RESERVE_SECONDS:
        return [Finding(name, SKIPPED, "--minutes were used up before", f"run `doctor --gpu --only {name}`")]
    folder = setting.folder("checks")
    told, answer = folder / "setting.json", folder / f"{name}.json"
    setting.write(told)
    command = [sys.executable, "-m", "async_flowrl.doctor.checks", check.place, str(told), str(answer), str(limit)]
    log = Path(setting.logs) / f"{name}.log"
    ended = run_within(command, limit, log, environment=setting.environment())
    said = answer.read_text(encoding="utf-8").splitlines() if answer.is_file() else []
    findings = [as_finding(json.loads(line)) for line in said]
    if ended.code is None:
        findings.append(Finding(name, FAILED, f"not done within {limit:.0f} s", f"see {log.name} for where it was"))
    elif ended.code != 0:
        sentence = f"exit code {ended.code}: {ended.last_words()}"
        findings.append(Finding(name, FAILED, sentence, f"see {log.name}"))
    return findings


def main(arguments: Sequence[str] | None = None) -> int:
    """What `supervise` starts: PLACE SETTING ANSWER SECONDS. Errors propagate into the log.

    When the time is over SIGTERM comes, and the log says where every thread was.
    """
    faulthandler.register(signal.SIGTERM, all_threads=True, chain=True)
    place, told, answer, seconds = sys.argv[1:] if arguments is None else arguments
    until = time.monotonic() + float(seconds) - RESERVE_SECONDS
    check: Callable[[Setting, float], Iterator[Finding]] = resolve_name(place)
    with Path(answer).open("w", encoding="utf-8") as out:
        for finding in check(Setting.read(Path(told)), until - time.monotonic()):
            out.write(json.dumps(asdict(finding)) + "\n")
            out.flush()
    return exit_codes.OK


if __name__ == "__main__":
    sys.exit(main())
