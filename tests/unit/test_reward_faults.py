"""Tests of a reward that dies, hangs, fails or answers nonsense: equal weights, a skipped group, or a named error."""

from typing import Any

import pytest

from async_flowrl.tickets.table import State
from async_flowrl.types import Prompt, Scores
from separation.group import WorkerDied, WorkerFailed
from separation.supervise import DeadlineExceeded
from tests.support.run_checks import STEPS
from tests.support.toy import toy_config, virtual
from tests.support.toy_pool import ListObserver, once
from tests.support.toy_reward import ToyReward, toy_scores
from tests.unit.faulty_runs import always, check_recovered, disturbed


@pytest.mark.parametrize("what", ["kill", "hang", "raise", "nan", "count"])
def test_a_reward_that_fails_once_is_asked_again(what: str) -> None:
    found = disturbed(once("reward-0", "score", 3, what))
    check_recovered(found)
    (fault,) = found.observer.of("fault")
    kinds = {"kill": "WorkerDied", "hang": "DeadlineExceeded"}
    assert fault["kind"] == kinds.get(what, "WorkerFailed")
    assert found.groups["reward"].replaced == (what in kinds)
    if what in ("nan", "count"):
        assert "RewardError" in fault["message"] and "must return 4 finite numbers" in fault["message"]


@pytest.mark.parametrize(
    ("what", "error", "text"),
    [
        ("raise", WorkerFailed, "raised RuntimeError: injected"),
        ("nan", WorkerFailed, "raised RewardError: reward 'color' on prompt 'prompt 0' must return 4 finite numbers"),
        ("count", WorkerFailed, r"raised RewardError: .*got shape \[3\]"),
        ("hang", DeadlineExceeded, "score: train ticket 0 .* was not done within its deadline of 30 s"),
        ("kill", WorkerDied, r"reward-0\.\d+ died: killed during score"),
    ],
)
def test_a_reward_that_always_fails_ends_the_run_by_name(what: str, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        disturbed(always("reward-0", "score", what), data__shuffle=False)


def test_retries_of_a_reward_back_off() -> None:
    observer = ListObserver()
    config = toy_config(1, steps=STEPS, reward__backoff=0.5, reward__retries=3)
    with pytest.raises(WorkerFailed):
        virtual(config, fault=always("reward-0", "score", "raise"), observer=observer)
    first: dict[str, list[float]] = {}
    for event in observer.of("injected"):
        first.setdefault(event["worker"], []).append(event["time"])
    times = [e["time"] for e in observer.of("fault")]
    assert len(times) >= 4
    own = [times[0], times[0] + 0.6, times[0] + 0.6 + 1.1, times[0] + 0.6 + 1.1 + 2.1]
    assert all(any(abs(t - o) < 0.11 for t in times) for o in own)


@pytest.mark.parametrize("hand_over", ["batch", "stream"])
@pytest.mark.parametrize("result", [[1.0, 2.0, 3.0, float("nan")], [1.0], None])
def test_groups_whose_reward_cannot_be_had_are_skipped_if_asked(
    result: object, hand_over: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One prompt of five never gets a score: its groups leave a gap and the run goes on."""
    score = ToyReward.score

    def unlucky(self: ToyReward, terms: Any, prompt: Prompt, *images: Any) -> Scores:
        return score(self, terms, prompt, *images) if prompt.index != 2 else toy_scores("color", prompt, result, 4)

    monkeypatch.setattr(ToyReward, "score", unlucky)
    found = virtual(toy_config(1, hand_over=hand_over, steps=STEPS, reward__on_error="skip", reward__retries=1))
    counts = found.table.counts()
    skipped = found.observer.of("skipped")
    assert len(skipped) > 0
    assert (counts[State.SKIPPED], counts[State.TRAINED]) == (len(skipped), found.table.issued - len(skipped))
    assert len(found.trained) == counts[State.TRAINED]
    assert sum(line.get("tickets_skipped", 0) for line in found.lines) == len(skipped)
    assert found.staleness() == [min(step, 1) for step in range(STEPS)]
