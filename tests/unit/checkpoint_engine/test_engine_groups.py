"""Tests of process groups beside others: FSDP's default group, another run's secret, a second engine, silent peers."""

import asyncio
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from checkpoint_engine import Delivery, Publisher, Receiver, TransferFailed
from checkpoint_engine.collective import CollectiveReceiver, CollectiveSender, Member
from checkpoint_engine.collective_delivery import CollectiveBroadcast
from checkpoint_engine.process_group import Epoch, TorchLink, gloo_group
from checkpoint_engine.transports import make_member, resolve_transport
from examples.checkpoint_engine.processes import ProcessSender
from tests.support.forked import CONTEXT
from tests.unit.checkpoint_engine.engine_local import Local
from tests.unit.checkpoint_engine.engine_parts import ALPHA, PATIENCE, RANK, blank, ends, lora, sealed
from tests.unit.checkpoint_engine.engine_processes import SECONDS
from tests.unit.checkpoint_engine.engine_ranks import rank_main

ROOT = Path(__file__).parents[3]


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


@pytest.mark.serial("ranks")
def test_fsdp_on_the_default_group_trains_the_same_weights_beside_deliveries(tmp_path: Path) -> None:
    alone, beside = (train_ranks(tmp_path, beside=beside) for beside in (False, True))
    for (weights, _, _), (same, _, world) in zip(alone, beside, strict=True):
        assert weights == same and world == 2
    assert len(beside[0][1]) >= 3 and len(set(beside[0][1])) == len(beside[0][1])
    assert alone[0][1] == []


def test_a_stranger_with_another_secret_cannot_join_and_disturbs_nobody() -> None:
    publisher, receiver = ends(lora())
    sender, taking = CollectiveSender(publisher, make_member("gloo")), CollectiveReceiver(receiver, make_member("gloo"))
    header, _ = sealed(publisher, 0)
    host, port = sender.address()
    strange = Member(lambda: TorchLink("gloo"))
    errors: list[str] = []

    def intrude() -> None:
        try:
            strange.open(Epoch(1, "guess", host, port, world=2, seconds=1.0), 1)
        except TransferFailed as error:
            errors.append(str(error))

    stranger = threading.Thread(target=intrude)
    stranger.start()
    time.sleep(0.2)
    epoch = Epoch(1, "secret", host, port, world=2, seconds=120.0)
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
        strange.take(receiver.expect(publisher.draft(1)))
    taking.abort()
    sender.abort()


def test_every_run_has_a_secret_of_its_own_and_every_epoch_a_prefix() -> None:
    publisher, _ = ends(lora())
    one, other = (CollectiveBroadcast(ProcessSender(publisher)) for _ in range(2))
    assert one._secret != other._secret and len(one._secret) == 32
    epochs = [Epoch(n, one._secret, "h", 1, 2, 1.0) for n in (1, 2)]
    assert epochs[0].prefix != epochs[1].prefix and one._secret in epochs[0].prefix


def test_two_engines_deliver_at_once_in_one_process() -> None:
    async def main() -> None:
        engines = []
        for seed in (1, 2):
            tensors = lora(seed, width=512)
            publisher = Publisher(tensors, alpha=ALPHA, rank=RANK)
            sender = ProcessSender(publisher, member=make_member("gloo"))

            async def replace(name: str, error: BaseException) -> None:
                raise AssertionError(f"{name} was given up") from error

            broadcast = CollectiveBroadcast(sender, setup_seconds=PATIENCE, ready_seconds=PATIENCE)
            delivery = Delivery(sender, replace=replace, broadcast=broadcast)
            receivers = [Local(Receiver(blank(tensors), alpha=ALPHA, rank=RANK), f"r{i}") for i in range(2)]
            for receiver in receivers:
                await delivery.join(receiver)
            engines.append((tensors, publisher, delivery, receivers, sender))
        for version in range(5):
            await asyncio.gather(*(delivery.publish(version) for _, _, delivery, _, _ in engines))
            await asyncio.gather(*(delivery.drain() for _, _, delivery, _, _ in engines))
            digests = []
            for tensors, publisher, delivery, receivers, _ in engines:
                digests.append(publisher.payload(version)[0].digest)
                for receiver in receivers:
                    assert receiver.receiver.activate("policy", version) == digests[-1]
                    assert receiver.receiver.live_digest() == digests[-1]
                assert delivery.stats.fallbacks == 0
                for tensor in tensors.values():
                    tensor.mul_(1.5)
            assert digests[0] != digests[1]
        for _, _, delivery, receivers, sender in engines:
            await delivery.close()
            sender.close()
            for receiver in receivers:
                receiver.group.abort()
        assert not dist.is_initialized(), "no default group was made"

    asyncio.run(asyncio.wait_for(main(), SECONDS))


