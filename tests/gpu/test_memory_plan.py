"""Tests of rehearsal and memory plan against the peak of torch's allocator, on one GPU with a model of some 100 MB."""

import gc
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from async_flowrl.cli.rehearse import peak
from async_flowrl.config.compose import compose_config
from async_flowrl.config.schema import Config
from async_flowrl.memory.footprints import Footprint, plan_memory
from async_flowrl.memory.rehearsal.model import FakeModel, conditioning
from async_flowrl.memory.rehearsal.rank import end_step, rehearse_trainer, settle, update_request
from async_flowrl.memory.rehearsal.rollout import deliver, rehearse_rollout, ticket_request
from async_flowrl.policies.registry import resolve_model
from async_flowrl.rollout.rollout_worker import RolloutWorker
from async_flowrl.training.messages import TrainRequest
from async_flowrl.training.trainer_worker import TrainerWorker
from tests.support.fused_attention import fused_attention

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
MIDDLE = (
    "model.tiny.layers=5",
    "model.tiny.heads=16",
    "lora.rank=32",
    "rollout.resolution=256",
    "rollout.num_inference_steps=2",
    "group_size=4",
    "trainer.micro_batch_size=2",
    "trainer.timesteps_per_forward=1",
)
SETTINGS = {
    "float32": (),
    "checkpointed, guided, averaged, encoder offloaded": (
        "model.dtype=bfloat16",
        "trainer.gradient_checkpointing=full",
        "trainer.micro_batch_size=4",
        "rollout.true_cfg_scale=4.0",
        "trainer.ema_decay=0.9",
        "rollout.text_encoder=offload",
    ),
    "quantised, sum and versions in host memory": (
        "model.dtype=bfloat16",
        "model.quantize=nf4",
        "trainer.sum_on=host",
        "trainer.versions_on=host",
        "rollout.versions_on=host",
    ),
}


@pytest.fixture(params=[pytest.param(name, marks=() if name == "float32" else pytest.mark.slow) for name in SETTINGS])
def config(request: pytest.FixtureRequest) -> Config:
    return compose_config("one_step_off", [*MIDDLE, *SETTINGS[request.param]])


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(before)


def test_a_trainer_rank_takes_what_is_planned_and_rehearsed(config: Config) -> None:
    worker = TrainerWorker(config, resolve_model(config.model), 0, "trainer-0")

    def work() -> None:
        worker.load()
        settle(worker, config)
        request, trajectory = update_request(worker, config)
        worker.update.set_negatives({"negative": trajectory.conditioning})
        worker.train(request, trajectory)
        end_step(worker, TrainRequest(request.step, ()))

    taken = peak_of(work)
    agrees(taken, rehearsed(rehearse_trainer, config), plan_memory(config).trainer)


def test_a_rollout_worker_takes_what_is_planned_and_rehearsed(config: Config) -> None:
    worker = RolloutWorker(config, resolve_model(config.model), 0, "rollout-0")

    def work() -> None:
        worker.load()
        policy = worker.engine.policy  # type: ignore[attr-defined]
        policy.encode = lambda texts, system=None, negative=False: [conditioning(policy) for _ in texts]
        newest, arriving = deliver(worker, config)
        worker.generate([ticket_request(config, newest)])
        del arriving

    taken = peak_of(work)
    agrees(taken, rehearsed(rehearse_rollout, config), plan_memory(config).rollout)


def rehearsed(rehearse: Callable[[Config, FakeModel], Any], config: Config) -> int:
    """Rehearses in a process of its own, as the command does: nothing that other tests have left behind counts."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(peak_rehearsed, rehearse, config).result()


def peak_rehearsed(rehearse: Callable[[Config, FakeModel], Any], config: Config) -> int:
    return peak(rehearse(config, FakeModel.of(config)).phases.values()).peak


def peak_of(work: Callable[[], None]) -> int:
    """Bytes that the allocator handed out at once, at most, above what there was."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with attention():
        work()
    return torch.cuda.max_memory_allocated() - before


def attention() -> AbstractContextManager[None]:
    """A pretended device computes attention with the CPU's kernels, which keep every score."""
    return fused_attention() if "pretended" in torch.cuda.get_device_name() else nullcontext()


def agrees(taken: int, rehearsed: int, planned: Footprint) -> None:
    parts = sum(planned.parts.values())
    print(f"taken {taken / 2**20:.1f} MiB, rehearsed {rehearsed / taken:.3f}, planned {parts / taken:.3f}")
    assert taken > 50e6
    assert rehearsed == pytest.approx(taken, rel=0.1)
    assert parts == pytest.approx(taken, rel=0.1)
