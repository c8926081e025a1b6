"""Test of what a run's start says of nodes with different libraries, and of those that do not see its directory."""

import asyncio
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from async_flowrl.config.check import ConfigError
from async_flowrl.config.schema import Config
from async_flowrl.run.nodes import LIBRARIES, compare_nodes
from separation.group import PoolSpec


class Worker:
    """A worker on a node with this version of every library."""

    def __init__(self, pool: str, node: str, version: str, *, sees: bool = True) -> None:
        self.name, self.pool, self.node = f"{pool}-0", pool, node
        self.answers = {"separation.node:sees": sees, "separation.node:versions_of": dict.fromkeys(LIBRARIES, version)}

    async def call(self, method: str, *_: object, lane: str = "main") -> Any:
        return self.answers[method]


def compared(folder: Path, *workers: Worker) -> None:
    groups: Any = {
        one.pool: SimpleNamespace(spec=PoolSpec(one.pool, "pkg.module:factory", 1), workers=[one]) for one in workers
    }
    asyncio.run(compare_nodes(Config(), groups, folder))


def test_nodes_that_differ_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    trainer = Worker("trainer", "10.0.0.1", "2.13")
    compared(tmp_path, trainer, Worker("rollout", "10.0.0.2", "2.13"))
    assert not caplog.records
    compared(tmp_path, trainer, Worker("rollout", "10.0.0.2", "2.12", sees=False))
    assert len(caplog.messages) == len(LIBRARIES) + 1 and all("10.0.0.2" in said for said in caplog.messages)
    with pytest.raises(ConfigError, match=r"trainer-0 on node 10\.0\.0\.1"):
        compared(tmp_path, Worker("trainer", "10.0.0.1", "2.13", sees=False))
    assert not list(tmp_path.iterdir())
