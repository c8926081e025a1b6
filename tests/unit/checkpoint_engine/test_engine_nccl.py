"""Tests of the use of NCCL, with stand-ins for its classes: its settings, and the errors that are named."""

import os
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType

from checkpoint_engine.errors import TransferFailed
from checkpoint_engine.process_group import Limit, TorchLink, nccl_group
from checkpoint_engine.transports import make_link

WATCHDOG = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2", "TORCH_NCCL_ENABLE_MONITORING": "0"}


def environment() -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in WATCHDOG}


class Options:
    _timeout = timedelta(minutes=10)


class Group:
    """torch's ProcessGroupNCCL as far as it is used, and what it was made with."""

    Options = Options

    def __init__(self, store: object, rank: int, world: int, options: Options) -> None:
        self.watchdog, self.timeout = environment(), options._timeout
        self.connected: list[torch.device] = []

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.connected.append(device)


class Work:
    """A collective that failed, as NCCL reports it: completed, and nothing raised by `wait`."""

    def is_completed(self) -> bool:
        return True

    def wait(self) -> bool:
        return True


def test_a_group_is_connected_when_it_is_made_and_its_watchdog_spares_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Group, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    one, other = WATCHDOG
    monkeypatch.setenv(one, "1")
    monkeypatch.delenv(other, raising=False)
    group = nccl_group(dist.Store(), 0, 2)
    assert group.watchdog == WATCHDOG
    assert environment() == {one: "1", other: None}
    assert group.timeout >= timedelta(days=1), "no limit of ours comes later"
    assert group.connected == [torch.device("cuda", 1)]


def test_a_collective_that_failed_is_an_error_though_it_counts_as_completed() -> None:
    link = TorchLink("nccl")

    class Failing:
        def broadcast(self, *_: object) -> Work:
            return Work()

        def get_error(self) -> ErrorType:
            return ErrorType.COMM_ERROR

    link.group = Failing()
    payload, limit = torch.zeros(8, dtype=torch.uint8), Limit(threading.Event(), 60.0)
    with pytest.raises(TransferFailed, match="NCCL: COMM_ERROR"):
        link.broadcast(payload, limit, lambda end: None, lambda: payload)
    assert link.in_use, "the collective may still read or write there"


@pytest.mark.parametrize("transport", ["nccl", "pynccl"])
def test_a_receiver_in_host_memory_is_refused_by_transports_between_gpus(transport: str) -> None:
    with pytest.raises(ValueError, match=f"transport {transport} needs receivers that keep versions on a GPU"):
        make_link(transport, torch.device("cpu"))
    assert isinstance(make_link("gloo", torch.device("cpu")), TorchLink)
