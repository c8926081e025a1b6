"""Two trainer ranks with FSDP on their default group; beside it, rank 0 serves a collective delivery."""

import threading
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from checkpoint_engine import Publisher, Receiver
from checkpoint_engine.collective import CollectiveReceiver, CollectiveSender
from checkpoint_engine.process_group import Epoch
from tests.unit.checkpoint_engine.engine_parts import ALPHA, RANK, lora

STEPS = 20


def rank_main(rank: int, store: Path, connection: Connection, beside: bool) -> None:
    """Trains; sends the digest of its shards and how many versions were delivered meanwhile."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    delivered: list[str] = []
    stop = threading.Event()
    other = threading.Thread(target=deliver, args=(delivered, stop))
    if beside and rank == 0:
        other.start()
    weights = train()
    stop.set()
    if other.ident is not None:
        other.join()
    default = dist.group.WORLD
    connection.send((weights, delivered, default is not None and default.size()))
    dist.destroy_process_group()


def train() -> list[list[float]]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
    mesh = init_device_mesh("cpu", (2,))
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(STEPS, 8, 16, generator=torch.Generator().manual_seed(dist.get_rank()))
    for batch in inputs:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    return [parameter.to_local().flatten().tolist() for parameter in model.parameters()]  # type: ignore[attr-defined]


def deliver(delivered: list[str], stop: threading.Event) -> None:
    """Epoch after epoch with a receiver in another thread, until training is over."""
    tensors = lora(width=256)
    publisher = Publisher(tensors, alpha=ALPHA, rank=RANK)
    sender = CollectiveSender(publisher)
    receiver = Receiver({n: torch.zeros_like(t) for n, t in tensors.items()}, alpha=ALPHA, rank=RANK)
    taking = CollectiveReceiver(receiver)
    while len(delivered) < 3 or not stop.is_set():
        version = len(delivered)
        publisher.stage(version)
        header = publisher.seal(version)
        epoch = Epoch("gloo", version, "secret", *sender.address(), world=2, seconds=120.0)
        joining = threading.Thread(target=taking.open, args=(epoch, 1))
        joining.start()
        sender.open(epoch)
        joining.join()
        sender.ready(version, header)
        taking.ready(version, header)
        accepting = threading.Thread(target=taking.accept, args=(header,))
        accepting.start()
        sender.send(header)
        accepting.join()
        delivered.append(receiver.activate("policy", version))
    taking.abort()
    sender.abort()
