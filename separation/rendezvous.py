"""Rendezvous: the workers of a pool become the ranks of torch.distributed's default process group, and leave it.

Rank 0 opens the TCP store on a free port that the system picks, and keeps it, so that no other process can take it.
"""

import os
import socket
from datetime import timedelta
from typing import Any

from separation.group import WorkerGroup
from separation.supervise import deadline, together

# Largest time-out in seconds: torch accepts no infinity, and stores some waits as milliseconds in 31 bits.
MAX_TIMEOUT_SECONDS = 20 * 86_400.0
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"  # Environment variable with the name of gloo's network interface.
# Port → TCP store that this process has opened as rank 0; it must stay referenced to stay open.
_stores: dict[int, Any] = {}
_timeouts: list[timedelta] = []  # That of the default group which this process joined last; torch does not tell it.


def open_store(world: int, timeout: float) -> int:
    """Opens the group's store on rank 0, closes earlier stores of this process, and returns the port."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    _stores.clear()
    store = TCPStore("0.0.0.0", 0, world, True, timedelta(seconds=timeout), wait_for_workers=False)
    _stores[store.port] = store
    return int(store.port)


def join(rank: int, world: int, address: str, port: int, timeout: float, device: str | None = None) -> None:
    """Joins the default group as a rank, with nccl and gloo on "cuda", gloo on "cpu"; None: cuda if it is available.

    `address` and `port` are those of rank 0's store; `timeout`, in seconds, is that of joining and of every collective.
    Raises DistStoreError if a rank is missing when the time is over, and ValueError if the process is in a group.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    if GLOO_INTERFACE not in os.environ and (interface := interface_towards(address)):
        os.environ[GLOO_INTERFACE] = interface
    limit = timedelta(seconds=timeout)
    _timeouts[:] = [limit]
    # Rank 0 is a client of its own store, too.
    store = TCPStore(address, port, world, rank == 0 and port not in _stores, limit, wait_for_workers=False)
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


def neighbours(size: int) -> Any:
    """Returns the group of this rank and those beside it, `size` in all, with the time-out of the default group."""
    import torch.distributed as dist

    group, _ = dist.new_subgroups(size, timeout=_timeouts[0] if _timeouts else None)  # type: ignore[no-untyped-call]
    return group


def interface_towards(host: str) -> str | None:
    """Returns the name of the network interface on the route to a host; None if it is unknown. Nothing is sent."""
    # By default gloo would take the interface of the machine's host name, which may be loopback (Debian's /etc/hosts)
    # or unreachable for other nodes.
    import psutil

    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            local = probe.getsockname()[0]
    except OSError:
        return None
    interfaces: dict[str, Any] = psutil.net_if_addrs()
    for name, addresses in interfaces.items():
        if any(address.address.partition("%")[0] == local for address in addresses):
            return name
    return None


def leave() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    _stores.clear()


async def join_process_group(group: WorkerGroup, *, timeout: float) -> None:
    """Makes the workers the ranks 0..n-1 of a new default group; each leaves the earlier one. DeadlineExceeded."""
    world, timeout = len(group.workers), min(timeout, MAX_TIMEOUT_SECONDS)
    async with deadline(timeout, f"joining the {world} ranks of {group.spec.name}"):
        await together(*(worker.call("separation.rendezvous:leave") for worker in group.workers))
        master = group.workers[0]
        port = await master.call("separation.rendezvous:open_store", world, timeout)
        await together(
            *(
                worker.call("separation.rendezvous:join", rank, world, master.node, port, timeout)
                for rank, worker in enumerate(group.workers)
            )
        )
