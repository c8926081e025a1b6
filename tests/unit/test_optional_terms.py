"""Tests of terms with `required: false`: a group without such a score is trained on the others, also after a resume."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from async_flowrl.algorithms.registry import build_algorithm
from async_flowrl.cli.verify import verify
from async_flowrl.config.schema import RewardTerm
from async_flowrl.controller.training_groups import group_advantages
from async_flowrl.rewards.base import RewardError
from async_flowrl.types import Failure, Prompt, Scores
from tests.support.toy import ToyRun, toy_config, virtual
from tests.support.toy_pool import World
from tests.support.toy_recovery import at, logged, rollbacks, run_controller, summary
from tests.support.toy_reward import ToyReward

STEPS, UNLUCKY = 6, 2
"""The prompt that the optional term cannot score."""


def terms(*, required: bool = False) -> dict[str, RewardTerm]:
    return {"color": RewardTerm(), "judge": RewardTerm(weight=0.5, name="color", required=required)}


def toy_judge(monkeypatch: pytest.MonkeyPatch, *, fails: bool, once: bool = False) -> Counter[bytes]:
    """`judge` sees the square of what color sees; of the unlucky prompt it fails, or says 0. Returns what was asked.

    With `once` it fails the first time that it is asked of some images, and never again.
    """
    score, asked = ToyReward.score, Counter[bytes]()

    def judged(self: ToyReward, only: Any, prompt: Prompt, *images: Any) -> Scores:
        asked[key := b"".join(image.tobytes() for image in images)] += 1
        colors = score(self, ("color",), prompt, *images).by_term["color"]
        squares = tuple(color**2 / 100 for color in colors)
        by_term, failed = {"color": colors, "judge": squares}, {}
        if prompt.index == UNLUCKY and fails and not (once and asked[key] > 1):
            failed = {"judge": Failure("the judge is away")}
            del by_term["judge"]
        elif prompt.index == UNLUCKY and not fails:
            by_term["judge"] = (0.0,) * len(colors)
        by_term = {name: values for name, values in by_term.items() if name in only}
        total = tuple(sum(self.terms[name].weight * by_term[name][i] for name in by_term) for i in range(len(colors)))
        return Scores(total, by_term, failed=failed)

    monkeypatch.setattr(ToyReward, "score", judged)
    return asked


def run(*, required: bool = False, **settings: Any) -> ToyRun:
    settings = {"reward__retries": 1, "steps": STEPS} | settings
    return virtual(toy_config(1, reward__terms=terms(required=required), **settings))


@pytest.mark.parametrize("combine", ["sum", "per_reward"])
def test_the_group_is_trained_on_the_other_terms(combine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A term that says the same of all images of a group adds nothing to it, so the weights are those of that run."""
    with monkeypatch.context() as patch:
        toy_judge(patch, fails=False)
        referee = run(algorithm__combine=combine)
    toy_judge(monkeypatch, fails=True)
    found = run(algorithm__combine=combine)
    assert found.digest == referee.digest
    unscored = found.observer.of("unscored")
    assert unscored and not found.observer.of("skipped")
    assert {(event["term"], event["message"]) for event in unscored} == {("judge", "the judge is away")}
    assert sum(line.get("reward/judge/missing", 0) for line in found.lines) == len(unscored)
    for kind in ("retries", "failures"):
        assert sum(line.get(f"reward/judge/{kind}", 0) for line in found.lines) == len(unscored)


def test_a_required_term_that_fails_ends_the_run_or_skips_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    toy_judge(monkeypatch, fails=True)
    with pytest.raises(RewardError, match="the judge is away"):
        run(required=True)
    found = run(required=True, reward__on_error="skip")
    skipped = found.observer.of("skipped")
    assert skipped and not found.observer.of("unscored")
    assert sum(line.get("reward/judge/failures", 0) for line in found.lines) == len(skipped)


@pytest.mark.parametrize("combine", ["sum", "per_reward"])
def test_a_resume_trains_a_group_without_the_term_that_it_lacked(
    combine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The judge would answer the second time, and other weights would come of it."""
    settings = {"resume": "auto", "monitor__progress": False, "save__every": 4, "reward__retries": 0}
    config = toy_config(1, steps=STEPS, reward__terms=terms(), algorithm__combine=combine, **settings)

    def go(root: Path, fault: Any) -> None:
        assert run_controller(config, root, World(fault=fault)) is None

    asked = toy_judge(monkeypatch, fails=True, once=True)
    go(tmp_path / "calm", lambda *call: None)
    asked.clear()
    go(tmp_path / "run", at(add_up_4="kill"))
    assert rollbacks(tmp_path / "run")
    assert summary(tmp_path / "run")["weights_digest"] == summary(tmp_path / "calm")["weights_digest"]
    assert logged(tmp_path / "run") == logged(tmp_path / "calm")
    for root in (tmp_path / "calm", tmp_path / "run"):
        assert all(sound for _, sound, _ in verify(root))
        lines = [json.loads(line) for line in (root / "scores.jsonl").read_text().splitlines()]
        assert any("failed" in line for line in lines)


def scores(failed: bool, *values: float) -> Scores:
    color = tuple(float(value) for value in values)
    by_term = {"color": color} | ({} if failed else {"judge": tuple(value**2 for value in color)})
    return Scores(color, by_term, failed={"judge": Failure("away")} if failed else {})


@pytest.mark.parametrize("permute", [False, True])
def test_a_group_has_no_part_in_the_statistics_of_a_term_that_it_lacks(permute: bool) -> None:
    settings = {"algorithm__combine": "per_reward", "algorithm__global_std": True}
    config = toy_config(0, reward__terms=terms(), algorithm__permute_advantages=permute, **settings)
    groups = [scores(False, 1, 2, 4, 4), scores(True, 1, 3, 5, 9), scores(False, 0, 1, 1, 7)]
    found = group_advantages(build_algorithm(config), config, groups, seeds=[1, 2, 3])
    colors = [np.array(each.by_term["color"]) for each in groups]
    judged = [colors[0] ** 2, colors[2] ** 2]
    wanted = [(color - color.mean()) / (np.std(np.concatenate(colors)) + 1e-4) for color in colors]
    for place, values in zip((0, 2), judged, strict=True):
        wanted[place] = wanted[place] + 0.5 * (values - values.mean()) / (np.std(np.concatenate(judged)) + 1e-4)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(sorted(one) if permute else one, sorted(other) if permute else other, rtol=1e-12)
