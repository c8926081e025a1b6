"""Tests of `placement=shared` with `rollout.text_encoder=cached` on one GPU: where the shared base is meanwhile."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from async_flowrl.policies.pipeline import PipelinePolicy
from async_flowrl.policies.registry import resolve_model
from async_flowrl.rollout import text_encoder as stored_embeddings
from async_flowrl.rollout.text_encoder import encode_one
from async_flowrl.shared.shared_worker import SharedWorker
from async_flowrl.types import Conditioning, EmbeddingKey
from tests.support import trainer_rig as rig
from tests.support.tiny import request

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
LIMIT = 240.0
"""Seconds after which a thread that has not ended hangs."""


def worker_of(where: str, upcoming: tuple[EmbeddingKey, ...] = ()) -> SharedWorker:
    """A process that samples and trains, not loaded yet."""
    config = rig.tiny_config()
    config.placement, config.model.dtype, config.model.tiny.layers = "shared", "float32", 1
    config.rollout.text_encoder = where
    return SharedWorker(config, resolve_model(config.model), 0, "shared-0", upcoming=upcoming)


def loaded(where: str) -> SharedWorker:
    worker = worker_of(where)
    worker.rollout.load()
    worker.trainer.load()
    worker.trainer.sender.stage(0)
    assert worker.rollout.keep_local(worker.trainer.sender.policy.seal(0)) is not None
    return worker


def images_of(worker: SharedWorker) -> list[Any]:
    """Images of one prompt and of another that is new in mid-run."""
    asked = replace(request(3), version=0)
    new = replace(asked, prompt=replace(asked.prompt, text="blue"))
    return [worker.rollout.generate([each])[1] for each in (asked, new)]


def trained(worker: SharedWorker) -> str:
    """The digest of the weights after a training step."""
    config = worker.trainer.config
    sampler = rig.Sampler(config)
    sampler.load(rig.weights(worker.trainer))
    rig.update(worker.trainer, 0, [sampler.group(0, group) for group in range(config.prompts_per_step)])
    return worker.trainer.parameters.fingerprint()


def base_of(worker: SharedWorker) -> list[Tensor]:
    """The weights that both networks of the process have in common."""
    sampling = {id(tensor) for tensor in worker.rollout.engine.policy.transformer.parameters()}
    both = [tensor for tensor in worker.trainer.policy.transformer.parameters() if id(tensor) in sampling]
    assert len(both) > 20
    return both


class Encoding:
    """Notes where the base is at each encoding of a prompt, while the trainer rank has its model loaded beside."""

    def __init__(self, worker: SharedWorker, base: list[Tensor]) -> None:
        self._base = base
        self.places: list[set[str]] = []
        self.load = threading.Thread(target=worker.trainer.load, daemon=True)

    def encode(self, policy: PipelinePolicy, asked: EmbeddingKey) -> Conditioning:
        if not self.places:
            self.load.start()
            self.load.join(2.0)  # Where nothing holds it back it is done by then, also on a pretended device.
        self.places.append({tensor.device.type for tensor in self._base})
        return encode_one(policy, asked)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNC_FLOWRL_CACHE", str(tmp_path))


def test_the_base_of_both_networks_waits_on_the_host_while_text_encoders_have_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A newcomer loads what trains while it samples already. Images and trained weights are those of a resident one."""
    resident = loaded("resident")
    images, digest = images_of(resident), trained(resident)
    worker = loaded("cached")
    encoding = Encoding(worker, base_of(worker))
    monkeypatch.setattr(stored_embeddings, "encode_one", encoding.encode)
    again = images_of(worker)
    encoding.load.join(LIMIT)
    assert not encoding.load.is_alive()
    assert encoding.places == [{"cpu"}] * 2
    assert {tensor.device.type for tensor in base_of(worker)} == {"cuda"}
    assert all(np.array_equal(one, other) for one, other in zip(images, again, strict=True))
    assert trained(worker) == digest
