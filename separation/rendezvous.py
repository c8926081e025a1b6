"""Joins the ranks of a gang into torch.distributed's default process group, and takes them out again.

The port can't be stolen between choosing and using it: rank 0 opens the store on a port the system picks, and keeps it.
"""

import os
import socket
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from separation.group import WorkerGroup
from separation.supervise import deadline, together

_stores: dict[int, Any] = {}


def free_port(host: str = "") -> int:
    """A TCP port nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def rank_environment(*, rank: int, world: int, address: str, port: int, timeout: float) -> dict[str, str]:
    """What `join` needs, under torchrun's names; GANG_TIMEOUT is in seconds. Each rank sees its own devices from 0."""
    if not 0 <= rank < world:
        raise ValueError(f"rank must be in 0..{world - 1}, got {rank}")
    return {
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GANG_TIMEOUT": str(timeout),
    }


def open_store(world: int, timeout: float) -> int:
    """On rank 0: opens the gang's store and returns its port. Earlier stores of this process are closed."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    _stores.clear()
    store = TCPStore("0.0.0.0", 0, world, True, timedelta(seconds=timeout), wait_for_workers=False)
    _stores[store.port] = store
    return int(store.port)


def join(environment: Mapping[str, str], device: str = "cpu") -> None:
    """Inside a rank: joins the default group, nccl on cuda and gloo elsewhere. Raises RuntimeError if it is in one.

    Every collective of the group has the time-out in GANG_TIMEOUT. A missing rank raises DistStoreError.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    if dist.is_initialized():
        raise RuntimeError("this process is in a gang already: leave() it first")
    os.environ.update(environment)
    rank, world, port = (int(environment[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    limit = timedelta(seconds=float(environment["GANG_TIMEOUT"]))
    store = _stores.get(port) if rank == 0 else None
    if store is None:
        address = environment["MASTER_ADDR"]
        store = TCPStore(address, port, world, rank == 0, limit, wait_for_workers=False)
    on_gpu = device.startswith("cuda")
    if on_gpu:
        torch.cuda.set_device(0)
    dist.init_process_group(
        "cuda:nccl,cpu:gloo" if on_gpu else "gloo",
        store=PrefixStore(f"gang-{port}", store),
        rank=rank,
        world_size=world,
        timeout=limit,
        device_id=torch.device("cuda", 0) if on_gpu else None,
    )


def leave() -> None:
    """Leaves the default group if in one. Safe when other ranks are dead already."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    _stores.clear()


async def join_process_group(group: WorkerGroup, *, device: str = "cpu", timeout: float) -> None:
    """Makes the group's workers the ranks 0..n-1 of a new default process group, leaving any earlier one first."""
    world = len(group.workers)
    async with deadline(timeout, f"joining the {world} ranks of {group.spec.name}"):
        for worker in group.workers:
            await worker.call("separation.rendezvous:leave")
        master = group.workers[0]
        port = await master.call("separation.rendezvous:open_store", world, timeout)
        environments = [
            rank_environment(rank=rank, world=world, address=master.node, port=port, timeout=timeout)
            for rank in range(world)
        ]
        await together(
            *(
                worker.call("separation.rendezvous:join", environment, device)
                for worker, environment in zip(group.workers, environments, strict=True)
            )
        )
