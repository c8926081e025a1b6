"""scores.jsonl: scores that another call may not give again, so that no group is scored twice after a resume.

A resume or a recovery makes the images of the steps after its checkpoint again, bit for bit; a reward that is not
deterministic would score them differently, and an optional term may fail for another group. One JSON line per training
group: `step`, `group`, `digest` of the weights that made its images, and `total` and `by_term` as in `Scores` (JSON
keeps float64 exactly), both null for a group that `reward.on_error` skipped; `extras`, and `failed` with the reason of
every optional term that has no score, where there are any.
"""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

from async_flowrl.observability.events import cut_unfinished_line, read_events
from async_flowrl.tickets.ticket import Ticket
from async_flowrl.types import Failure, Scores

Key = tuple[int, int, str | None]
"""Step, group, and digest of the weights. Equal keys mean equal images, but for roundings that a resume warns of."""


class ScoreLog:
    """Scores by group; None is a group that was skipped. Evaluations have no part in it."""

    def __init__(self, path: Path, *, first_step: int) -> None:
        """Reads the groups of `first_step` and later; a line that a killed process left unfinished is cut off."""
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
        """Returns when the line is synced to disk. Groups before `step`, the one that is trained now, are forgotten."""
        self._scores = {key: known for key, known in self._scores.items() if key[0] >= step} | {_key(group): scores}
        names = dict(zip(("step", "group", "digest"), _key(group), strict=True))
        line: dict[str, Any] = names | {"total": scores and scores.total, "by_term": scores and dict(scores.by_term)}
        if scores is not None and scores.extras:
            line["extras"] = {term: dict(extras) for term, extras in scores.extras.items()}
        if scores is not None and scores.failed:
            line["failed"] = {term: failure.reason for term, failure in scores.failed.items()}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")
        await asyncio.to_thread(_sync, self.path)


def forget_scores(path: Path, *, step: int) -> None:
    """Takes the groups of `step` and later out of the file: resume=force may give them other images, though their keys
    are the same, or another reward."""
    cut_unfinished_line(path)
    if path.exists():
        kept = [line for line in read_events(path) if line["step"] < step]
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(line, allow_nan=False) + "\n" for line in kept), encoding="utf-8")
        _sync(temporary)
        temporary.replace(path)


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


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file)
