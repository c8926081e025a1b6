"""Tests of planted faults in the checkpoint engine that only a GPU shows: each is caught during a delivery."""

import time
from collections.abc import Callable
from dataclasses import fields
from unittest import mock

import pytest
import torch
from pretended import cuda, report
from torch import Tensor

from checkpoint_engine import Publisher, Receiver
from checkpoint_engine.collective import CollectiveSender
from checkpoint_engine.errors import EngineError, TransferFailed
from checkpoint_engine.process_group import Epoch

VERSIONS = 4
PATIENCE = 1.0
"""Seconds of a group's deadline."""
IDENTITY = ("transport", "number", "secret", "host", "port", "world")
"""Fields of an epoch that are not deadlines."""


def deliver() -> None:
    """Versions staged, sealed, received and activated on the device, the weights changing at once after the staging.

    The sealing lane is a stream of its own, and so is the delivering one.
    """
    source = {f"m{i}": torch.zeros(50, 64, device="cuda") for i in range(8)}
    publisher = Publisher(source)
    live = {name: torch.zeros_like(tensor) for name, tensor in source.items()}
    receiver = Receiver(live)
    for version in range(VERSIONS):
        for tensor in source.values():
            tensor.fill_(float(version))
        publisher.stage(version)
        for tensor in source.values():
            tensor.fill_(-1.0)
        publisher.seal(version)
        receiver.receive(*publisher.payload(version))
        receiver.activate("policy", version)
        assert all(bool((tensor == float(version)).all()) for tensor in live.values())


def nothing(*arguments: object, **options: object) -> None:
    """In place of a call that orders something."""


def caught(work: Callable[[], None]) -> str | None:
    """How the fault showed: by wrong bytes or by a race; None if by neither."""
    try:
        work()
    except (EngineError, AssertionError) as error:
        return type(error).__name__
    return report.RACE if report.seen(report.RACE) else None


def test_without_a_fault_nothing_is_caught() -> None:
    assert caught(deliver) is None


def test_a_removed_wait_between_streams() -> None:
    with mock.patch.object(cuda.Stream, "wait_event", nothing):
        assert caught(deliver) is not None
    report.forget()


def test_a_removed_synchronise() -> None:
    with (
        mock.patch.object(cuda.Stream, "synchronize", nothing),
        mock.patch.object(cuda.Event, "synchronize", nothing),
        mock.patch.object(cuda.Event, "query", return_value=True),
    ):
        assert caught(deliver) is not None
    report.forget()


def test_a_source_tensor_on_another_device() -> None:
    publisher = Publisher({"a": torch.zeros(64, device="cuda"), "b": torch.zeros(64, device="cuda")})
    with pytest.raises(RuntimeError, match="same device"):
        publisher.stage(0, {"a": torch.zeros(64, device="cuda"), "b": torch.zeros(64, device="cuda:1")})


def test_numpy_of_a_device_tensor() -> None:
    with mock.patch.object(Tensor, "cpu", lambda tensor: tensor), pytest.raises((TypeError, RuntimeError)):
        deliver()
    report.forget()


@pytest.mark.parametrize("missing", [False, True], ids=["slow set-up", "missing peer"])
def test_a_group_that_takes_longer_than_its_deadline(monkeypatch: pytest.MonkeyPatch, missing: bool) -> None:
    """It is given up by name and in time, though NCCL goes on; and the next one works."""
    sender = CollectiveSender(Publisher({"a": torch.zeros(64, device="cuda")}), "cuda")
    monkeypatch.setenv("PRETEND_NCCL_SETUP", "0" if missing else str(2 * PATIENCE))
    began = time.monotonic()
    with pytest.raises(TransferFailed, match="epoch 1 could not be opened as rank 0"):
        sender.open(epoch(sender, 1, members=2 if missing else 1))
    assert time.monotonic() - began < 60 * PATIENCE, "it waited for NCCL"
    monkeypatch.setenv("PRETEND_NCCL_SETUP", "0")
    sender.open(epoch(sender, 2, members=1))
    sender.abort()


def epoch(sender: CollectiveSender, number: int, *, members: int) -> Epoch:
    host, port = sender.address()
    seconds = {field.name: PATIENCE for field in fields(Epoch) if field.name not in IDENTITY}
    return Epoch("nccl", number, "secret", host, port, members, **seconds)
