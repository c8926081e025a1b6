"""ScoreLog keeps the scores of training groups in scores.jsonl, so that no group is scored twice after a resume.

A run writes it if a reward may give another result when it is asked again (`keeps_scores` in rewards/registry.py). Each
line is one group: `step`, `group`, `digest` of the weights that made the images, `total` and `by_term` as in `Scores`
(null for a group that `reward.on_error` skipped), and maybe `extras` and `failed` (optional term → why it has no
score).
"""

import asyncio
import json
from pathlib import Path
from typing import Any

from async_flowrl.observability.events import cut_unfinished_line, forget_steps, read_events
from async_flowrl.tickets.table import Ticket
from async_flowrl.training.checkpoint import sync
from async_flowrl.types import Failure, Scores

# Step, group, and digest of the weights. Equal keys mean equal images, except for roundings that a resume warns of.
Key = tuple[int, int, str | None]


class ScoreLog:
    """Scores of training groups in memory and in the file, by `group in log` and `log[group]`; None: a skipped group.

    A group is the list of its tickets; its key is that of the first.
    """

    def __init__(self, path: Path, *, first_step: int) -> None:
        """Reads the groups of `first_step` and later, and cuts an unfinished last line (of a killed process) off."""
        self.path = path
        cut_unfinished_line(path)
        lines = read_events(path) if path.exists() else ()
        self._scores: dict[Key, Scores | None] = {
            (line["step"], line["group"], line["digest"]): _scores(line) for line in lines if line["step"] >= first_step
        }

    def __contains__(self, group: list[Ticket]) -> bool:
        return _key(group) in self._scores

    def __getitem__(self, group: list[Ticket]) -> Scores | None:
        return self._scores[_key(group)]

    async def append(self, group: list[Ticket], scores: Scores | None, *, step: int) -> None:
        """Appends one line; returns when it is synced to disk. Groups before the current `step` leave the memory."""
        self._scores = {key: of_group for key, of_group in self._scores.items() if key[0] >= step} | {
            _key(group): scores
        }
        names = dict(zip(("step", "group", "digest"), _key(group), strict=True))
        line: dict[str, Any] = names | {"total": scores and scores.total, "by_term": scores and dict(scores.by_term)}
        if scores is not None and scores.extras:
            line["extras"] = {term: dict(extras) for term, extras in scores.extras.items()}
        if scores is not None and scores.failed:
            line["failed"] = {term: failure.reason for term, failure in scores.failed.items()}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")
        await asyncio.to_thread(sync, self.path)


def forget_scores(path: Path, *, step: int) -> None:
    """Removes the groups of `step` and later from the file, after a resume=force that may change images or rewards."""
    cut_unfinished_line(path)
    if path.exists():
        forget_steps(path, step)


def _key(group: list[Ticket]) -> Key:
    return group[0].step, group[0].group, group[0].digest


def _scores(line: dict[str, Any]) -> Scores | None:
    if line["total"] is None:
        return None
    extras = {term: _tuples(extras) for term, extras in line.get("extras", {}).items()}
    failed = {term: Failure(reason) for term, reason in line.get("failed", {}).items()}
    return Scores(tuple(line["total"]), _tuples(line["by_term"]), extras=extras, failed=failed)


def _tuples(lists: dict[str, list[Any]]) -> dict[str, tuple[Any, ...]]:
    return {name: tuple(values) for name, values in lists.items()}
