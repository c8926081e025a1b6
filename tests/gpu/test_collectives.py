"""Tests of weights sent over NCCL by torch and by cupy, on one device and between processes with a device each.

Several processes need three devices, real or pretended.
"""

import multiprocessing
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import pytest
import torch

from checkpoint_engine import Publisher, Receiver
from checkpoint_engine.collective import CollectiveReceiver, CollectiveSender
from checkpoint_engine.errors import TransferFailed
from checkpoint_engine.process_group import Epoch
from tests.gpu.member_tensors import PRETENDED, tensors
from tests.support.live import live_digest

DEVICES = 3

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

several = pytest.mark.skipif(
    not PRETENDED and torch.cuda.device_count() < DEVICES, reason=f"needs {DEVICES} CUDA devices"
)

SECONDS = 240.0
"""Nothing here may take longer."""


def rank_of(number: int, transport: str, mode: str, ours: Connection) -> None:
    """One process: rank 0 sends. It reports what it got, or why not."""
    try:
        _sending(transport, mode, ours) if number == 0 else _receiving(number, transport, mode, ours)
    except TransferFailed as error:
        ours.send(f"TransferFailed: {error}")
    ours.send(None)


def _sending(transport: str, mode: str, ours: Connection) -> None:
    publisher = Publisher(tensors())
    sender = CollectiveSender(publisher, "cuda")
    epoch = Epoch(transport, 1, "secret", *sender.address(), DEVICES, 3.0 if mode == "peer dies" else 60.0, 60.0)
    ours.send(epoch)
    publisher.stage(0)
    sender.open(epoch)
    assert ours.poll(SECONDS) and ours.recv() == "all ready"
    if mode == "late sender":
        time.sleep(0.5)
    sender.send(publisher.draft(0))
    ours.send(publisher.payload(0)[0].digest)


def _receiving(number: int, transport: str, mode: str, ours: Connection) -> None:
    epoch = ours.recv()
    receiver = Receiver(tensors(fill=0.0))
    taking = CollectiveReceiver(receiver, "cuda")
    taking.open(epoch, number)
    draft = Publisher(tensors()).draft(0)
    taking.ready(1, draft)
    if mode == "peer dies" and number == 2:
        os._exit(9)
    ours.send("ready")
    ack = taking.accept(draft)
    receiver.activate("policy", 0)
    assert live_digest(receiver) == ack.digest
    ours.send(ack.digest)


def processes(transport: str, mode: str, environment: Callable[[int], dict[str, str]]) -> list[str]:
    """What each of the three has to say in the end: a digest, an error, or "died"."""
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(DEVICES)]
    started = []
    for number, (_, theirs) in enumerate(pipes):
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment(number).items():
                patch.setenv(name, value)
            process = context.Process(target=rank_of, args=(number, transport, mode, theirs), daemon=True)
            process.start()
            started.append(process)
        theirs.close()
    try:
        return _directed([ours for ours, _ in pipes])
    finally:
        for process in started:
            process.kill()
            process.join()


def _directed(pipes: list[Connection]) -> list[str]:
    sender, *receivers = pipes
    assert sender.poll(SECONDS)
    epoch = sender.recv()
    for each in receivers:
        each.send(epoch)
    answers = [_answer(each) for each in receivers]
    sender.send("all ready")
    last = [_answer(each) if answer == "ready" else answer for each, answer in zip(receivers, answers, strict=True)]
    return [_answer(sender), *last]


def _answer(pipe: Connection) -> str:
    assert pipe.poll(SECONDS), "a process hangs"
    try:
        return str(pipe.recv())
    except EOFError:
        return "died"


def own_device(number: int) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": str(number)}


@several
def test_everybody_has_what_was_staged(transport: str) -> None:
    digests = processes(transport, "late sender", own_device)
    assert len(set(digests)) == 1 and len(digests[0]) == 64, digests


@several
def test_two_processes_on_one_device_are_refused_by_name(transport: str) -> None:
    answers = processes(transport, "one device", lambda number: own_device(min(number, 1)))
    assert all("TransferFailed: epoch 1 could not be opened as rank" in answer for answer in answers), answers


@several
def test_a_peer_that_dies_before_its_first_bucket_hangs_nobody(transport: str) -> None:
    sender, survivor, dead = processes(transport, "peer dies", own_device)
    assert dead == "died" and "TransferFailed: broadcast in epoch 1 failed" in sender
    # The survivor may have all its bytes by the time the sender gives up.
    assert "TransferFailed: broadcast in epoch 1 failed" in survivor or len(survivor) == 64
