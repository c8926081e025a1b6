"""Tests of planted faults in the checkpoint engine that only a GPU shows: each is caught during a delivery."""

import time
from dataclasses import fields
from unittest import mock

import pytest
import torch
from pretended import cuda, report
from torch import Tensor

from checkpoint_engine import Publisher
from checkpoint_engine.collective import CollectiveSender
from checkpoint_engine.errors import EngineError, TransferFailed
from checkpoint_engine.process_group import Epoch
from tests.gpu.member_tensors import deliver

PATIENCE = 1.0
"""Seconds of a group's deadline."""
IDENTITY = ("transport", "number", "secret", "host", "port", "world")
"""Fields of an epoch that are not deadlines."""


def nothing(*arguments: object, **options: object) -> None:
    """In place of a call that orders something."""


def caught() -> bool:
    """Whether the fault shows in a delivery, by wrong bytes or by a race."""
    try:
        deliver(50)
    except (EngineError, AssertionError):
        return True
    finally:
        raced = bool(report.seen(report.RACE))
        report.forget()
    return raced


def test_a_removed_wait_between_streams() -> None:
    with mock.patch.object(cuda.Stream, "wait_event", nothing):
        assert caught()


def test_a_removed_synchronise() -> None:
    with (
        mock.patch.object(cuda.Stream, "synchronize", nothing),
        mock.patch.object(cuda.Event, "synchronize", nothing),
        mock.patch.object(cuda.Event, "query", return_value=True),
    ):
        assert caught()


def test_a_source_tensor_on_another_device() -> None:
    publisher = Publisher({"a": torch.zeros(64, device="cuda"), "b": torch.zeros(64, device="cuda")})
    with pytest.raises(RuntimeError, match="same device"):
        publisher.stage(0, {"a": torch.zeros(64, device="cuda"), "b": torch.zeros(64, device="cuda:1")})


def test_numpy_of_a_device_tensor() -> None:
    with mock.patch.object(Tensor, "cpu", lambda tensor: tensor), pytest.raises((TypeError, RuntimeError)):
        deliver(50)
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
