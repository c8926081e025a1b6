"""Tests of the download of a hub model: by one worker of each node, before any worker loads, with its own deadline."""

import asyncio
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest

from async_flowrl.controller.admission import download_model, loaders
from async_flowrl.policies.registry import ResolvedModel
from separation.group import Worker
from separation.supervise import DeadlineExceeded
from tests.support.virtual import run_virtual

HUB = ResolvedModel("Qwen/Qwen-Image", "qwen_image", "0123abcd", "bfloat16")


@dataclass
class Fetcher:
    """A worker that only downloads, and takes its time."""

    name: str
    node: str
    seconds: float = 1.0
    asked: list[tuple[Any, ...]] = field(default_factory=list)

    async def call(self, method: str, *args: Any, lane: str = "main") -> None:
        self.asked.append((method.rpartition(":")[2], *args))
        await asyncio.sleep(self.seconds)


def pools(*, slow: str = "") -> list[Fetcher]:
    """Two rollout workers on node a, one on b; trainer ranks on b, c, c, d."""
    places = zip(["rollout"] * 3 + ["trainer"] * 4, [0, 1, 2, 0, 1, 2, 3], "aabbccd", strict=True)
    return [Fetcher(f"{pool}-{index}", node, 1000.0 if node == slow else 1.0) for pool, index, node in places]


def fetch(model: ResolvedModel | None, workers: list[Fetcher]) -> None:
    everyone = cast("list[Worker]", workers)
    run_virtual(download_model(model, loaders(everyone[:3], everyone[3:]), seconds=60))


def test_one_worker_of_every_node_brings_what_that_nodes_workers_load() -> None:
    workers = pools()
    fetch(HUB, workers)
    asked = {worker.name: worker.asked for worker in workers if worker.asked}
    download = ("download", "Qwen/Qwen-Image", "0123abcd")
    assert asked == {
        "rollout-0": [(*download, "all")],
        "rollout-2": [(*download, "all")],
        "trainer-1": [(*download, "structure")],
        "trainer-3": [(*download, "structure")],
    }


def test_the_first_rank_brings_the_transformer_where_no_rollout_worker_sits() -> None:
    workers = [Fetcher("trainer-1", "c"), Fetcher("trainer-0", "c")]
    ranks = cast("list[Worker]", workers[::-1])
    run_virtual(download_model(HUB, loaders(trainers=ranks), seconds=60))
    assert workers[0].asked == []
    assert workers[1].asked[0][-1] == "transformer"


def test_one_worker_of_every_node_that_reads_weights_quantises_them() -> None:
    local = ResolvedModel("/models/one", "qwen_image", None, "bfloat16", quantize="nf4")
    for model, before in ((local, []), (replace(HUB, quantize="nf4"), ["download"])):
        workers = pools()
        fetch(model, workers)
        called = {worker.name: [method for method, *_ in worker.asked] for worker in workers if worker.asked}
        everywhere = {"rollout-0": [*before, "keep_copy"], "rollout-2": [*before, "keep_copy"]}
        structure = dict.fromkeys(("trainer-1", "trainer-3"), before)
        assert called == {**everywhere, **{name: calls for name, calls in structure.items() if calls}}
    workers = pools()
    fetch(replace(local, random=True), workers)
    assert not any(worker.asked for worker in workers)


def test_the_node_that_is_late_is_named() -> None:
    late = r"download: Qwen/Qwen-Image to node c, by trainer-1 was not done within its deadline of 60 s"
    with pytest.raises(DeadlineExceeded, match=late):
        fetch(HUB, pools(slow="c"))
