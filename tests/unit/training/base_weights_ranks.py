"""Code of the two ranks in tests of streamed base weights; a module of its own, so that processes can import it."""

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as processes
from torch.distributed.tensor import DTensor

from async_flowrl.config.schema import LoraConfig
from async_flowrl.policies.lora import add_lora, lora_parameters
from async_flowrl.policies.registry import load_policy, resolve_model
from async_flowrl.training.fsdp import shard
from async_flowrl.training.parts import World
from async_flowrl.training.rank_model import base_tensors, digest_of_stored, stream_base
from separation.rendezvous import join, leave
from tests.support.allocations import Allocations
from tests.support.families import model_config
from tests.support.forked import METHOD
from tests.support.ports import free_port


def streamed(cases: list[tuple[str, str]], folder: Path) -> list[dict[tuple[str, str], dict[str, Any]]]:
    """By rank and (family, dtype): the whole tensors, the digest, and the most memory that loading took."""
    for family, _ in cases:
        resolve_model(model_config(family))
    processes.start_processes(_rank, args=(free_port(), cases, str(folder)), nprocs=2, start_method=METHOD)
    return [pickle.loads((folder / f"rank{rank}.pkl").read_bytes()) for rank in range(2)]


def _rank(rank: int, port: int, cases: list[tuple[str, str]], folder: str) -> None:
    torch.set_num_threads(1)
    join(rank, 2, "127.0.0.1", port, timeout=240.0, device="cpu")
    found = {case: _load(*case) for case in cases}
    (Path(folder) / f"rank{rank}.pkl").write_bytes(pickle.dumps(found))
    leave()


def _load(family: str, dtype: str) -> dict[str, Any]:
    world = replace(World.current(), per_replica=World.current().size)
    model = resolve_model(replace(model_config(family), dtype=dtype))
    policy = load_policy(model, dtype=dtype, device="cpu", parts="structure")
    digest = digest_of_stored(model, world, {name for name, _ in policy.transformer.named_parameters()})
    add_lora(policy.transformer, LoraConfig(2, 16.0), policy, seed=0)
    adapter = lora_parameters(policy.transformer)
    device = torch.device("cpu")
    shard(policy, set(adapter.values()), world, device=device, sharded=True, offload=False)
    with Allocations() as counted:
        stream_base(policy.transformer, model, world, device=device, offload=False)
    tensors = {
        name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()
        for name, t in base_tensors(policy.transformer).items()
    }
    sharded = sum(isinstance(t, DTensor) for t in base_tensors(policy.transformer).values())
    return {"tensors": tensors, "digest": digest, "peak": counted.peak, "sharded": sharded}
