"""Checks that tests of the doctor start in place of the real ones."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from async_flowrl.doctor.findings import OK, Finding
from async_flowrl.doctor.setting import Setting

GRANDCHILD = "import time; time.sleep(600)"


def sound(setting: Setting, seconds: float) -> Iterator[Finding]:
    yield Finding("first", OK, "said at once", figures={"seconds": seconds})
    yield Finding("second", OK, "said then")


def raises(setting: Setting, seconds: float) -> Iterator[Finding]:
    yield Finding("before", OK, "was found")
    raise RuntimeError("no kernel image is available")


def hangs(setting: Setting, seconds: float) -> Iterator[Finding]:
    """Starts a process in a session of its own first, whose id it leaves behind."""
    child = subprocess.Popen([sys.executable, "-c", GRANDCHILD], start_new_session=True)
    (Path(setting.work) / "grandchild").write_text(str(child.pid))
    yield Finding("before", OK, "was found")
    time.sleep(600)
