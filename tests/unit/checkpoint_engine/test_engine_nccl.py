"""Tests of the use of NCCL, with stand-ins for its classes: its settings, and the errors that are named."""

import os
import sys
import threading
from datetime import timedelta
from types import ModuleType

import pytest
import torch
import torch.distributed as dist

from checkpoint_engine.errors import TransferFailed, Verdict, verdict
from checkpoint_engine.process_group import Epoch, Limit, TorchLink, nccl_group
from checkpoint_engine.pynccl import PyncclLink
from checkpoint_engine.side_stream import concrete
from checkpoint_engine.transports import check_receiver, make_member

WATCHDOG = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class Options:
    _timeout = timedelta(minutes=10)


class Group:
    """torch's ProcessGroupNCCL as far as it is used, and what it was made with."""

    Options = Options

    def __init__(self, store: object, rank: int, world: int, options: Options) -> None:
        self.watchdog, self.timeout = os.environ.get(WATCHDOG), options._timeout
        self.connected: list[torch.device] = []

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.connected.append(device)


class Work:
    """A collective that failed, as NCCL reports it: completed, and nothing raised by `wait`."""

    def is_completed(self) -> bool:
        return True

    def exception(self) -> RuntimeError:
        return RuntimeError("ncclRemoteError: a call failed possibly due to a network error")

    def wait(self) -> bool:
        return True


@pytest.mark.parametrize("before", [None, "1"])
def test_a_group_is_connected_when_it_is_made_and_its_watchdog_spares_the_process(
    before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Group, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    if before is None:
        monkeypatch.delenv(WATCHDOG, raising=False)
    else:
        monkeypatch.setenv(WATCHDOG, before)
    group = nccl_group(dist.Store(), 0, 2)
    assert group.watchdog == "2" and os.environ.get(WATCHDOG) == before
    assert group.timeout >= timedelta(days=1), "no limit of ours comes later"
    assert group.connected == [torch.device("cuda", 1)]


def test_a_collective_that_failed_is_an_error_though_it_counts_as_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    link = TorchLink("nccl")

    class Failing:
        def broadcast(self, *_: object) -> Work:
            return Work()

    link.group = Failing()
    payload, limit = torch.zeros(8, dtype=torch.uint8), Limit.of(threading.Event(), 60.0)
    with pytest.raises(TransferFailed, match="NCCL: ncclRemoteError"):
        link.broadcast(payload, limit, lambda end: None, lambda: payload)
    assert link._in_use, "the collective may still read or write there"


class Communicator:
    """cupy's NcclCommunicator, which notices a dead peer, or has a state that cupy has no name for."""

    def __init__(self, error: Exception) -> None:
        self.error, self.aborted = error, False

    def abort(self) -> None:
        self.aborted = True

    def check_async_error(self) -> None:
        raise self.error


@pytest.mark.parametrize("error", [KeyError(7), RuntimeError("NCCL_ERROR_REMOTE_ERROR")])
def test_every_error_of_cupys_nccl_is_one_of_the_transport(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("checkpoint_engine.pynccl.load_nccl", lambda: None)
    link = PyncclLink("cpu")
    link._communicator = Communicator(error)
    with pytest.raises(TransferFailed, match=r"NCCL, broadcast: .*(7|REMOTE_ERROR)") as raised:
        link._check(link._communicator)
    assert verdict(raised.value) is Verdict.RESEND


def test_a_communicator_that_was_given_up_is_not_asked_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL may have freed it."""
    monkeypatch.setattr("checkpoint_engine.pynccl.load_nccl", lambda: None)
    link = PyncclLink("cpu")
    communicator = link._communicator = Communicator(AssertionError("asked"))
    link.abort()
    assert communicator.aborted
    with pytest.raises(TransferFailed, match="aborted"):
        link._check(communicator)


def test_a_link_is_made_for_the_device_of_its_member(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever is the current one in the thread that makes it."""
    monkeypatch.setattr("checkpoint_engine.pynccl.load_nccl", lambda: None)
    monkeypatch.setattr("checkpoint_engine.collective.SideStream.of", lambda device: None)
    member = make_member("pynccl", "cuda:1")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    link = member._make()
    assert isinstance(link, PyncclLink) and link._device == torch.device("cuda", 1)


def test_an_older_cupy_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy, cuda, nccl = (ModuleType(name) for name in ("cupy", "cupy.cuda", "cupy.cuda.nccl"))
    cupy.__version__, cuda.nccl, nccl.available = "13.6.0", nccl, True  # type: ignore[attr-defined]
    for module in (cupy, cuda, nccl):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises(ValueError, match=r"pynccl needs cupy 14 or newer, this is 13\.6\.0"):
        PyncclLink("cpu")
    cupy.__version__, nccl.available = "14.2.0", False  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"pynccl needs libnccl\.so\.2, which cupy did not find: a torch for CUDA"):
        PyncclLink("cpu")


def test_a_device_has_its_index_as_tensors_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert concrete("cuda") == torch.device("cuda", 1) != torch.device("cuda")
    assert (concrete("cuda:0"), concrete("cpu")) == (torch.device("cuda", 0), torch.device("cpu"))


@pytest.mark.parametrize("transport", ["nccl", "pynccl"])
def test_a_receiver_in_host_memory_is_refused_by_transports_between_gpus(transport: str) -> None:
    with pytest.raises(ValueError, match=f"transport {transport} needs receivers that keep versions on a GPU"):
        check_receiver(transport, torch.device("cpu"))
    check_receiver(transport, torch.device("cuda", 0))
    check_receiver("gloo", torch.device("cpu"))


def test_a_group_may_take_longer_to_be_made_than_a_member_to_answer() -> None:
    epoch = Epoch(1, "secret", "host", 1, 2, 10.0, 60.0)
    assert (epoch.setup, epoch.limit(0), epoch.limit(1_700_000_000)) == (timedelta(seconds=60), 10.0, 44.0)
    assert Epoch(1, "secret", "host", 1, 2, 10.0).setup == timedelta(seconds=10)
