"""Tests of the choice of a run's transport, which is made in the trainer's process."""

import asyncio
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from async_flowrl.config.check import ConfigError
from async_flowrl.config.compose import compose_config
from async_flowrl.run.launch import choose_transport
from checkpoint_engine.transports import transport_here
from separation.group import Worker, WorkerFailed


@dataclass
class Sender:
    """A trainer rank that answers with what it is given, or raises it."""

    answer: str | WorkerFailed = ""
    name: str = "trainer-0"
    node: str = "10.0.0.1"
    asked: list[tuple[Any, ...]] = field(default_factory=list)

    async def call(self, method: str, *args: Any, lane: str = "main") -> str:
        self.asked.append((method, *args))
        if isinstance(self.answer, WorkerFailed):
            raise self.answer
        return self.answer


def choose(sender: Sender, *overrides: str, rollouts: Any = ()) -> str:
    return asyncio.run(choose_transport(compose_config(overrides=list(overrides)), cast("Worker", sender), rollouts))


def test_the_trainer_is_asked_whatever_the_controller_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    for seen_here in (False, True):
        monkeypatch.setattr("torch.cuda.is_available", lambda seen=seen_here: seen)
        sender = Sender("nccl")
        assert choose(sender, "checkpoint_engine.transport=auto") == "nccl"
        assert sender.asked == [("checkpoint_engine.transports:transport_here", "auto")]


def test_auto_is_the_object_store_where_workers_share_a_device() -> None:
    sender = Sender("nccl")
    shared = ("trainer.gpus_per_worker=0.5", "rollout.gpus_per_worker=0.5")
    assert choose(sender, "checkpoint_engine.transport=auto", *shared) == "object_store"
    assert sender.asked == []


@pytest.mark.parametrize("setting", ["checkpoint_engine.transport=pynccl", "rollout.engine=vllm_omni"])
def test_a_worker_that_lacks_a_package_is_named(setting: str) -> None:
    lacking = Sender(WorkerFailed("rollout-1", "asked", "ValueError", "no package", ""), "rollout-1", "10.0.0.2")
    with pytest.raises(ConfigError, match=rf"{setting.partition('=')[0]}: rollout-1 on node 10\.0\.0\.2: no package"):
        choose(Sender("pynccl"), setting, rollouts=[Sender(), lacking])


def test_here_is_this_processs_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert transport_here("auto") == "nccl"
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert transport_here("auto") == "object_store"
