"""Tests of scores.jsonl: scores that are read back equal those written, to the last bit."""

import asyncio
from pathlib import Path

from async_flowrl.controller.score_log import ScoreLog
from async_flowrl.tickets.ticket import TRAIN, Ticket
from async_flowrl.types import Scores

SCORES = Scores((0.1 + 0.2, -1e-308), {"judge": (1 / 3, 5e-324), "color": (2.0**60 + 256, -0.0)})


def group(step: int, index: int, digest: str = "abc") -> list[Ticket]:
    return [Ticket(TRAIN, 0, step, index, slice_index, 0, digest=digest) for slice_index in range(2)]


def written(path: Path) -> ScoreLog:
    log = ScoreLog(path, first_step=0)
    for step, index, scores in ((3, 0, SCORES), (4, 1, SCORES), (4, 2, None)):
        asyncio.run(log.append(group(step, index), scores, step=3))
    return log


def test_scores_are_read_as_they_were_written(tmp_path: Path) -> None:
    written(tmp_path / "scores.jsonl")
    log = ScoreLog(tmp_path / "scores.jsonl", first_step=0)
    assert log[group(4, 1)] == SCORES and log[group(4, 2)] is None
    assert repr(log[group(3, 0)]) == repr(SCORES)


def test_only_groups_with_the_same_images_are_known(tmp_path: Path) -> None:
    written(tmp_path / "scores.jsonl")
    log = ScoreLog(tmp_path / "scores.jsonl", first_step=4)
    assert group(4, 1) in log
    for other in (group(4, 1, "other weights"), group(4, 3), group(3, 0)):
        assert other not in log


def test_a_line_that_a_killed_process_left_unfinished_counts_as_none(tmp_path: Path) -> None:
    path = tmp_path / "scores.jsonl"
    written(path)
    path.write_bytes(path.read_bytes()[:-4])
    log = ScoreLog(path, first_step=0)
    assert group(4, 1) in log and group(4, 2) not in log
    asyncio.run(log.append(group(4, 2), SCORES, step=3))
    assert ScoreLog(path, first_step=0)[group(4, 2)] == SCORES


def test_steps_that_are_trained_are_forgotten_and_stay_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "scores.jsonl"
    log = written(path)
    asyncio.run(log.append(group(5, 0), SCORES, step=4))
    assert group(3, 0) not in log and group(4, 1) in log
    assert group(3, 0) in ScoreLog(path, first_step=0)
