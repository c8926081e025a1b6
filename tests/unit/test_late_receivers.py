"""Tests of rollout workers that come late for a version of which each trainer rank keeps some rows.

The first rank retains the newest version whole. An older one is gathered once more, and never while the ranks train. In
virtual time, with the real controller; tests/integration/test_full_shard_runs.py does it on Ray.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.chaos.share_recovery_schedules import IN_SHARES, STEPS
from tests.support.toy import toy_config
from tests.support.toy_pool import Timing, ToyWorker, World
from tests.support.toy_recovery import Groups, Outside, evaluations, logged, run_controller, summary, toy_ranks_meet

TRAINING = ("train", "add_up", "take_step")
TIMING = Timing(generate=2.0, update=4.0, slow={"trainer-1": 1.5})
"""One rank trains longer than the other one, which is idle then."""


@dataclass
class Calls:
    """When the ranks trained, and gathered a version once more: (method, version or None, begin, end)."""

    made: list[tuple[str, int | None, float, float]] = field(default_factory=list)

    def of(self, *methods: str) -> list[tuple[str, int | None, float, float]]:
        return [call for call in self.made if call[0] in methods]


@contextmanager
def recorded() -> Iterator[Calls]:
    calls, serve = Calls(), ToyWorker.serve

    async def watched(self: ToyWorker, method: str, args: tuple[Any, ...]) -> Any:
        name, clock = method.rpartition(".")[2], asyncio.get_running_loop().time
        began = clock()
        try:
            return await serve(self, method, args)
        finally:
            if name in (*TRAINING, "recall", "gather"):
                calls.made.append((name, args[0] if name in ("recall", "gather") else None, began, clock()))

    with mock.patch.object(ToyWorker, "serve", watched):
        yield calls


def go(root: Path, timing: Timing = TIMING, *, k: int = 1, disturb: Any = None, **changes: Any) -> Calls:
    settings = {**IN_SHARES, "console": "quiet", "rollout__num_workers": 2, **changes}
    with toy_ranks_meet(), recorded() as calls:
        config = toy_config(k, steps=STEPS, **settings)
        assert run_controller(config, root, World(timing), disturb=disturb) is None
    return calls


def check_apart(calls: Calls) -> None:
    """No version is gathered once more while a rank trains."""
    for _, version, began, ended in calls.of("recall"):
        for method, _, began_training, ended_training in calls.of(*TRAINING):
            assert ended <= began_training or ended_training <= began, f"{version} was gathered beside {method}"


def killed_while_training(step: int) -> Callable[[Outside, Groups], Any]:
    """Kills rollout-1 while the trainer makes a version after `step` others."""

    async def disturb(outside: Outside, groups: Groups) -> None:
        first = groups["trainer"].workers[0]
        while first.calls.get("take_step", 0) < step or not first.lanes["main"].locked():  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        next(worker for worker in groups["rollout"].workers if worker.name == "rollout-1").kill()

    return disturb


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("hand_over", ["batch", "stream"])
def test_a_receiver_killed_while_step_n_plus_2_trains_gets_version_n(tmp_path: Path, k: int, hand_over: str) -> None:
    calm = go(tmp_path / "calm", k=k, hand_over=hand_over)
    assert calm.of("recall") == [], "in an undisturbed run there is one gather for each version"
    gathered = [version for _, version, _, _ in calm.of("gather")]
    assert gathered == [version for version in (-1, *range(STEPS + 1)) for _ in range(2)]
    calls = go(tmp_path / "run", k=k, hand_over=hand_over, disturb=killed_while_training(3))
    assert {version for _, version, _, _ in calls.of("recall")} >= {2}, "version 3 is the newest, and 4 is being made"
    check_apart(calls)
    for file in ("calm", "run"):
        assert summary(tmp_path / file)["weights_digest"] == summary(tmp_path / "calm")["weights_digest"]
    assert logged(tmp_path / "run") == logged(tmp_path / "calm")


@pytest.mark.parametrize("averaged", [False, True], ids=["version", "average"])
def test_an_older_version_that_is_evaluated_is_gathered_once_more(tmp_path: Path, averaged: bool) -> None:
    """Evaluations take longer than a step, so a version waits for its evaluation while newer ones are made."""
    ema = {"trainer__ema_decay": 0.9, "trainer__ema_every": 1} if averaged else {}
    evaluated = {"evaluate__every": 1, **ema}
    calls = go(tmp_path / "run", Timing(generate=2.0, update=0.2), **evaluated)
    assert calls.of("recall"), "nothing older was evaluated"
    check_apart(calls)
    go(tmp_path / "calm", Timing(generate=0.1, update=10.0), **evaluated)
    assert evaluations(tmp_path / "run") == evaluations(tmp_path / "calm")
