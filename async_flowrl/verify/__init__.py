"""Check of a finished run from its files alone: events.jsonl, metrics.jsonl, summary.json and the newest checkpoint.

python -m async_flowrl.verify RUN_DIR

Nothing that the run's configuration names is imported. A number that the run has written is not trusted if it can be
computed here.
"""

from async_flowrl.verify.checks import verify
from async_flowrl.verify.command import main
from async_flowrl.verify.files import RunFiles
from async_flowrl.verify.history import exactly_once

__all__ = ["RunFiles", "exactly_once", "main", "verify"]
