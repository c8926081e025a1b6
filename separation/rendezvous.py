"""The default process group of torch.distributed: how the workers of a pool become its ranks, and leave it.

Rank 0 opens the store on a port that the system picks and keeps it, so that no other process can take it in between.
"""

import os
import socket
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from separation.group import Worker, WorkerGroup
from separation.supervise import deadline, together

LONGEST_TIMEOUT = 20 * 86_400.0
"""Seconds, for those who want to wait for ever: torch takes no infinity, and counts some waits in 31 bits of ms."""
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_stores: dict[int, Any] = {}


def rank_environment(*, rank: int, world: int, address: str, port: int, timeout: float) -> dict[str, str]:
    """What `join` needs, under torchrun's names; `timeout` is in seconds. Each rank sees its own devices from 0."""
    if not 0 <= rank < world:
        raise ValueError(f"rank must be in 0..{world - 1}, got {rank}")
    return {
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "PROCESS_GROUP_TIMEOUT": str(timeout),
    }


def open_store(world: int, timeout: float) -> int:
    """On rank 0: opens the group's store and returns its port. Earlier stores of this process are closed."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    _stores.clear()
    store = TCPStore("0.0.0.0", 0, world, True, timedelta(seconds=timeout), wait_for_workers=False)
    _stores[store.port] = store
    return int(store.port)


def join(environment: Mapping[str, str], device: str | None = None) -> None:
    """Inside a rank: joins the default group, with nccl on "cuda" and gloo on "cpu"; None is cuda where there is one.

    Raises RuntimeError in a process that is in a group already, DistStoreError where a rank is missing after
    PROCESS_GROUP_TIMEOUT seconds, which is the time-out of the group's collectives too.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    if dist.is_initialized():
        raise RuntimeError("this process is in a process group already: leave() it first")
    os.environ.update(environment)
    if GLOO_INTERFACE not in os.environ and (found := interface_towards(environment["MASTER_ADDR"])):
        os.environ[GLOO_INTERFACE] = found
    rank, world, port = (int(environment[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    limit = timedelta(seconds=float(environment["PROCESS_GROUP_TIMEOUT"]))
    store = _stores.get(port) if rank == 0 else None
    if store is None:
        address = environment["MASTER_ADDR"]
        store = TCPStore(address, port, world, rank == 0, limit, wait_for_workers=False)
    on_gpu = torch.cuda.is_available() if device is None else device.startswith("cuda")
    if on_gpu:
        torch.cuda.set_device(0)
    dist.init_process_group(
        "cuda:nccl,cpu:gloo" if on_gpu else "gloo",
        store=PrefixStore(f"group-{port}", store),
        rank=rank,
        world_size=world,
        timeout=limit,
        device_id=torch.device("cuda", 0) if on_gpu else None,
    )


def interface_towards(host: str) -> str | None:
    """Name of the network interface by which this machine reaches a host; None where that can't be told.

    Gloo alone would take the one that the machine's own name stands for: loopback as Debian writes /etc/hosts, or one
    that other nodes can't reach. Nothing is sent.
    """
    import psutil

    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            own = probe.getsockname()[0]
    except OSError:
        return None
    interfaces: dict[str, Any] = psutil.net_if_addrs()
    for name, addresses in interfaces.items():
        if any(address.address.partition("%")[0] == own for address in addresses):
            return name
    return None


def leave() -> None:
    """Leaves the default group if in one. Safe when other ranks are dead already."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    _stores.clear()


def abort() -> None:
    """Ends the collectives of the default group that are under way, with an error: a rank that died answers none.

    For a lane of its own. NCCL's ranks would wait for their time-out; gloo's see that a connection is closed.
    """
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        return
    group: Any = dist.group.WORLD
    for device in {torch.device(each) for each in group._device_types}:
        group._get_backend(device).abort()


async def join_process_group(group: WorkerGroup, *, timeout: float, members: Sequence[Worker] | None = None) -> None:
    """Makes the group's workers, or some of them, the ranks 0..n-1 of a new default process group.

    Each leaves any earlier one first; a single one of `members` stays outside of any. `timeout`, seconds, is that of
    joining and of every collective of the group later. Raises DeadlineExceeded.
    """
    workers = group.workers if members is None else members
    world, timeout = len(workers), min(timeout, LONGEST_TIMEOUT)
    async with deadline(timeout, f"joining the {world} ranks of {group.spec.name}"):
        await together(*(worker.call("separation.rendezvous:leave") for worker in workers))
        if members is not None and world == 1:
            return
        master = workers[0]
        port = await master.call("separation.rendezvous:open_store", world, timeout)
        environments = [
            rank_environment(rank=rank, world=world, address=master.node, port=port, timeout=timeout)
            for rank in range(world)
        ]
        calls = zip(workers, environments, strict=True)
        await together(*(worker.call("separation.rendezvous:join", environment) for worker, environment in calls))
