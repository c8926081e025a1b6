"""The list of checks that `verify` makes, in the order of its table."""

from collections.abc import Callable
from pathlib import Path

from async_flowrl.training.checkpoint_folder import DamagedCheckpoint
from async_flowrl.verify.files import Broken, RunFiles
from async_flowrl.verify.history import bound, exactly_once, inputs, reward_terms, version_chain
from async_flowrl.verify.weights import digests

CHECKS: dict[str, Callable[[RunFiles], str]] = {
    "bound": bound,
    "exactly once": exactly_once,
    "version chain": version_chain,
    "digests": digests,
    "inputs": inputs,
    "reward terms": reward_terms,
}


def verify(root: Path) -> list[tuple[str, bool, str]]:
    """Returns (check, True if it holds, finding) for every check. Raises as RunFiles.read does."""
    run = RunFiles.read(root)
    rows = []
    for name, check in CHECKS.items():
        try:
            rows.append((name, True, check(run)))
        except (Broken, DamagedCheckpoint) as error:
            rows.append((name, False, str(error)))
    return rows
