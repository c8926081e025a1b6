"""Checks of the nodes of a cluster: the same code, the same files, and a folder for Ray's sockets.

ray_pool.py compares the code before it builds a worker; the doctor (async_flowrl/cli/doctor.py) makes all checks.
"""

import hashlib
import importlib.util
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

SIGHT_SECONDS = 10.0
"""Time after which a new file must be visible on another node; network file systems cache their directories."""
_POLL_SECONDS = 0.2


SOCKET_BYTES = 107
"""Longest path of a socket."""


def temporary_folder() -> str:
    """Returns the folder below which a cluster that is started here keeps its files and sockets, as Ray chooses it."""
    return os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"


def temporary_refusal() -> str | None:
    """Returns one sentence if Ray cannot have its sockets in `temporary_folder`; None if it can."""
    folder = temporary_folder()
    longest = f"{folder}/ray/session_2000-01-01_00-00-00_000000_{os.getpid()}/sockets/plasma_store"
    if folder.isascii() and len(longest) <= SOCKET_BYTES:
        return None
    variable = "RAY_TMPDIR" if os.environ.get("RAY_TMPDIR") else "TMPDIR"
    return (
        f"Ray keeps sockets in {variable}={folder!r}, whose name must be ASCII and have at most "
        f"{len(folder) + SOCKET_BYTES - len(longest)} characters: set RAY_TMPDIR to another folder, such as /tmp"
    )


class OtherCode(RuntimeError):
    """Raised if a node has another version of a package than the process that started the run."""


def code_of(packages: Sequence[str]) -> dict[str, str]:
    """Returns package → digest (12 hex digits) of the Python files that this process would import; `none` if none.

    The packages are not imported.
    """
    digests: dict[str, str] = {}
    for package in packages:
        spec = importlib.util.find_spec(package)
        folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
        digest = hashlib.sha256()
        files = {path.relative_to(folder).as_posix(): path for folder in folders for path in folder.rglob("*.py")}
        for name in sorted(files):
            digest.update(f"{name}\0".encode() + hashlib.sha256(files[name].read_bytes()).digest())
        digests[package] = digest.hexdigest()[:12] if files else "none"
    return digests


def compare_code(here: Mapping[str, str], there: Mapping[str, str], *, node: str, worker: str) -> None:
    """Raises OtherCode, which names the package and the node, if a digest of `here` is not the same in `there`.

    `here` comes from `code_of` in this process when the run started, `there` from `code_of` in `worker` on `node`. The
    message says whether the node differs or the code was edited since.
    """
    for package, digest in here.items():
        if there.get(package) != digest:
            if (now := code_of([package])[package]) != digest:
                raise OtherCode(
                    f"{package} was edited while the run goes on (its code is {now} here, and {digest} when the run "
                    f"started), so {worker} on node {node} would compute with other code than those before it: put it "
                    "back, or start again with resume=auto"
                )
            raise OtherCode(
                f"node {node} has another version of {package} than the node that this is started on (its code is "
                f"{there.get(package)}, here {digest}; asked by {worker}): install the same version on every node, or "
                "run it from a folder that all nodes see"
            )


def sees(path: str, text: str) -> bool:
    """Returns True as soon as the file at `path` has exactly this text; False if it has not after SIGHT_SECONDS."""
    end = time.monotonic() + SIGHT_SECONDS
    while True:
        try:
            if Path(path).read_text() == text:
                return True
        except OSError:
            pass
        if time.monotonic() > end:
            return False
        time.sleep(_POLL_SECONDS)
