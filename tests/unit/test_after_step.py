"""Tests of a warning after a step, which is given once, and of the order of what comes after the last one."""

import asyncio
import logging
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest

from async_flowrl.config.schema import Config
from async_flowrl.controller.after_step import AfterStep
from separation.group import WorkerDied

GAPS = (1e-8, 3.1e-5, 4.2e-5)


@pytest.mark.parametrize(
    ("unit", "clip", "warned_at"), [("mean", 1e-5, 1), ("nats", 1e-5 * 64, 1), ("mean", 1e-3, None)]
)
def test_engines_that_disagree_by_the_clip_range_are_warned_of_once(
    unit: str, clip: float, warned_at: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    config = Config()
    config.algorithm.clip_unit, config.algorithm.clip_range = unit, clip
    unused = cast("Any", None)
    records = cast("Any", SimpleNamespace(show=None, failed=None))
    after = AfterStep(unused, unused, unused, unused, records, latent_elements=64)
    with caplog.at_level(logging.WARNING):
        for step, gap in enumerate(GAPS):
            after._warn(cast("Any", SimpleNamespace(config=config)), {"step": step, "behaviour_gap": gap})
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == (warned_at is not None)
    for message in told:
        assert message.startswith(f"step {warned_at}: rollout and trainer disagree by 3.1e-05")
        assert "algorithm.clip_range" in message and "algorithm.correction=rollout_tis" in message


@pytest.mark.parametrize("fault", [None, RuntimeError("no memory"), WorkerDied("trainer-0", "killed")])
def test_the_last_checkpoint_comes_first_then_the_measurement_then_evaluations(fault: Exception | None) -> None:
    """A process that is asked to stop may be killed at any moment. What fails is named; a death is for the recovery."""
    did = list[str]()

    def noted(what: str, error: Exception | None = None) -> Any:
        async def note(*_: Any) -> None:
            did.append(what)
            if error is not None:
                raise error

        return note

    config = Config(total_steps=1)
    config.evaluate.every = 1
    table = SimpleNamespace(step=1, published={1: "digest"})
    trainers = SimpleNamespace(settle=noted("KL", fault))
    failed = lambda what, error: did.append(f"{what}: {error}")  # noqa: E731
    records = cast("Any", SimpleNamespace(show=None, failed=failed, known=lambda version: False))
    checkpoints = cast("Any", SimpleNamespace(insist=noted("checkpoint"), trainers=trainers))
    unused = cast("Any", None)
    after = AfterStep(unused, unused, checkpoints, unused, records, latent_elements=64)
    after.evaluations = cast("Any", SimpleNamespace(start=noted("evaluation"), drain=noted("evaluations")))
    ctx = cast("Any", SimpleNamespace(config=config, table=table, work=SimpleNamespace(until=noted("sealed"))))
    dies = isinstance(fault, WorkerDied)
    with pytest.raises(WorkerDied) if dies else nullcontext():
        asyncio.run(after.drain(ctx))
    named = ["KL of step 0: RuntimeError: no memory"] if fault is not None and not dies else []
    assert did == ["sealed", "checkpoint", "KL", *named, *([] if dies else ["evaluation", "evaluations"])]
    assert after.trained