def test_opening_a_group_that_nobody_else_joins_ends_by_abort_or_deadline() -> None:
    publisher, _ = ends(lora())
    sender = CollectiveSender(publisher, make_member("gloo"))
    host, port = sender.address()
    with pytest.raises(TransferFailed, match=r"rank 0: .*(not everybody came within 0.3 s|timeout)"):
        sender.open(Epoch(1, "secret", host, port, world=3, seconds=9.0, setup_seconds=0.3))
    threading.Timer(0.3, sender.abort).start()
    with pytest.raises(TransferFailed, match="rank 0: aborted"):
        sender.open(Epoch(2, "secret", host, port, world=3, seconds=120.0))
    header, _ = sealed(publisher, 0)
    with pytest.raises(TransferFailed, match="not a member of epoch 2"):
        sender.ready(2, header)
    sender.abort()


def test_auto_is_the_object_store_without_a_gpu_and_other_names_are_refused() -> None:
    assert resolve_transport("auto", "cpu") == "object_store"
    assert resolve_transport("auto", "cuda:0") == ("nccl" if dist.is_nccl_available() else "object_store")
    assert [resolve_transport(name, "cpu") for name in ("gloo", "object_store")] == ["gloo", "object_store"]
    with pytest.raises(ValueError, match=r"got 'ncll' \(nearest: nccl\)"):
        resolve_transport("ncll", "cpu")
    with pytest.raises(ValueError, match="collective transports are"):
        make_member("object_store")


@pytest.mark.parametrize("transport", ["nccl", "pynccl"])
def test_transports_of_a_gpu_are_refused_elsewhere_in_one_sentence(transport: str) -> None:
    with pytest.raises(ValueError, match=f"transport {transport} needs weights on a GPU, here they are on cpu: use gl"):
        resolve_transport(transport, "cpu")


def test_libraries_that_are_missing_are_named_in_one_sentence() -> None:
    epoch = Epoch(1, "secret", "127.0.0.1", 1, 1, 1.0)
    if not dist.is_nccl_available():
        with pytest.raises(ValueError, match="transport nccl needs a torch built with NCCL"):
            make_member("nccl").open(epoch, 0)
        with pytest.raises(ValueError, match="transport nccl needs a torch built with NCCL"):
            resolve_transport("nccl", "cuda")
    try:
        import cupy  # noqa: F401
    except ImportError:
        with pytest.raises(
            ValueError, match=r"pynccl needs cupy, which could not be imported.*pip install async-flowrl\[nccl\]"
        ):
            make_member("pynccl").open(epoch, 0)
        with pytest.raises(
            ValueError, match=r"pynccl needs cupy, which could not be imported.*pip install async-flowrl\[nccl\]"
        ):
            resolve_transport("pynccl", "cuda")


def test_a_process_that_ends_waits_for_the_groups_it_leaves(tmp_path: Path) -> None:
    """A thread that came back from C++ after the interpreter has gone would end the process by SIGABRT."""
    code = (
        "import pathlib, sys, time\n"
        "from checkpoint_engine.collective import Member\n"
        "class Slow:\n"
        "    def abort(self):\n"
        "        time.sleep(0.5)\n"
        "        pathlib.Path(sys.argv[1]).touch()\n"
        "member = Member(Slow)\n"
        "member._link = Slow()\n"
        "member.abort()\n"
    )
    left = tmp_path / "left"
    done = subprocess.run([sys.executable, "-c", code, str(left)], timeout=300, cwd=ROOT, check=False)
    assert done.returncode == 0 and left.exists()


def test_a_gloo_group_has_its_connections_on_the_interfaces_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Counted:
        class _Options:
            pass

        def __init__(self, store: object, rank: int, world: int, options: Any) -> None:
            self.options = options

        @staticmethod
        def create_device(*, interface: str = "", hostname: str = "") -> str:
            asked.append(interface or hostname)
            return interface or hostname

    monkeypatch.setattr(dist, "ProcessGroupGloo", Counted)
    epoch = Epoch(0, "", "127.0.0.1", 1, 2, 7.0)
    for names, expected in (("", ["127.0.0.1"] * 2), ("eth0", ["eth0"] * 2), ("a,b,c", ["a", "b", "c"])):
        asked.clear()
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", names)
        group = gloo_group(dist.Store(), 0, epoch)
        assert asked == group.options._devices == expected
        assert group.options._timeout == timedelta(seconds=7) and group.options._threads >= len(expected)
