"""Tests of profiler traces of chosen steps, by rollout workers and trainer ranks."""

import json
from pathlib import Path

from async_flowrl.config.compose import compose_config
from async_flowrl.rollout.rollout_worker import RolloutWorker
from async_flowrl.run.prepare import prepare
from async_flowrl.tickets.request import sampling
from async_flowrl.tickets.table import TRAIN, Ticket
from async_flowrl.training.messages import GroupMeta, StepPlan, TrainRequest
from async_flowrl.training.trainer_worker import TrainerWorker


def test_both_pools_trace_the_steps_asked_for(tmp_path: Path) -> None:
    given = ["prompts_per_step=1", "group_size=2", "trainer.micro_batch_size=2", "profile.steps=[1]"]
    prepared = prepare(compose_config("sync", [*given, f"output_dir={tmp_path}"]))
    config = prepared.config
    rollout = RolloutWorker(config, prepared.model, 0, "rollout-0")
    trainer = TrainerWorker(config, prepared.model, 0, "trainer-0")
    rollout.load()
    trainer.load()
    for step in (0, 1):
        trainer.sender.stage(step)
        trainer.sender.policy.seal(step)
        rollout.receiver.receive(*trainer.sender.policy.payload(step))
        _, _, trajectory = rollout.generate([prepared.requests.request(Ticket(TRAIN, step, step, 0, 0, step))])
        assert trajectory is not None
        meta = GroupMeta(0, 1, step, 0, (1.0, -1.0), ((0, 1),), (0, 1), " ", sampling(config))
        plan = StepPlan(rows=2 * len(trajectory.train_steps))
        trainer.train(TrainRequest(step, (meta,), begins=plan), trajectory)
        trainer.add_up(TrainRequest(step, ()))
        trainer.take_step()
    written = sorted(path.name for path in (tmp_path / "profile").iterdir())
    assert written == ["rollout-0-step-000001-ticket-000001.json", "trainer-0-step-000001.json"]
    names = {event["name"] for event in json.loads((tmp_path / "profile" / written[1]).read_text())["traceEvents"]}
    assert any("AddmmBackward" in name for name in names)
