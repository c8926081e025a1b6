"""The checks of `--gpu` in order, and the process that runs one of them: `python -m async_flowrl.doctor.checks`.

A check is a function of the setting and the seconds it has; it yields findings. It runs in a process of its own, so a
crash, a hang or a full GPU ends only this check, and findings made before are kept.
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
"""Seconds subtracted from a check's limit, so that processes it started end before it does."""


@dataclass(frozen=True)
class Check:
    """One check. `place` is `module:function`; `what` is its description.

    `seconds` is its time limit when all checks have 15 minutes, `quick_seconds` the limit with `--quick`.
    """

    place: str
    what: str
    seconds: float
    quick_seconds: float

    def limit(self, *, quick: bool, left: float, scale: float = 1.0) -> float:
        """Returns the limit in seconds: the check's own times `scale` (--minutes / 15), but at most `left`."""
        return min(scale * (self.quick_seconds if quick else self.seconds), left)


CHECKS = {
    "machine": Check("async_flowrl.doctor.machine:check", "versions and devices", 60.0, 30.0),
    "determinism": Check("async_flowrl.doctor.determinism:check", "the same work, the same bits", 150.0, 60.0),
    "transports": Check("async_flowrl.doctor.transports:check", "delivery of an adapter", 240.0, 90.0),
    "pools": Check("async_flowrl.doctor.pools:check", "memory and speed of both pools", 240.0, 60.0),
    "runs": Check("async_flowrl.doctor.runs:check", "the whole program", 420.0, 120.0),
    "tests": Check("async_flowrl.doctor.gpu_tests:check", "tests/gpu of a checkout", math.inf, 30.0),
}
"""All checks by name, in the order in which they run."""


def supervise(name: str, setting: Setting, left: float, scale: float = 1.0) -> list[Finding]:
    """Runs one check in a process of its own and returns its findings; a crash or a timeout adds a failed finding.

    `left` is the seconds that remain for all checks; `scale` multiplies the check's own limit. Without enough time
    left, the only finding is a skipped one.
    """
    check = CHECKS[name]
    limit = check.limit(quick=setting.quick, left=left, scale=scale)
    if limit <= RESERVE_SECONDS:
        return [
            Finding(
                name, SKIPPED, f"--minutes leave it {max(limit, 0.0):.0f} s", f"`doctor --gpu --only {name}` has more"
            )
        ]
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
    """Runs one check in the process that `supervise` starts, with arguments PLACE SETTING ANSWER SECONDS.

    Errors go to the log. SIGTERM, sent when the time is over, writes the stack of every thread to the log.
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
