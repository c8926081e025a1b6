"""`chromium` finds the browser for tests of web pages."""

import shutil
import subprocess
from functools import cache

NAMES = ("chromium", "chromium-browser", "google-chrome")
NONE = "no Chromium that starts on this machine: apt-get install chromium"


@cache
def chromium() -> str | None:
    """Returns the path of a Chromium that starts; None without one, also if Ubuntu's placeholder asks for snap."""
    return next((path for path in map(shutil.which, NAMES) if path is not None and starts(path)), None)


def starts(path: str) -> bool:
    try:
        return subprocess.run([path, "--version"], capture_output=True, timeout=120, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
