"""Tests on one GPU, real or pretended: host waits and noise of a ticket, and text encoders that are offloaded."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from async_flowrl import transfers
from async_flowrl.algorithms import sde
from async_flowrl.config.schema import Config, LoraConfig
from async_flowrl.policies.lora import add_lora
from async_flowrl.policies.pipeline import PipelinePolicy
from async_flowrl.policies.registry import load_policy, resolve_model
from async_flowrl.rollout.diffusers_engine import DiffusersEngine
from async_flowrl.rollout.registry import PARTS, load_engine, open_embeddings
from async_flowrl.seeds import generator
from async_flowrl.types import RolloutRequest
from tests.support.families import NAMES, TWO_AND_SLOW, how, model_config, passes_by_length
from tests.support.tiny import request

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
IMAGES = 3
FAMILIES = pytest.mark.parametrize("family", NAMES)
TWO_FAMILIES = pytest.mark.parametrize("family", TWO_AND_SLOW)


def policy_on_device(family: str, where: str = "resident") -> PipelinePolicy:
    policy = load_policy(resolve_model(model_config(family)), dtype="float32", device="cuda", parts=PARTS[where])
    add_lora(policy.transformer, LoraConfig(rank=4, alpha=10.0), policy, seed=0)
    policy.transformer.requires_grad_(False).eval()
    return policy


def engine_of(family: str, where: str = "resident", *, batch_size: int | None = None) -> DiffusersEngine:
    policy = policy_on_device(family, where)
    return DiffusersEngine(policy, batch_size=batch_size, device="cuda", text_encoder=where)


def ticket(family: str, guidance: float) -> RolloutRequest:
    return request(IMAGES, how=how(family, cfg=guidance))


class Waits:
    """Counts calls of `transfers.wait`; any other wait of the host is an error, or on a pretended device counted."""

    def __init__(self) -> None:
        self.meant = 0
        self.others: list[str] = []

    @contextmanager
    def watched(self) -> Iterator[None]:
        watch = self._on_pretended if "pretended" in torch.cuda.get_device_name() else self._on_real
        with watch():
            yield

    @contextmanager
    def _on_real(self) -> Iterator[None]:
        wait = transfers.wait

        def meant(device: torch.device) -> None:
            self.meant += 1
            torch.cuda.set_sync_debug_mode("default")
            wait(device)
            torch.cuda.set_sync_debug_mode("error")

        with patch.object(transfers, "wait", meant):
            torch.cuda.set_sync_debug_mode("error")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode("default")

    @contextmanager
    def _on_pretended(self) -> Iterator[None]:
        from pretended.report import SYNC, watched

        with patch.object(transfers, "wait", wraps=transfers.wait) as wait, watched(SYNC) as seen:
            yield
        self.meant = wait.call_count
        self.others = [
            f"{count} x {one}" for one, count in seen.items() if "async_flowrl/transfers.py" not in one.where
        ]


@FAMILIES
@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_a_ticket_waits_twice_whatever_its_steps_and_chunks(family: str, guidance: float) -> None:
    """For the trajectory and for the images; never in a denoising step. The prompts are cached."""
    engine, asked = engine_of(family, batch_size=1), ticket(family, guidance)
    engine.generate([asked])
    waits = Waits()
    with waits.watched():
        engine.generate([asked])
    assert waits.others == []
    assert waits.meant == 2


def test_the_noise_on_the_device_is_what_the_seeds_draw_on_the_host() -> None:
    """Every step's noise is drawn into pinned memory while copies of earlier steps may still be under way."""
    engine, asked = engine_of("qwen_image"), ticket("qwen_image", 1.0)
    used: list[Tensor] = []
    sample = sde.sample

    def kept(step: sde.Transition, noise: Tensor) -> Tensor:
        used.append(noise.clone())
        return sample(step, noise)

    with patch.object(sde, "sample", kept):
        found = engine.generate([asked])[0].trajectory
    assert found is not None and len(used) == len(asked.noise_steps)
    for row, (initial, noise) in enumerate(zip(asked.initial_seeds, asked.noise_seeds, strict=True)):
        shape = found.latents.shape[2:]
        assert np.array_equal(found.latents[row, 0], torch.randn(shape, generator=generator(initial)).numpy())
        source = generator(noise)
        for drawn in used:
            assert torch.equal(drawn[row].cpu(), torch.randn(shape, generator=source))


@TWO_FAMILIES
def test_offloaded_text_encoders_make_the_same_images_in_less_memory(family: str) -> None:
    """Images, trajectory and the trainer's negatives are equal; the device is freed of the encoders' bytes."""
    asked = ticket(family, 3.0)
    engine_of(family).generate([asked])  # tables that networks keep on the device once they have run
    held = {}
    made = {}
    for where in ("resident", "offload"):
        gc.collect()  # what earlier tests left in cycles must not be freed between the two readings
        before = torch.cuda.memory_allocated()
        engine = engine_of(family, where)
        made[where] = engine.generate([asked])[0], engine.encode(["another negative"])
        held[where] = torch.cuda.memory_allocated() - before
        encoders = engine.policy.text_encoders
        weights = sum(tensor.nbytes for part in encoders for tensor in (*part.parameters(), *part.buffers()))
        del engine, encoders
    assert held["resident"] - held["offload"] >= weights > 0
    (one, negative), (two, other) = made["resident"], made["offload"]
    assert one.trajectory is not None and two.trajectory is not None
    assert np.array_equal(one.images, two.images)
    assert np.array_equal(one.trajectory.latents, two.trajectory.latents)
    for name, value in negative[0].items():
        assert np.array_equal(value, other[0][name])


@TWO_FAMILIES
def test_cached_embeddings_make_the_same_images_and_the_network_comes_back_whole(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new prompt in mid-run has the frozen weights wait on the host while the text encoders have their place."""
    monkeypatch.setenv("ASYNC_FLOWRL_CACHE", str(tmp_path))
    asked = ticket(family, 3.0)
    new = replace(asked, prompt=replace(asked.prompt, text="blue"))
    resident = engine_of(family)
    expected = [resident.generate([each])[0] for each in (asked, new)]
    del resident
    config = Config()
    config.model, config.lora = model_config(family), LoraConfig(rank=4, alpha=10.0)
    config.rollout.text_encoder = "cached"
    config.model.dtype = "float32"
    model = resolve_model(config.model)
    embeddings = open_embeddings(config, model, "cuda", [])
    assert embeddings is not None
    engine, _ = load_engine(config, model, "cuda", embeddings)
    made = [engine.generate([each])[0] for each in (asked, new)]
    assert {tensor.device.type for tensor in engine.live_tensors().values()} == {"cuda"}
    for one, other in zip(expected, made, strict=True):
        assert one.trajectory is not None and other.trajectory is not None
        assert np.array_equal(one.images, other.images)
        assert np.array_equal(one.trajectory.latents, other.trajectory.latents)


@FAMILIES
def test_guidance_makes_as_many_passes_for_every_prompt(family: str) -> None:
    """Ranks that share a base by FSDP2 would wait for ever for one that makes fewer."""
    assert len(set(passes_by_length(policy_on_device(family)))) == 1
