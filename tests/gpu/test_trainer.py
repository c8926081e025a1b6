"""Tests of a trainer rank on one GPU, real or pretended: base weights, kernels, optimizer and host waits."""

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch.distributed.tensor import DTensor

from async_flowrl.config.schema import Config
from async_flowrl.policies.registry import resolve_model
from async_flowrl.rollout.rollout_worker import RolloutWorker
from async_flowrl.training.trainer_worker import TrainerWorker
from separation.rendezvous import join, leave
from tests.support import trainer_rig as rig
from tests.support.families import NAMES, model_config
from tests.support.ports import free_port

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(autouse=True)
def other_kernels_afterwards() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of this process alone, over NCCL."""
    join(0, 1, "127.0.0.1", free_port(), timeout=60.0)
    try:
        yield
    finally:
        leave()


def base(worker: TrainerWorker) -> list[torch.Tensor]:
    return [p for name, p in worker.policy.transformer.named_parameters() if ".lora_" not in name]


def trained(config: Config) -> tuple[TrainerWorker, str]:
    """A rank after one update, and the digest of its weights."""
    handed = [rig.Sampler(config).group(0, index) for index in (0, 1)]
    worker = rig.trainer(config)
    rig.update(worker, 0, handed)
    return worker, worker.parameters.fingerprint()


@pytest.mark.usefixtures("group")
def test_the_base_whole_sharded_and_offloaded_train_alike() -> None:
    whole, one = trained(rig.tiny_config(shard="none"))
    assert all(p.device.type == "cuda" and not isinstance(p, DTensor) for p in base(whole))
    sharded, other = trained(rig.tiny_config(shard="full"))
    assert all(isinstance(p, DTensor) and p.to_local().device.type == "cuda" for p in base(sharded))
    offloaded, third = trained(rig.tiny_config(cpu_offload=True))
    assert all(isinstance(p, DTensor) and p.to_local().device.type == "cpu" for p in base(offloaded))
    assert one == other == third


def test_two_trainers_give_the_same_bits() -> None:
    assert trained(rig.tiny_config())[1] == trained(rig.tiny_config())[1]


def test_kernels_that_do_not_repeat_their_bits_are_refused_unless_they_are_asked_for() -> None:
    """Refused and not warned of: with a warning, torch still takes attention kernels that do not repeat theirs."""
    for worker in (TrainerWorker, RolloutWorker):
        for deterministic in (False, True):
            torch.use_deterministic_algorithms(False)
            config = replace(rig.tiny_config(), deterministic=deterministic)
            worker(config, resolve_model(config.model), 0, "worker-0").load()
            assert torch.are_deterministic_algorithms_enabled() == deterministic
            assert not torch.is_deterministic_algorithms_warn_only_enabled()


@contextmanager
def waits() -> Iterator[Callable[[], int]]:
    """How often the host waited for the device inside, but for the thread that copies the state beside it."""
    if "pretended" in torch.cuda.get_device_name():
        from pretended.report import SYNC, watched

        with watched(SYNC) as seen:
            yield lambda: sum(count for one, count in seen.items() if "training/snapshots.py" not in one.where)
        return
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            by_thread: list[str] = []
            warnings.showwarning = lambda message, *_: by_thread.append(  # type: ignore[assignment]
                f"{threading.current_thread().name}: {message}"
            )
            yield lambda: sum(
                "called a synchronizing CUDA operation" in one and not one.startswith("snapshot") for one in by_thread
            )
    finally:
        torch.cuda.set_sync_debug_mode("default")


def settings(name: str) -> Config:
    config = rig.tiny_config(micro_batch_size=1)
    if name in NAMES:
        config.model = model_config(name)
        config.rollout.guidance_scale = 3.5 if name == "flux" else 0.0
    elif name == "guidance":
        config.rollout.true_cfg_scale = 3.0
    else:
        config.algorithm.name = name
    if name in ("diffusion_nft", "dpo"):
        config.trainer.micro_batch_size = 2
    return config


@pytest.mark.parametrize("name", [*NAMES, "guidance", "diffusion_nft", "dpo"])
def test_the_host_waits_once_per_group_and_not_per_micro_batch(name: str) -> None:
    """Once for a group's sums, three times for the optimizer step: the sum's account, its norm, how far it went."""
    config = settings(name)
    sampler, worker = rig.Sampler(config), rig.trainer(config)
    if name == "guidance":
        worker.update.set_negatives(sampler.negatives())
    handed = [sampler.group(0, index) for index in (0, 1)]
    if name == "dpo":
        handed = [(replace(meta, parts=((0, 1),), advantages=(1.0, -1.0, 0.0, 0.0)), t) for meta, t in handed]
    rig.update(worker, 0, handed)
    with waits() as counted:
        rig.update(worker, 1, handed)
    assert counted() <= len(handed) + 3
    with waits() as counted:
        float(worker.parameters.values.detach().sum())
    assert counted() == 1
