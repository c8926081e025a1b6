"""The browser of the tests of pages: Chromium where it is installed and starts."""

import shutil
import subprocess
from functools import cache

NAMES = ("chromium", "chromium-browser", "google-chrome")
NONE = "no Chromium that starts on this machine: apt-get install chromium"


@cache
def chromium() -> str | None:
    """Its path; None where there is none, or only a stand-in that asks for another package (Ubuntu's, without snap)."""
    return next((path for path in map(shutil.which, NAMES) if path is not None and starts(path)), None)


def starts(path: str) -> bool:
    try:
        return subprocess.run([path, "--version"], capture_output=True, timeout=120, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
