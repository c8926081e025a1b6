"""Python environments of reward servers whose packages conflict with ours: one per node and list of requirements files.

They are kept in ~/.cache/async_flowrl/environments (or below XDG_CACHE_HOME). The folder's name has a hash of the
requirements, the Python version and the path of this package. `uv` makes the environment if it is installed, else
`venv` and `pip`. async_flowrl itself is linked into it, without its dependencies; a server that uses
`async_flowrl.serve_rewards.server` needs fastapi, uvicorn, python-multipart, pillow and numpy.
"""

import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import async_flowrl

logger = logging.getLogger(__name__)

PACKAGE = Path(async_flowrl.__file__).resolve().parent
COMPLETE = "complete"
"""Name of a file that marks a completely made environment."""
SHOWN_CHARACTERS = 800


def environment_for(requirements: Sequence[Path]) -> Path:
    """Returns the environment's folder, after making it if it is missing. A lock makes other processes wait meanwhile.

    The files, of which there is at least one, are installed one after the other. Raises ValueError, one sentence with
    the end of the installer's output, if the environment cannot be made.
    """
    wanted = [_content(file) for file in requirements]
    key = hashlib.sha256(b"\0".join([*wanted, sys.version.encode(), str(PACKAGE).encode()])).hexdigest()[:16]
    folder = cache() / f"{requirements[-1].parent.name}-{key}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / COMPLETE).exists():
            shutil.rmtree(folder, ignore_errors=True)
            _make(folder, requirements)
            (folder / COMPLETE).touch()
    return folder


def _content(requirements: Path) -> bytes:
    try:
        return requirements.read_bytes()
    except OSError as error:
        raise ValueError(f"the requirements {requirements} cannot be read on this node: {error.strerror}") from error


def cache() -> Path:
    """Returns the folder of all environments."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "async_flowrl" / "environments"


def variables(folder: Path | None) -> dict[str, str]:
    """Returns the variables of a program in the environment `folder`; None is this process's environment."""
    scripts = (folder / "bin") if folder is not None else Path(sys.executable).parent
    path = {"PATH": f"{scripts}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}
    if folder is None:
        return path
    return {**path, "VIRTUAL_ENV": str(folder), "PYTHONNOUSERSITE": "1"}


def _make(folder: Path, requirements: Sequence[Path]) -> None:
    logger.warning("making the environment of %s in %s, once on this node", requirements[-1], folder)
    python = str(folder / "bin" / "python")
    if uv := shutil.which("uv"):
        _run([uv, "venv", "--quiet", "--python", sys.executable, str(folder)], requirements[0])
        install = [uv, "pip", "install", "--quiet", "--python", python]
    else:
        _run([sys.executable, "-m", "venv", str(folder)], requirements[0])
        install = [python, "-m", "pip", "install", "--quiet"]
    for place, file in enumerate(requirements):
        _run([*install, *(["--no-build-isolation"] if place else []), "-r", str(file)], file)
    (site,) = folder.glob("lib/python*/site-packages")
    if not (site / PACKAGE.name).exists():
        (site / PACKAGE.name).symlink_to(PACKAGE)


def _run(command: list[str], requirements: Path) -> None:
    """Runs in the folder of the requirements file, which may name files beside it. Raises ValueError if it fails."""
    ran = subprocess.run(
        command, cwd=requirements.parent, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if ran.returncode:
        said = " ".join((ran.stderr or ran.stdout).split())[-SHOWN_CHARACTERS:]
        raise ValueError(f"the environment of {requirements} cannot be made: {' '.join(command[:4])} … said: {said}")
