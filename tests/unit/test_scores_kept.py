"""Tests of scores that an attempt leaves to the next: a reward that would answer differently is not asked again."""

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from async_flowrl.cli.verify import verify
from async_flowrl.config.schema import RewardTerm
from async_flowrl.types import Prompt, Scores
from tests.chaos.recovery_schedules import STEPS
from tests.support.toy_pool import no_fault
from tests.support.toy_recovery import Groups, Outside, at, logged, rollbacks, summary
from tests.support.toy_reward import ToyReward
from tests.unit.recovery_runs import go

JUDGED = {"reward__terms": {"color": RewardTerm(name="tests.unit.rewards.own_rewards:Judge")}}
"""A reward that says that it is not deterministic (the toy pool scores in its place)."""


def moody(monkeypatch: pytest.MonkeyPatch) -> Counter[bytes]:
    """How often each group of images was scored. Only the first time the score is what the images deserve.

    One prompt of five gets none the first time, and one later.
    """
    asked: Counter[bytes] = Counter()
    score = ToyReward.score

    def spoilt(self: ToyReward, terms: Any, prompt: Prompt, *images: Any) -> Scores:
        asked[key := b"".join(image.tobytes() for image in images)] += 1
        if prompt.index == 2 and asked[key] == 1:
            raise ConnectionError("the judge is away")
        total = tuple(x + 40.0 * i * (asked[key] - 1) for i, x in enumerate(score(self, terms, prompt, *images).total))
        return Scores(total, {"color": total})

    monkeypatch.setattr(ToyReward, "score", spoilt)
    return asked


def scored(root: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (root / "scores.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("killed", ["controller", "trainer", "both"])
def test_groups_are_not_scored_a_second_time_if_that_would_change_their_scores(
    killed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = JUDGED | {"reward__on_error": "skip", "reward__retries": 0, "save__every": 4}
    asked = moody(monkeypatch)
    assert go(tmp_path / "calm", **settings) is None
    asked.clear()
    root = tmp_path / "run"
    dead_trainer = at(add_up_3="kill") if killed != "controller" else no_fault
    known: list[dict[str, Any]] = []

    async def kill_in_step_3(outside: Outside, groups: Groups) -> None:
        while not (root / "scores.jsonl").exists() or scored(root)[-1]["step"] < 4:  # noqa: ASYNC110
            await asyncio.sleep(0.37)
        outside.kill()

    if killed != "trainer":
        left = go(root, dead_trainer, disturb=kill_in_step_3, **settings)
        assert left is not None
        root, known = left, scored(left)
        with (root / "scores.jsonl").open("a") as file:
            file.write('{"step": 5, "gro')
    assert go(root, no_fault if known else dead_trainer, **settings) is None
    assert summary(root)["weights_digest"] == summary(tmp_path / "calm")["weights_digest"]
    assert logged(root) == logged(tmp_path / "calm")
    lines = scored(root)
    assert lines[: len(known)] == known
    assert Counter(line["step"] for line in lines) == dict.fromkeys(range(STEPS), 4)
    assert {line["total"] is None for line in lines} == {True, False}
    assert len(rollbacks(root)) == (2 if killed == "both" else 1)
    assert not known or [line for line in known if line["step"] >= rollbacks(root)[-1]], "nothing was there to reuse"
    assert set(asked.values()) == {1}
    assert [row for row in verify(root) if not row[1]] == []


def test_a_checkpoint_of_another_run_comes_without_its_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = moody(monkeypatch)
    settings = JUDGED | {"reward__on_error": "skip", "save__keep": 9}
    assert go(tmp_path / "other", **settings) is None
    asked.clear()
    assert go(tmp_path / "run", resume=str(tmp_path / "other" / "checkpoints" / "step_4"), **settings) is None
    assert Counter(line["step"] for line in scored(tmp_path / "run")) == {4: 4, 5: 4}
    assert len(asked) == 2 * 4 + 2, "two steps, and the prompts of the last evaluation"
