"""Tests of process groups beside others: FSDP's default group, another run's secret, a second engine, silent peers."""

import threading
import time
from pathlib import Path

import pytest

from checkpoint_engine import TransferFailed
from checkpoint_engine.collective import CollectiveReceiver, CollectiveSender
from checkpoint_engine.process_group import Epoch
from tests.support.forked import CONTEXT
from tests.unit.checkpoint_engine.engine_parts import ends, lora, sealed
from tests.unit.checkpoint_engine.engine_processes import SECONDS
from tests.unit.checkpoint_engine.engine_ranks import rank_main


def train_ranks(folder: Path, *, beside: bool) -> list[tuple[list[list[float]], list[str], int]]:
    pipes = [CONTEXT.Pipe() for _ in range(2)]
    arguments = [(rank, folder / f"store-{beside}", theirs, beside) for rank, (_, theirs) in enumerate(pipes)]
    ranks = [CONTEXT.Process(target=rank_main, args=each, daemon=True) for each in arguments]
    for process in ranks:
        process.start()
    try:
        assert all(ours.poll(SECONDS) for ours, _ in pipes)
        return [ours.recv() for ours, _ in pipes]
    finally:
        for process in ranks:
            process.kill()
            process.join()


@pytest.mark.serial("runs")
def test_fsdp_on_the_default_group_trains_the_same_weights_beside_deliveries(tmp_path: Path) -> None:
    alone, beside = (train_ranks(tmp_path, beside=beside) for beside in (False, True))
    for (weights, _, _), (same, _, world) in zip(alone, beside, strict=True):
        assert weights == same and world == 2
    assert len(beside[0][1]) >= 3 and len(set(beside[0][1])) == len(beside[0][1])
    assert alone[0][1] == []


def test_a_stranger_with_another_secret_cannot_join_and_disturbs_nobody() -> None:
    publisher, receiver = ends(lora())
    sender, taking = CollectiveSender(publisher), CollectiveReceiver(receiver)
    header, _ = sealed(publisher, 0)
    host, port = sender.address()
    strange = CollectiveReceiver(receiver)
    errors: list[str] = []

    def intrude() -> None:
        try:
            strange.open(Epoch("gloo", 1, "guess", host, port, world=2, seconds=1.0), 1)
        except TransferFailed as error:
            errors.append(str(error))

    stranger = threading.Thread(target=intrude)
    stranger.start()
    time.sleep(0.2)
    epoch = Epoch("gloo", 1, "secret", host, port, world=2, seconds=120.0)
    joining = threading.Thread(target=taking.open, args=(epoch, 1))
    joining.start()
    sender.open(epoch)
    joining.join()
    sender.ready(1, header)
    taking.ready(1, header)
    accepting = threading.Thread(target=taking.accept, args=(header,))
    accepting.start()
    sender.send(header)
    for thread in (accepting, stranger):
        thread.join()
    assert receiver.activate("policy", 0) == header.digest
    assert len(errors) == 1 and "epoch 1 could not be opened as rank 1" in errors[0]
    with pytest.raises(TransferFailed, match="before the members were ready"):
        strange.accept(publisher.draft(1))
    taking.abort()
    sender.abort()
