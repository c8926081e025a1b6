"""Check `tests`: runs `pytest -m gpu tests/gpu` if the package is imported from a checkout of the repository."""

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import async_flowrl
from async_flowrl.doctor.findings import FAILED, OK, SKIPPED, Finding
from async_flowrl.doctor.processes import run_within
from async_flowrl.doctor.setting import Setting

NOT_HERE = ("tests/gpu/test_doctor.py",)
"""Tests of the doctor itself, which would start a second doctor."""
MIN_TEST_SECONDS = 10.0
"""Smallest time limit of the tests."""


def check(setting: Setting, seconds: float) -> Iterator[Finding]:
    """Yields one finding: how many tests passed, or the last line of pytest."""
    yield tested(setting, seconds)


def tested(setting: Setting, seconds: float) -> Finding:
    """Runs the tests and returns the finding; skipped with `--quick`, without a checkout, or without pytest."""
    name, root = "tests", checkout()
    if setting.quick:
        return Finding(name, SKIPPED, "left out by --quick", "run `make test-gpu`")
    if root is None or importlib.util.find_spec("pytest") is None:
        return Finding(name, SKIPPED, "no checkout with tests/gpu, or no pytest", "run this from a clone")
    marked = "gpu and not real_gpu" if setting.pretended else "gpu"
    command = [sys.executable, "-m", "pytest", "-q", "-m", marked, "tests/gpu", "-p", "no:cacheprovider"]
    command += [word for test in NOT_HERE for word in ("--ignore", test)]
    log = Path(setting.logs) / "tests.log"
    ended = run_within(command, max(seconds, MIN_TEST_SECONDS), log, environment=setting.environment(), cwd=root)
    if ended.code is None:
        return Finding(name, FAILED, f"not done within {seconds:.0f} s", f"run `make test-gpu`; see {log.name}")
    sentence = re.sub(r"^=+ | =+$", "", ended.last_words())
    if ended.code != 0:
        return Finding(name, FAILED, sentence, f"see {log.name}")
    return Finding(name, OK, sentence)


def checkout() -> Path | None:
    """Returns the root of the checkout from which this package is imported; None for an installed wheel."""
    root = Path(async_flowrl.__file__).parents[1]
    return root if (root / "tests" / "gpu").is_dir() else None
